"""Where the values of a checkpoint lie in this machine's files, so that they can be read straight into ready memory.

TensorStore reads whole values in threads of its own, and copies them from there. A caller who reads a value piece by
piece finds each piece still in the processor's cache when it digests it, and waits for no thread. What is not found
here is left to TensorStore, and what would be found in a wrong place does not verify.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np

from dtckpt.format.digest import as_bytes, buffer_of
from dtckpt.storage.exit_handlers import tensorstore as ts

MAX_FILES = 64
"""Files of a database that are kept open."""
MAX_KNOWN_KEYS = 1 << 19
"""Keys of a database whose places are kept, or those of one node."""
READS_PER_KEY = 1 / 16
"""Once a database was asked for so many values per key that it has, it pays to learn where all of them lie."""
MAX_RUN = 128
"""Values that are read by one call: systems allow 1024, but what is read shall still be cached when it is digested."""
READ_NBYTES = 64 << 10
"""A longer value counts as several: more is won by reading it from its file."""


class _File:
    """A file that stays open as long as somebody may read from it."""

    def __init__(self, path: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path} is missing") from None
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A value in a file.

    Args:
        file: The file.
        start: Where in the file it begins.
        nbytes: Its length; None: up to the file's end.
    """

    file: _File
    start: int = 0
    nbytes: int | None = None

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with the bytes of the value from ``start`` on. Blocks: On storage.

        Raises:
            ValueError: It ends before.
        """
        place, is_inside = self.start + start, self.nbytes is None or start + memory.nbytes <= self.nbytes
        while memory:
            nbytes = os.preadv(self.file.number, [memory], place) if is_inside else 0
            if not nbytes:
                raise ValueError("the chunk is cut short")
            place, memory = place + nbytes, memory[nbytes:]

    def is_before(self, other: StoredValue) -> bool:
        """Whether another value begins where this one ends."""
        return self.file is other.file and self.nbytes is not None and self.start + self.nbytes == other.start

    def announce(self, start: int, stop: int) -> None:
        """Let the system begin to read some bytes of the value from the disk.

        If it holds the last whole page of them, it holds all but for bad luck, and would look for every page in vain.
        """
        with suppress(OSError):
            inside = max(start, stop - 1 - mmap.PAGESIZE)  # the very last page may be the next value's, too
            if os.preadv(self.file.number, [bytearray(1)], self.start + inside, os.RWF_NOWAIT):
                return
        os.posix_fadvise(self.file.number, self.start + start, stop - start, os.POSIX_FADV_WILLNEED)


def runs_of(values: Sequence[StoredValue], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield values that follow each other in a file, to be read by one call: their positions.

    Args:
        values: The values.
        sizes: How many bytes of each are wanted, from its first on.
    """
    run: list[int] = []
    for position in sorted(range(len(values)), key=lambda each: (values[each].file.number, values[each].start)):
        last = run[-1] if run else position
        is_next = values[last].nbytes == sizes[last] and values[last].is_before(values[position])
        if run and not (is_next and len(run) < MAX_RUN):
            yield run
            run = []
        run.append(position)
    if run:
        yield run


def read_run(values: Sequence[StoredValue], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Fill contiguous memory with the first bytes of values of a run. Blocks: On storage.

    Raises:
        ValueError: A value ends before.
    """
    nbytes, memories = sum([array.nbytes for array in arrays]), [buffer_of(array) for array in arrays]
    if len(values) == 1 or os.preadv(values[0].file.number, memories, values[0].start) < nbytes:
        for value, array in zip(values, arrays, strict=True):
            value.read_into(as_bytes(array).data, 0)


class ValueFiles(Protocol):
    """Finds values by key."""

    def find(self, key: str, nbytes: int) -> StoredValue | None:
        """Return where a value lies, of which so many bytes will be read; None if TensorStore is to read it.

        Raises:
            ValueError: It is not there.
        """
        ...

    def find_small(self, keys: Sequence[str]) -> list[StoredValue | None]:
        """Return where small values lie that share files with others; None for the others."""
        ...

    def expect(self, count: int) -> None:
        """Say that so many values will be asked for."""
        ...

    def close(self) -> None:
        """Forget the open files."""
        ...


class FolderFiles:
    """Values that are files, by the name of their key below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, key: str, nbytes: int) -> StoredValue:  # noqa: ARG002  (all are found alike)
        """As `ValueFiles.find`."""
        return StoredValue(_File(f"{self._root}/{key}"))

    def find_small(self, keys: Sequence[str]) -> list[StoredValue | None]:
        """As `ValueFiles.find_small`: each has a file of its own."""
        return [None] * len(keys)

    def expect(self, count: int) -> None:
        """As `ValueFiles.expect`."""

    def close(self) -> None:
        """As `ValueFiles.close`: none are kept."""


