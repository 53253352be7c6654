"""Makes files and directories survive a power loss: fsync, several at a time, and write-back that begins early."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtckpt.comm.background_threads import Pool, begin

_NUM_THREADS = 8
"""Files that are synced at a time."""
_PERIOD_S = 0.01
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write out dirty pages, and wait for none
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER: begin, and wait for all


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and directories, several at a time: file systems write all waiting files in one go.

    Blocks: on the disk.
    """
    with Pool(_NUM_THREADS, "dtckpt-sync") as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory. Blocks: on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not to wait for the writer of a fifo
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(paths: Iterable[Path]) -> None:
    """Write files out, and let the kernel use the memory that caches them for other files. Blocks: on the disk.

    Such files should not push files that are read often out of the cache. And memory that is used again at once costs
    less than memory that has been free for long. Nothing is durable before an fsync, which would make a journal's
    commit wait for the writes of other processes.

    Raises:
        OSError: The disk refused. A later fsync need not say so once more.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            TrailingWriteback(descriptor, 0).add(0, 0)  # all of it
        finally:
            os.close(descriptor)


def walk_folders(folder: Path) -> Iterator[Path]:
    """Yield a directory and all directories below it, except a directory that is removed meanwhile.

    Raises:
        OSError: A directory cannot be read.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return (Path(path) for path, _, _ in os.walk(folder, onerror=fail))


class TrailingWriteback:
    """Writes out a file behind its writer, and lets the kernel use the memory that cached it again.

    So the writer is never faster than the disk for long, and a later fsync finds little to do. A large file takes the
    same few pages of the page cache from end to end. Memory that was free for long costs more than the write itself
    where a virtual machine's host has taken it back. Nothing is durable before an fsync.

    Sources: sync_file_range(2) and posix_fadvise(2); where they are missing, nothing is done.

    Args:
        descriptor: The file, open as long as this object is used.
        num_ranges: Ranges that may be under way at one time.
    """

    def __init__(self, descriptor: int, num_ranges: int) -> None:
        self._descriptor = descriptor
        self._num_ranges = num_ranges
        self._write_out = _sync_file_range()
        self._ranges: deque[tuple[int, int]] = deque()

    def add(self, offset: int, nbytes: int) -> None:
        """Begin to write out a range that was written. Blocks: on the disk, if too many ranges are under way.

        Args:
            offset: Its first byte.
            nbytes: Its length; 0 is all that follows.

        Raises:
            OSError: The disk refused an earlier range. A later fsync need not say so once more.
        """
        if self._write_out is None:
            return
        self._sync(offset, nbytes, _WRITE)
        self._ranges.append((offset, nbytes))
        if len(self._ranges) > self._num_ranges:
            first = self._ranges.popleft()
            self._sync(*first, _WRITE_AND_WAIT)
            # Dirty pages would stay, so not before they are written out.
            os.posix_fadvise(self._descriptor, *first, os.POSIX_FADV_DONTNEED)

    def _sync(self, offset: int, nbytes: int, flags: int) -> None:
        assert self._write_out is not None  # noqa: S101  (see `add`)
        if self._write_out(self._descriptor, offset, nbytes, flags) and (number := ctypes.get_errno()) != errno.ENOSYS:
            raise OSError(number, os.strerror(number))


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the function of that name of the C library, if it has one."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


@contextmanager
def early_writeback(folder: Path) -> Iterator[None]:
    """Write out the new files of a directory while they grow, so that a later fsync finds little to do.

    A thread tells the kernel, which works on its own: nothing waits, and nothing is promised. The directory may be
    made later. Files that are there already are left alone.

    Sources: sync_file_range(2), which Linux alone has; elsewhere nothing is done.
    """
    write_out = _sync_file_range()
    if write_out is None:
        yield
        return
    is_over = threading.Event()
    old = _names(folder)

    def run() -> None:
        is_last = False
        while not is_last:
            # Once more at the end, for the bytes written since the last round.
            is_last = is_over.wait(_PERIOD_S)
            for name in _names(folder) - old:
                with suppress(OSError):  # the file was removed meanwhile
                    descriptor = os.open(folder / name, os.O_RDONLY)
                    write_out(descriptor, 0, 0, _WRITE)
                    os.close(descriptor)

    running = begin(run, "dtckpt-writeback")
    try:
        yield
    finally:
        is_over.set()
        running.result()


def _names(folder: Path) -> set[str]:
    """Return the names in a directory, none if it is not there yet."""
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()
