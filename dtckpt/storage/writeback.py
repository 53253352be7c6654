"""Have the kernel bring to the disk what is written while more is written, so that a later sync finds little to do."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtckpt.comm.background_threads import begin

_PERIOD_S = 0.01
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write out dirty pages, and wait for none


@contextmanager
def early_writeback(folder: Path) -> Iterator[None]:
    """Write out the files of a directory as they grow, in a thread. A hint: nothing is waited for.

    Sources: sync_file_range(2), which Linux alone has; elsewhere nothing is done.
    """
    write_out = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if write_out is None:
        yield
        return
    write_out.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(_PERIOD_S):
            with suppress(OSError):  # the directory comes later
                for name in os.listdir(folder):
                    with suppress(OSError):  # files go
                        descriptor = os.open(folder / name, os.O_RDONLY)
                        write_out(descriptor, 0, 0, _WRITE)
                        os.close(descriptor)

    running = begin(run, "dtckpt-writeback")
    try:
        yield
    finally:
        is_over.set()
        running.result()
