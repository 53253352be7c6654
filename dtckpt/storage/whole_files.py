"""Whole files of a folder, of any back end: their list, reads of ranges, and writes that are read back.

A local file is read without following a link, so a folder that a stranger prepared names no file elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from dtckpt.format.digest import bytes_digest
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import FileIdentity, LocalFolder, file_identity, is_draft

WRITE_NBYTES = 256 << 10
"""Bytes of one write to a local file."""
RANGE_NBYTES = 8 << 20
"""Bytes that one read or write takes, unless a chunk is larger."""


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file of a folder.

    Args:
        name: Its name below the folder.
        nbytes: Its size; None where storage does not tell.
        identity: Of a local file: its inode and the time of its last write.
        num_names: The names that a local file has; more than one are hard links.
    """

    name: str
    nbytes: int | None = None
    identity: FileIdentity | None = None
    num_names: int = 1


def list_files(folder: Folder, *, has_drafts: bool = False) -> dict[str, WholeFile]:
    """Return the files below a folder, by name, without links. Blocks: on storage.

    Args:
        folder: The folder.
        has_drafts: Whether the drafts of processes that died count, too.
    """
    if isinstance(folder, LocalFolder):
        return {
            name: WholeFile(name, status.st_size, file_identity(status), status.st_nlink)
            for name, status in folder.walk()
            if has_drafts or not is_draft(name)
        }
    return {name: WholeFile(name) for name in folder.names()}


