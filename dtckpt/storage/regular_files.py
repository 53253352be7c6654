"""Opens files of untrusted checkpoints: only regular files, never a fifo, a socket or a device.

To open a fifo waits for a writer, and to open a device may have side effects.
"""

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
    """Return the size of a regular file, without opening it. A symbolic link is followed.

    Raises:
        FileNotFoundError: Nothing is there.
        MalformedError: The path leads to something other than a regular file.
    """
    return _regular_nbytes(path, path)


def _regular_nbytes(file: str | int, path: str) -> int:
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise MalformedError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, expected a file")
    return status.st_size


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size. Raises: as `regular_nbytes`.

    The kind of the file is looked up before the open. Should a fifo take its place in between, the open does not wait
    for a writer (``O_NONBLOCK``). The size belongs to the open file: a save may have put another file in its
    place.
    """
    regular_nbytes(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return descriptor, _regular_nbytes(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise


def too_long_error(name: str, most: int) -> MalformedError:
    """Return the error for a file of more than ``most`` bytes: longer than any that a save writes."""
    return MalformedError(f"{name} is too long: it has more than {most} bytes")
