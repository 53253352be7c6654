"""The identity of a root of durable checkpoints: the file ``.dtckpt-root``, with a random number.

A local save has it in its name. So saves of a job whose root was deleted do not pass for those of the next job that
uses the same path: they are listed, never restored, and never removed.
"""

from __future__ import annotations

import logging
import re
import secrets

from dtckpt.checkpoint.tiers.records import UNKNOWN_ROOT
from dtckpt.errors import DtckptError
from dtckpt.storage.folder import Folder

logger = logging.getLogger("dtckpt.tiers")

IDENTITY_NAME = ".dtckpt-root"
_IDENTITY = re.compile(r"[0-9a-f]{8}")


def root_identity(folder: Folder) -> str:
    """Return the identity of a root; it gets one if it has none. For client 0 alone.

    Returns:
        The identity; `UNKNOWN_ROOT` if storage does not say it now, or the file is damaged.
    """
    try:
        try:
            text = folder.read_whole(IDENTITY_NAME, 100).decode("ascii", "replace").strip()
        except FileNotFoundError:
            folder.make()
            folder.write(IDENTITY_NAME, secrets.token_hex(4).encode())
            text = folder.read_whole(IDENTITY_NAME, 100).decode("ascii", "replace").strip()
    except (DtckptError, OSError) as error:
        logger.warning("the root does not say whether the local tier is its own, which is taken for granted: %s", error)
        return UNKNOWN_ROOT
    if not _IDENTITY.fullmatch(text):
        logger.warning("%s of the root is damaged; the local tier is taken for its own", IDENTITY_NAME)
        return UNKNOWN_ROOT
    return text
