"""The one place where errors of storage libraries become errors of `dtckpt.errors`."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
)

_FULL = re.compile(r"No space left|ENOSPC|Disk quota exceeded|EDQUOT|RESOURCE_EXHAUSTED")
_DENIED = re.compile(r"PERMISSION_DENIED|Permission denied|Read-only file system|UNAUTHENTICATED|EACCES|EROFS")
_DAMAGED = re.compile(r"DATA_LOSS|NOT_FOUND|OUT_OF_RANGE|INVALID_ARGUMENT|Invalid|is missing|corrupt", re.IGNORECASE)


@contextmanager
def translated(action: str, where: object, *, is_read: bool = False) -> Iterator[None]:
    """Turn what TensorStore and the operating system raise into a class from `dtckpt.errors`.

    Args:
        action: What was tried, for the message ("write chunk 3 of tensor 'w'").
        where: The path or URL.
        is_read: Whether stored data was read, so that missing or malformed bytes mean damage.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise _os_error(error, f"cannot {action} at {where}: {error.strerror or error}") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:
        text = f"cannot {action} at {where}: {_first_line(error)}"
        if _FULL.search(text):
            raise StorageFullError(f"{text}; free space and save again") from error
        if _DENIED.search(text):
            raise StoragePermissionError(f"{text}; check the permissions") from error
        if is_read and _DAMAGED.search(text):
            raise CheckpointCorruptError(f"{text}; restore another checkpoint") from error
        raise StorageError(text) from error


def _os_error(error: OSError, text: str) -> CheckpointError:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return CheckpointExistsError(f"{text}; something took the path meanwhile")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{text}; free space and save again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoragePermissionError(f"{text}; check the permissions")
    return StorageError(text)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:500]
