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
    return regular_status(path).st_size


def regular_status(path: str, descriptor: int | None = None) -> os.stat_result:
    """Return the status of a regular file, which may be open already. Raises: as `regular_nbytes`."""
    status = os.stat(path if descriptor is None else descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise MalformedError(f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, expected a file")
    return status


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; return its descriptor and its status. Raises: as `regular_nbytes`.

    The kind of the file is looked up before the open. Should a fifo take its place in between, the open does not wait
    for a writer (``O_NONBLOCK``). The status belongs to the open file: a save may have put another file in its
    place.
    """
    regular_status(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return descriptor, regular_status(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def too_long_error(name: str, most: int) -> MalformedError:
    """Return the error for a file of more than ``most`` bytes: longer than any that a save writes."""
    return MalformedError(f"{name} is too long: it has more than {most} bytes")
