"""`RootLock`: lock a directory of checkpoints, so that one process at a time manages it.

The lock is a record lock (``fcntl.lockf``), which belongs to the process. Forked processes share a lock of an open file
(``flock``), but a data loader that outlives its parent must not keep the next job out. Record locks do not exclude two
managers of one process from each other; the registry ``_held`` does.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import struct
import time
import weakref
from contextlib import suppress
from pathlib import Path

from dtckpt.errors import CheckpointConflictError, printable
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.local_folder import LocalFolder, make_folders

logger = logging.getLogger("dtckpt.checkpoint")

_DRAFT_AGE_S = 3600.0
"""Older drafts are of processes that died: a draft is renamed at once."""
_open_roots: set[Path] = set()
"""The roots of which `_tidy` has warned."""
LOCK_NAME = ".dtckpt-manager.lock"
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux with 64 bits: type, whence, start, length, process."""
_held: weakref.WeakValueDictionary[tuple[int, Path], RootLock] = weakref.WeakValueDictionary()
"""The locks of this process, by process (a forked process starts without locks) and directory."""


class RootLock:
    """The right to change the checkpoints of a directory; it ends with the process at the latest."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._close: weakref.finalize[[int], RootLock] | None = None

    def acquire(self) -> None:
        """Take the right; idempotent.

        Raises:
            CheckpointConflictError: Another process or another manager of this process has it.
            StorageError: The directory cannot be written.
        """
        key = os.getpid(), self._root
        if _held.get(key) is self:
            return
        with translate_errors("lock the directory of checkpoints", self._root):
            make_folders(self._root)
            if key in _held:
                raise self._conflict("another manager of this process")
            descriptor = LocalFolder(self._root).open_lock(LOCK_NAME, to_write=True)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        self._close = weakref.finalize(self, os.close, descriptor)
        _held[key] = self
        self._tidy()

    def _tidy(self) -> None:
        """Remove drafts of processes that died; warn of a root that any user may write to."""
        with suppress(OSError):
            LocalFolder(self._root).remove_drafts(before_s=time.time() - _DRAFT_AGE_S)
            mode = stat.S_IMODE(self._root.stat().st_mode)
            if mode & stat.S_IWOTH and self._root not in _open_roots:
                _open_roots.add(self._root)
                logger.warning(
                    "every user may write to %s (mode %o), and so may remove or replace the checkpoints: chmod o-w it",
                    self._root,
                    mode,
                )

    def _lock(self, descriptor: int) -> None:
        """Lock the file, and write into it who has the lock, for the message of a process that is refused."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._conflict(_noted_holder(descriptor)) from None
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logger.warning("%s has no locks, so a second job that saves there would go unnoticed", self._root)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def _conflict(self, holder: str) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{holder} saves checkpoints to {self._root} already; end it, close its manager, or save elsewhere"
        )

    def holder(self) -> str:
        """Return the process that has the right; empty if no process has it."""
        if (os.getpid(), self._root) in _held:
            return "this process"  # not looked at: to close the file would give the process's lock up
        try:
            descriptor = LocalFolder(self._root).open_lock(LOCK_NAME, to_write=False)
        except OSError:
            return ""
        try:
            # The kernel is asked, and no lock taken: a manager that starts at this moment would be refused.
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return ""
            return _noted_holder(descriptor)
        except OSError:  # a file system without locks
            return ""
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the right back; idempotent."""
        key = os.getpid(), self._root
        if _held.get(key) is self:
            del _held[key]
        if self._close is not None:
            self._close()


def _noted_holder(descriptor: int) -> str:
    """Return the text about its holder in a lock file, as one line.

    Any user with write access to the root may have written the text.
    """
    return printable(os.pread(descriptor, 200, 0).decode(errors="replace")) or "another process"
