"""Translates errors of the operating system, TensorStore and fsspec into classes of `dtckpt.errors`.

No other module does so. TensorStore has no error codes, so patterns over its messages tell the class.
"""

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
_THROTTLED = re.compile(r"SlowDown|Throttl|TooManyRequests|UNAVAILABLE|http_response_code='(429|503)'", re.IGNORECASE)
_DAMAGED = re.compile(
    r"DATA_LOSS|NOT_FOUND|OUT_OF_RANGE|INVALID_ARGUMENT|Invalid|is missing|cut short|corrupt"
    r"|Zstd-compressed|ZSTD_|Blosc|uncompressed byte",
    re.IGNORECASE,
)
NOT_A_FILE = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV)
"""Error numbers of the operating system for a path that leads to something other than a file, or nowhere."""


class MalformedError(ValueError):
    """Stored data has another kind or another size than the data of a checkpoint."""


class translate_errors:  # noqa: N801  (a context manager is used as a function is)
    """Translate an error that is raised in a context: ``with translate_errors("open the checkpoint", path):``.

    Every use of storage calls this function, so it also refuses a forked process whose parent uses checkpoints.

    Args:
        action: The action, for the message: "cannot <action> at <where>: ...". May have fields for ``facts``, as in
            "write chunk {} of tensor {!r}".
        where: The path or URL.
        facts: The values of the fields. Facts are formatted only when there is an error.
        is_read: Whether the action reads stored data, so that missing or malformed bytes mean damage.

    Raises:
        CheckpointCorruptError: With ``is_read``, stored data is missing or malformed.
        CheckpointExistsError: A file or directory is in the way.
        StorageError: Storage refused; by its subclasses, because it is full or denies access.
        CheckpointError: This host lacks the memory.
        ForkedProcessError: The parent of this forked process uses checkpoints.
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
        if self._is_read and isinstance(error, OSError) and error.errno in NOT_A_FILE:
            error = MalformedError(f"{error.filename or self._where} is no file: {error.strerror}")
        if isinstance(error, OSError):
            return _os_error(error, f"cannot {action} at {self._where}: {error.strerror or error}")
        if isinstance(error, MemoryError):
            return CheckpointError(f"cannot {action} at {self._where}: this host lacks the memory; {error}")
        reason = str(error)
        text = f"cannot {action} at {self._where}: {_first_line(reason)}"
        if _FULL.search(reason):
            return StorageFullError(f"{text}; free space and save again")
        if _DENIED.search(reason):
            return StoragePermissionError(f"{text}; check the permissions")
        if _NO_BUCKET.search(reason):
            return StorageError(f"{text}; make the bucket first, or correct its name")
        if _THROTTLED.search(reason):
            return StorageError(f"{text}; storage kept putting this off: try again later, with fewer clients")
        if isinstance(error, MalformedError) or (self._is_read and _DAMAGED.search(reason)):
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


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:500]


def taken_over_error(where: object) -> StorageError:
    """Return the error for an attempt that is not the newest at its target, a path or URL."""
    return StorageError(f"cannot save to {where}: another attempt saves to this path, and took over")