@dataclass(slots=True, eq=False)
class _Leaf:
    """A node of the database's B+tree that refers to values; ``prefix`` is left out of its keys."""

    first: bytes
    node: str
    prefix: bytes
    places: dict[bytes, str] | None = None


_first_key = attrgetter("first")


class DatabaseFiles:
    """Values of an OCDBT database, whose tree TensorStore decodes. Thread-safe.

    Args:
        root: The database's folder.
        base: TensorStore's specification of it.
        context: TensorStore's context.
    """

    def __init__(self, root: Path, base: Mapping[str, Any], context: Any) -> None:
        self._root = root
        self._context = context
        self._base = ts.KvStore.open(dict(base), context=context).result()
        self._open = lru_cache(maxsize=MAX_FILES)(_File)
        self._lock = Lock()
        self._asked = 0
        self._is_worth_it = False
        self._tree: dict[str, Any] | None = None
        self._leaves: list[_Leaf] | None = None
        self._known: list[_Leaf] = []

    def find(self, key: str, nbytes: int) -> StoredValue | None:
        """As `ValueFiles.find`; small values are in the database's nodes, which are left to TensorStore."""
        with self._lock:
            return self._find(key) if self._pays(1 + nbytes // READ_NBYTES) else None

    def find_small(self, keys: Sequence[str]) -> list[StoredValue | None]:
        """As `ValueFiles.find_small`."""
        with self._lock:
            return [self._find(key) for key in keys] if self._pays(len(keys)) else [None] * len(keys)

    def expect(self, count: int) -> None:
        """As `ValueFiles.expect`."""
        with self._lock:
            self._asked += count

    def close(self) -> None:
        """As `ValueFiles.close`."""
        self._open.cache_clear()

    def _pays(self, count: int) -> bool:
        """Whether it pays to learn where all values lie, now that so many more are asked for."""
        if not self._is_worth_it:
            self._asked += count
            self._is_worth_it = self._asked >= self._num_keys() * READS_PER_KEY
        return self._is_worth_it

    def _find(self, key: str) -> StoredValue | None:
        place = self._place(key.encode())
        if place is None:
            return None
        _, folder, name, start, length = place.split(":")
        return StoredValue(self._open(f"{self._root}/{folder}{name}"), int(start), int(length))

    def _num_keys(self) -> int:
        if self._tree is None:
            self._tree = self._dump()["versions"][-1]["root"]
        num_keys: int = self._tree["statistics"]["num_keys"]
        return num_keys

    def _dump(self, node: str | None = None) -> Any:
        return ts.ocdbt.dump(self._base, node, context=self._context).result()

    def _place(self, key: bytes) -> str | None:
        """Return what the tree says of a value: kind, path in two parts, start and length."""
        if self._leaves is None:
            node = (self._tree or {}).get("location")
            self._leaves = self._leaves_below(node, b"", b"") if node else []
        if not self._leaves:
            return None
        at = bisect_right(self._leaves, key, key=_first_key) if len(self._leaves) > 1 else 1
        leaf = self._leaves[max(0, at - 1)]
        if leaf.places is None:
            self._learn(leaf, self._dump(leaf.node)["entries"])
        return (leaf.places or {}).get(key[len(leaf.prefix) :]) if key.startswith(leaf.prefix) else None

    def _leaves_below(self, node: str, first: bytes, prefix: bytes) -> list[_Leaf]:
        found = self._dump(node)
        if not found["height"]:
            leaf = _Leaf(first, node, prefix)
            self._learn(leaf, found["entries"])
            return [leaf]
        leaves: list[_Leaf] = []
        for entry in found["entries"]:
            key, below = prefix + entry["key"], prefix + entry["subtree_common_prefix"]
            if found["height"] == 1:
                leaves.append(_Leaf(key, entry["location"], below))
            else:
                leaves += self._leaves_below(entry["location"], key, below)
        return leaves

    def _learn(self, leaf: _Leaf, entries: list[dict[str, Any]]) -> None:
        leaf.places = {entry["key"]: entry["indirect_value"] for entry in entries if "indirect_value" in entry}
        self._known.append(leaf)
        while len(self._known) > 1 and sum(len(known.places or ()) for known in self._known) > MAX_KNOWN_KEYS:
            self._known.pop(0).places = None
