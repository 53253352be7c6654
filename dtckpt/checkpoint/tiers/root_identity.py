"""The identity of a root of durable checkpoints: the file ``.dtckpt-root``, with a random number.

The name of a local save contains this number. So a restore does not mistake saves of a deleted root for saves of the
next job at the same path. The tier lists saves of the deleted root, but never restores or removes them.

A root gets its identity from client 0 at the first save, when client 0 has the right to change the root. The file also
contains the path. A root that was copied or moved to its path is another root, and gets a new number.

Before that, the clients agree on an identity for the root when they join. If they join to restore, they take the root
of the newest step in the tier, because they want the remaining steps. If they join to save, and the root is empty, they
take a new identity.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from dtckpt.checkpoint.parts.host_folder import job_name
from dtckpt.checkpoint.parts.records import UNKNOWN_ROOT, SaveId
from dtckpt.errors import DtckptError
from dtckpt.storage.folder import Folder

logger = logging.getLogger("dtckpt.tiers")

IDENTITY_NAME = ".dtckpt-root"
NO_IDENTITY = ""
COPIED = "copied"
"""Stands for the identity of a root that was copied or moved to its path, and has no new identity yet."""
_IDENTITY = re.compile(r"([0-9a-f]{8})(?: ([0-9a-f]{16}))?")


class RootFacts(NamedTuple):
    """Facts about the root, which client 0 sends to the others.

    Args:
        has_steps: Whether there is a checkpoint.
        identity: As `read_identity` returns it.
        newest: The number of the newest commit; 0: unknown.
    """

    has_steps: bool
    identity: str
    newest: int

    def identity_for(self, held: Sequence[SaveId], new: str, *, is_save: bool) -> str:
        """Return the identity that the clients give to the root; the same on all clients.

        Args:
            held: The saves that the hosts hold, the newest first.
            new: A new identity.
            is_save: Whether the clients join to save, and not to restore.
        """
        newest = next((save.root for save in held if save.root != UNKNOWN_ROOT), None)
        if self.identity == COPIED:
            return new
        if self.identity == NO_IDENTITY:
            return new if newest is None or (is_save and not self.has_steps) else newest
        return newest or UNKNOWN_ROOT if self.identity == UNKNOWN_ROOT else self.identity


def read_identity(folder: Folder, root: str) -> str:
    """Return the identity of a root. For client 0 alone.

    Args:
        folder: The files of the root.
        root: Its path or URL.

    Returns:
        The identity; `NO_IDENTITY` if there is none, or a damaged one; `COPIED` if the root got it at another path;
        `UNKNOWN_ROOT` if storage does not answer now.
    """
    try:
        text = folder.read_whole(IDENTITY_NAME, 100).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return NO_IDENTITY
    except ValueError as error:  # too long, or no file
        text = str(error)
    except (DtckptError, OSError) as error:
        logger.warning("the root does not say whether the local tier is its own, which is taken for granted: %s", error)
        return UNKNOWN_ROOT
    match = _IDENTITY.fullmatch(text)
    if match is None or match[1] == UNKNOWN_ROOT:
        logger.warning("%s of the root is damaged; the local tier is taken for its own", IDENTITY_NAME)
        return NO_IDENTITY
    if match[2] not in (None, job_name(root)):
        logger.warning("%s was copied or moved to its path; the local tier there is not taken for its own", root)
        return COPIED
    return match[1]


def claim_identity(folder: Folder, root: str, wanted: str) -> str:
    """Return the identity of a root; give it the wanted identity if it has none.

    For client 0 alone, when it has the right to change the root.

    Args:
        folder: The files of the root.
        root: Its path or URL.
        wanted: The identity that the clients took for it when they joined.
    """
    found = read_identity(folder, root)
    if found == UNKNOWN_ROOT:
        return wanted
    if found not in (NO_IDENTITY, COPIED):
        return found
    identity = secrets.token_hex(4) if wanted == UNKNOWN_ROOT else wanted
    try:
        folder.replace(IDENTITY_NAME, f"{identity} {job_name(root)}".encode())
    except (DtckptError, OSError) as error:
        logger.warning("the root gets no identity, so the local tier will be taken for its own: %s", error)
    return identity