class RangeSource(Protocol):
    """A file that is open for reads of ranges."""

    def __call__(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop``: fewer where the file ends before. The next call may reuse the memory."""
        ...


@contextmanager
def open_ranges(folder: Folder, name: str) -> Iterator[RangeSource]:
    """Open a file for reads of ranges, by one thread.

    Raises:
        MalformedError: There is no such file, or the name leads to a link or to something other than a regular file.
            The file of an object store is missed by the first read.
    """
    if not isinstance(folder, LocalFolder):
        yield partial(_read_object, folder, name)
        return
    try:
        descriptor = folder.open_file(name)
    except FileNotFoundError:
        raise _missing_error(folder, name) from None
    ranges = _LocalRanges(descriptor)
    try:
        yield ranges
    finally:
        os.close(descriptor)
        ranges.give_back()


def _read_object(folder: Folder, name: str, start: int, stop: int) -> memoryview:
    try:
        return memoryview(folder.read(name, start, stop))
    except FileNotFoundError:
        raise _missing_error(folder, name) from None


def _missing_error(folder: Folder, name: str) -> MalformedError:
    return MalformedError(f"{folder}/{name} is missing")


MAX_SPARE = 8
MAX_SPARE_NBYTES = 32 << 20
_spare: deque[bytearray] = deque()
"""Memory for ranges that no file uses now."""


def _taken() -> bytearray:
    try:
        return _spare.pop()
    except IndexError:  # another thread may take the last one at any moment
        return bytearray()


def drop_spare_memory() -> None:
    """Free the memory that waits for the next file. Called when a copy, or a visit of a checkpoint, ends."""
    _spare.clear()


class _LocalRanges:
    """Reads ranges of an open local file into one block of memory, which grows to the largest range.

    Args:
        descriptor: The file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = _taken()

    def give_back(self) -> None:
        """Let the next file use the memory: memory that is new to the process costs more than the read."""
        if len(_spare) < MAX_SPARE and len(self._memory) <= MAX_SPARE_NBYTES:
            _spare.append(self._memory)

    def __call__(self, start: int, stop: int) -> memoryview:
        # The size of the open file bounds the memory: the caller's range may come from an untrusted description.
        nbytes = max(0, min(stop, os.fstat(self._descriptor).st_size) - start)
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        found, done = memoryview(self._memory)[:nbytes], 0
        while done < nbytes and (count := os.preadv(self._descriptor, [found[done:]], start + done)):
            done += count
        return found[:done]


class RateLimit:
    """A bound on bytes per second, for all threads together.

    Args:
        nbytes_per_s: The bound; None: there is none.
        clock: Returns monotonic seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        nbytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, nbytes: int) -> None:
        """Count bytes that were moved. Blocks: until the bytes before them are within the bound."""
        if self._nbytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            wait_s = self._free_at - now
            self._free_at = max(self._free_at, now) + nbytes / self._nbytes_per_s
        if wait_s > 0:
            self._sleep(wait_s)


class DestinationError(OSError):
    """A file that was written does not read back as it was written."""


def write_file(folder: Folder, name: str, pieces: Iterable[memoryview]) -> int:
    """Write a file, in the place of whatever has its name, and compare it with the pieces; return its size.

    A local file is read back, from the page cache; the caller syncs it, as many files are synced faster together. An
    object is read back unless its store compares a digest of each write. Blocks: on storage.

    Raises:
        DestinationError: The file does not read back as it was written.
    """
    if not isinstance(folder, LocalFolder):
        data = b"".join(map(bytes, pieces))
        folder.write(name, data)
        if not folder.confirms_writes:
            whole, starts = memoryview(data), range(0, len(data), RANGE_NBYTES)
            _compare(folder, name, len(data), {at: bytes_digest(whole[at : at + RANGE_NBYTES]) for at in starts})
        return len(data)
    folder.remove_files([name])
    descriptor = folder.new_file(name)
    try:
        nbytes, ranges = _fill_pieces(descriptor, pieces)
    finally:
        os.close(descriptor)
    _compare(folder, name, nbytes, ranges)
    return nbytes


def replace_file(folder: Folder, name: str, pieces: Iterable[memoryview]) -> int:
    """Write a file in the place of another one, in one step: readers find one of them whole. Otherwise as `write_file`.

    A local file gets a new inode; other names of the old file (hard links) keep the old one.
    """
    if not isinstance(folder, LocalFolder):
        return write_file(folder, name, pieces)
    with folder.rewrite(name) as descriptor:
        nbytes, ranges = _fill_pieces(descriptor, pieces)
        _compare_ranges(_LocalRanges(descriptor), f"{folder}/{name}", nbytes, ranges)
    return nbytes


def _fill_pieces(descriptor: int, pieces: Iterable[memoryview]) -> tuple[int, dict[int, int]]:
    """Write pieces to a new file; return its size, and by first byte the digest of each piece."""
    ranges: dict[int, int] = {}
    nbytes = 0
    for piece in pieces:
        if not piece.nbytes:
            continue
        ranges[nbytes] = bytes_digest(piece)
        done = 0
        while done < piece.nbytes:
            done += os.pwrite(descriptor, piece[done : done + WRITE_NBYTES], nbytes + done)
        nbytes += piece.nbytes
    return nbytes, ranges


def _compare(folder: Folder, name: str, nbytes: int, ranges: Mapping[int, int]) -> None:
    try:
        with open_ranges(folder, name) as read:
            _compare_ranges(read, f"{folder}/{name}", nbytes, ranges)
    except MalformedError as error:
        raise DestinationError(f"{folder}/{name} is not there after it was written: {error}") from error


def _compare_ranges(read: RangeSource, where: str, nbytes: int, ranges: Mapping[int, int]) -> None:
    """Compare a file with the digests of its ranges, and with its size."""
    stops = [*list(ranges)[1:], nbytes]
    for (start, digest), stop in zip(ranges.items(), stops, strict=True):
        found = read(start, stop)
        if found.nbytes != stop - start or bytes_digest(found) != digest:
            raise DestinationError(f"{where} does not read back as it was written: another process writes there")
    if read(nbytes, nbytes + 1).nbytes:
        raise DestinationError(f"{where} is longer than it was written: another process writes there")


def make_parents(folder: Folder, names: Iterable[str]) -> None:
    """Make the folders of files, where folders must be made."""
    if not isinstance(folder, LocalFolder):
        return
    parents = {parts[:end] for name in names for parts in [tuple(name.split("/"))] for end in range(1, len(parts))}
    for parent in sorted(parents):
        (folder / "/".join(parent)).make()
