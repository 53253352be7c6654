"""Renames that replace nothing, and renames that exchange two names, in one step (Linux: ``renameat2``)."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
NO_REPLACE = 1
"""Flag of a rename that fails where something has the new name already."""
EXCHANGE = 2
"""Flag of a rename after which two files or directories have each other's names."""
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""Error numbers of systems that cannot do what a flag asks for."""


def rename(source: Path, target: Path, flag: int) -> None:
    """Rename a file or a directory.

    Args:
        source: Its name.
        target: Its new name.
        flag: `NO_REPLACE` or `EXCHANGE`.

    Raises:
        OSError: The system refuses, with one of `UNSUPPORTED` if it cannot exchange names.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS  # also where the C library has no such function
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
            return
        code = ctypes.get_errno()
    # A plain rename replaces an empty directory at most, never a checkpoint.
    if flag == NO_REPLACE and code in UNSUPPORTED and not target.is_file():
        source.rename(target)
        return
    raise OSError(code, os.strerror(code), str(target))
