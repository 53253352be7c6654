"""The one place where errors of storage libraries become errors of `dtckpt.errors`."""

from __future__ import annotations

import errno
import re
from types import TracebackType

from dtckpt.comm import fork_guard
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
_PUT_OFF = re.compile(r"SlowDown|Throttl|TooManyRequests|UNAVAILABLE|http_response_code='(429|503)'", re.IGNORECASE)
_DAMAGED = re.compile(
    r"DATA_LOSS|NOT_FOUND|OUT_OF_RANGE|INVALID_ARGUMENT|Invalid|is missing|cut short|corrupt"
    r"|Zstd-compressed|ZSTD_|Blosc|uncompressed byte",
    re.IGNORECASE,
)


NO_FILE = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV)
"""What the operating system says where a path leads to something else than a file, or nowhere."""


class MalformedError(ValueError):
    """What is stored is nothing that a checkpoint holds: of another kind, or of another size."""


class translated:  # noqa: N801  (a context manager is used as a function is)
    """Turn what TensorStore and the operating system raise into a class from `dtckpt.errors`.

    A process that was forked from one that uses checkpoints is refused: every use of storage passes by here.

    Args:
        action: What was tried, for the message ("write chunk {} of tensor {!r}").
        where: The path or URL.
        facts: What stands in the braces; without any, there are none.
        is_read: Whether stored data was read, so that missing or malformed bytes mean damage.
    """

    __slots__ = ("_action", "_facts", "_is_read", "_where")

    def __init__(self, action: str, where: object, *facts: object, is_read: bool = False) -> None:
        self._action = action
        self._where = where
        self._facts = facts
        self._is_read = is_read

    def __enter__(self) -> None:
        fork_guard.validate_process()  # TensorStore ends a forked process that calls it, with SIGABRT

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (OSError, ValueError, RuntimeError, MemoryError)) and not isinstance(error, DtckptError):
            raise self._translation(error) from error

    def _translation(self, error: BaseException) -> CheckpointError:
        action = self._action.format(*self._facts) if self._facts else self._action
        if self._is_read and isinstance(error, OSError) and error.errno in NO_FILE:
            error = MalformedError(f"{error.filename or self._where} is no file: {error.strerror}")
        if isinstance(error, OSError):
            return _os_error(error, f"cannot {action} at {self._where}: {error.strerror or error}")
        if isinstance(error, MemoryError):
            return CheckpointError(f"cannot {action} at {self._where}: this host lacks the memory; {error}")
        said = str(error)
        text = f"cannot {action} at {self._where}: {_first_line(said)}"
        if _FULL.search(said):
            return StorageFullError(f"{text}; free space and save again")
        if _DENIED.search(said):
            return StoragePermissionError(f"{text}; check the permissions")
        if _NO_BUCKET.search(said):
            return StorageError(f"{text}; make the bucket first, or correct its name")
        if _PUT_OFF.search(said):
            return StorageError(f"{text}; storage kept putting this off: try again later, with fewer clients")
        if isinstance(error, MalformedError) or (self._is_read and _DAMAGED.search(said)):
            return CheckpointCorruptError(f"{text}; restore another checkpoint")
        return StorageError(text)


def _os_error(error: OSError, text: str) -> CheckpointError:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return CheckpointExistsError(f"{text}; something took the path meanwhile")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{text}; free space and save again")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoragePermissionError(f"{text}; check the permissions")
    return StorageError(text)


def _first_line(said: str) -> str:
    return said.partition("\n")[0][:500]


def taken_over(where: object) -> StorageError:
    """Return the error of an attempt that is not the newest at its place."""
    return StorageError(f"cannot save to {where}: another attempt saves to this path, and took over")
