"""Advisory locks on directories (flock): a sign of life that the kernel takes back when the process that holds it dies.

A process that is forked while its parent holds a lock holds the lock too. So a lock may outlive the process that took
it, which delays a process that waits for the lock to be free, and does no other harm.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


@contextmanager
def lock_directory(folder: Path, *, is_shared: bool = False) -> Iterator[bool]:
    """Try to take a directory's lock, and hold it as long as the context lasts, also when the directory is renamed.

    Args:
        folder: The directory.
        is_shared: Whether other processes may hold the lock at the same time, shared as well.

    Yields:
        Whether this process has the lock. Always true on file systems without locks.

    Raises:
        OSError: The directory is missing, or cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _try_lock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Take a lock of kind ``LOCK_SH`` or ``LOCK_EX``; return false if another process holds it. Does not wait."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True
