"""Opens files of checkpoints that strangers may have made: no fifo is waited for, and no device is touched."""

from __future__ import annotations

import os
import stat

from dtckpt.storage.failures import MalformedError

_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular_nbytes(path: str) -> int:
    """Return the size of a regular file, which may be the end of a symbolic link; the file is not opened.

    Raises:
        FileNotFoundError: Nothing is there.
        MalformedError: Something else is there.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise MalformedError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, expected a file")
    return status.st_size


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size. Raises: as `regular_nbytes`.

    To open a device may do something, so the file is looked at before; should a fifo take its place in between, the
    open does not wait for a writer.
    """
    nbytes = regular_nbytes(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), nbytes


def too_long(name: str, most: int) -> MalformedError:
    """Return the error of a file that is longer than any that a save writes."""
    return MalformedError(f"{name} is too long: it has more than {most} bytes")
