"""Makes files and directories survive a power loss: fsync, several at a time, and write-back that begins early."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtckpt.comm.background_threads import Pool, begin

_NUM_THREADS = 8
"""Files that are synced at a time."""
_PERIOD_S = 0.01
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write out dirty pages, and wait for none


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and directories, several at a time: file systems write what waits together in one go.

    Blocks: on the disk.
    """
    with Pool(_NUM_THREADS, "dtckpt-sync") as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory. Blocks: on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(paths: Iterable[Path]) -> None:
    """Sync files, and let the kernel use the memory that caches them for other files. Blocks: on the disk.

    Such files should not push files that are read often out of the cache. And memory that is used again at once costs
    less than memory that has been free for long. Where there is no such call (posix_fadvise), files are only synced.
    """
    forget = getattr(os, "posix_fadvise", None)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if forget is not None:
                forget(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def walk_folders(folder: Path) -> Iterator[Path]:
    """Yield a directory and all directories below it; one that is removed meanwhile is left out.

    Raises:
        OSError: A directory cannot be read.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return (Path(path) for path, _, _ in os.walk(folder, onerror=fail))


@contextmanager
def early_writeback(folder: Path) -> Iterator[None]:
    """Write out the new files of a directory while they grow, so that a later fsync finds little to do.

    A thread tells the kernel, which works on its own: nothing waits, and nothing is promised. The directory may be
    made later. Files that are there already are left alone.

    Sources: sync_file_range(2), which Linux alone has; elsewhere nothing is done.
    """
    write_out = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if write_out is None:
        yield
        return
    write_out.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
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
