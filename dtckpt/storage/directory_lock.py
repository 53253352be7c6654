"""Advisory locks on directories: a sign of life that the kernel takes back when its holder dies, however it dies.

A process that was forked while its parent held a lock holds it too. So a lock may outlive its taker for a while, which
delays whoever waits for it to go, and hurts nobody.
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
def locked(folder: Path, *, is_shared: bool = False) -> Iterator[bool]:
    """Hold a directory's lock for as long as the context lasts, wherever it is renamed to.

    Args:
        folder: The directory.
        is_shared: Whether others may hold it too, shared as well.

    Yields:
        Whether the lock could be had. On file systems that have none it always can.

    Raises:
        OSError: The directory is not there or cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _take(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True
