"""The identity of a root of durable checkpoints: the file ``.dtckpt-root``, with a random number.

A local save has it in its name. So saves of a job whose root was deleted do not pass for those of the next job that
uses the same path: they are listed, never restored, and never removed.

A root without the file gets it when the clients join. If they join to restore, they ask for what is left, and the root
gets the identity of the newest step in the tier. If a job begins to save there, it gets a new one.
"""

from __future__ import annotations

import logging
import re

from dtckpt.checkpoint.tiers.records import UNKNOWN_ROOT
from dtckpt.errors import DtckptError
from dtckpt.storage.folder import Folder

logger = logging.getLogger("dtckpt.tiers")

IDENTITY_NAME = ".dtckpt-root"
NO_IDENTITY = ""
_IDENTITY = re.compile(r"[0-9a-f]{8}")


def read_identity(folder: Folder) -> str:
    """Return the identity of a root. For client 0 alone.

    Returns:
        The identity; `NO_IDENTITY` if it has none; `UNKNOWN_ROOT` if storage does not say it now, or it is damaged.
    """
    try:
        text = folder.read_whole(IDENTITY_NAME, 100).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return NO_IDENTITY
    except (DtckptError, OSError) as error:
        logger.warning("the root does not say whether the local tier is its own, which is taken for granted: %s", error)
        return UNKNOWN_ROOT
    if not _IDENTITY.fullmatch(text):
        logger.warning("%s of the root is damaged; the local tier is taken for its own", IDENTITY_NAME)
        return UNKNOWN_ROOT
    return text


def write_identity(folder: Folder, identity: str) -> None:
    """Give a root its identity. For client 0 alone."""
    try:
        folder.make()
        folder.write(IDENTITY_NAME, identity.encode())
    except (DtckptError, OSError) as error:
        logger.warning("the root gets no identity, so the local tier will be taken for its own: %s", error)
