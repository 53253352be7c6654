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
    DtckptError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
)

_FULL = re.compile(r"No space left|ENOSPC|Disk quota exceeded|EDQUOT|RESOURCE_EXHAUSTED")
_DENIED = re.compile(r"PERMISSION_DENIED|Permission denied|Read-only file system|UNAUTHENTICATED|EACCES|EROFS")
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket (does not exist|is not found|not found)", re.IGNORECASE)
_PUT_OFF = re.compile(r"SlowDown|Throttl|TooManyRequests|UNAVAILABLE", re.IGNORECASE)
_DAMAGED = re.compile(
    r"DATA_LOSS|NOT_FOUND|OUT_OF_RANGE|INVALID_ARGUMENT|Invalid|is missing|corrupt"
    r"|Zstd-compressed|ZSTD_|Blosc|uncompressed byte",
    re.IGNORECASE,
)


@contextmanager
def translated(action: str, where: object, *facts: object, is_read: bool = False) -> Iterator[None]:
    """Turn what TensorStore and the operating system raise into a class from `dtckpt.errors`.

    Args:
        action: What was tried, for the message ("write chunk {} of tensor {!r}").
        where: The path or URL.
        facts: What stands in the braces; without any, there are none.
        is_read: Whether stored data was read, so that missing or malformed bytes mean damage.
    """
    try:
        yield
    except DtckptError:
        raise
    except OSError as error:
        raise _os_error(error, f"cannot {_filled(action, facts)} at {where}: {error.strerror or error}") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:
        text = f"cannot {_filled(action, facts)} at {where}: {_first_line(error)}"
        if _FULL.search(text):
            raise StorageFullError(f"{text}; free space and save again") from error
        if _DENIED.search(text):
            raise StoragePermissionError(f"{text}; check the permissions") from error
        if _NO_BUCKET.search(text):
            raise StorageError(f"{text}; make the bucket first, or correct its name") from error
        if _PUT_OFF.search(text):
            raise StorageError(f"{text}; storage kept putting this off: try again later, with fewer clients") from error
        if is_read and _DAMAGED.search(text):
            raise CheckpointCorruptError(f"{text}; restore another checkpoint") from error
        raise StorageError(text) from error


def _os_error(error: OSError, text: str) -> CheckpointError:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return CheckpointExistsError(f"{text}; something took the path meanwhile")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{text}; free space and save again")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoragePermissionError(f"{text}; check the permissions")
    return StorageError(text)


def _filled(action: str, facts: tuple[object, ...]) -> str:
    return action.format(*facts) if facts else action


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:500]
