"""Looks keys up in OCDBT databases: a B+tree whose leaves hold small values, and the file ranges of larger ones.

::

    manifest.ocdbt -> newest version -> root node -> inner nodes -> leaf: {key: value or file range}

TensorStore decodes the nodes, but this module reads the files, because a database is untrusted input. A database may
name any path, and an open of a fifo or a device may hang or do harm. A node may be its own child. Its nodes may
decompress to more bytes than there is memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

from dtckpt.format.codecs import zstd_bound
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder
from dtckpt.storage.tensorstore_setup import open_context, tensorstore
from dtckpt.storage.zarr_tensorstore import DATABASE_NAME

MAX_NODE_NBYTES = 96 << 20
"""Bytes of a node, decoded; TensorStore writes nodes of 8 MiB, and Orbax asks it for nodes of up to 100 MB."""
MAX_HEIGHT = 16
"""Levels of the tree."""
MAX_CACHED_KEYS = 1 << 19
"""Keys of the nodes that are kept decoded; the nodes of one path through the tree are kept in any case."""

# The bytes of a node:  | magic 4 | length 8 | version 1 | compression 1 | content ... | checksum 4 |
_VERSION, _COMPRESSION, _HEADER_NBYTES = 12, 13, 14
"""Positions of these fields in a node, after magic and length; then the header's size."""
_TRAILER_NBYTES = 4
_ZSTD = 1
_ODD_NAMES = ("", ".", "..")


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes of a file of a checkpoint.

    Args:
        file: The file's name below the checkpoint's folder.
        start: The first byte.
        nbytes: The length; None: up to the file's end.
    """

    file: str
    start: int = 0
    nbytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A decoded node.

    Args:
        height: Levels below the node; 0 for a leaf.
        entries: Of a leaf: by key, a small value (bytes) or the location of a larger one (str).
        keys: Of an inner node: the first key of each child, ascending.
        children: Of an inner node: the location of each child, and the prefix that its keys leave out.
    """

    height: int
    entries: Mapping[bytes, bytes | str]
    keys: list[bytes]
    children: list[tuple[str, bytes]]

    @classmethod
    def from_dump(cls, dump: Mapping[str, Any]) -> _Node:
        """Return a node from the output of TensorStore's ``ocdbt.dump``."""
        entries = dump["entries"]
        if not dump["height"]:
            values = {entry["key"]: entry.get("indirect_value", entry.get("inline_value")) for entry in entries}
            return cls(0, values, [], [])
        children = [(entry["location"], entry["subtree_common_prefix"]) for entry in entries]
        return cls(dump["height"], {}, [entry["key"] for entry in entries], children)

    @property
    def num_keys(self) -> int:
        return len(self.entries) + len(self.keys)


class OcdbtDatabase:
    """An OCDBT database, for reading. Thread-safe.

    Args:
        root: The database's folder.
        first: The folder of its first file; default: the same.
    """

    def __init__(self, root: Folder, *, first: Folder | None = None) -> None:
        self._root = root
        self._first = first or root
        self._lock = Lock()
        self._cache: OrderedDict[str, _Node] = OrderedDict()
        self._num_cached = 0

    def find(self, key: str) -> FileRange | bytes:
        """Return the file range of a value, or the value itself if it is small. Blocks: on storage.

        Raises:
            FileNotFoundError: There is no such key.
            MalformedError: TensorStore writes no such database.
            ValueError: TensorStore cannot decode a node.
        """
        with self._lock:
            entry = self._find(key.encode())
        if entry is None:
            raise FileNotFoundError(f"{key} is missing")
        return entry if isinstance(entry, bytes) else _file_range(entry)

    def _find(self, key: bytes) -> bytes | str | None:
        """Return a small value, the location of a larger one, or None if there is no such key."""
        location, height = self._root_node
        while location:
            node = self._node(location)
            # Each step down must lower the height by one, so a node that is its own ancestor cannot loop.
            if node.height != height:
                raise MalformedError(f"the database's tree is none: node {location} is of height {node.height}")
            if not height:
                return node.entries.get(key)
            # The child with the greatest first key that is not above the key.
            position = bisect_right(node.keys, key) - 1
            # A key before all of them leads to the first child, which does not have it.
            location, prefix = node.children[max(0, position)]
            if not key.startswith(prefix):
                return None
            key, height = key[len(prefix) :], height - 1
        return None

    def node_files(self) -> set[str]:
        """Return the files that hold the tree's nodes. Blocks: on storage. Raises: As `find`."""
        with self._lock:
            location, height = self._root_node
            level = {location} - {""}
            files = {_file_range(each).file for each in level}
            # Level by level; the leaves themselves are not read.
            for _ in range(height):
                level = {child for each in level for child, _ in self._node(each).children}
                files |= {_file_range(each).file for each in level}
            return files

    @cached_property
    def _root_node(self) -> tuple[str, int]:
        """Location and height of the tree's root node; the location is empty if the tree is."""
        data = self._first.read_whole(DATABASE_NAME, MAX_NODE_NBYTES)
        versions = self._dump(data).get("versions")
        if not versions:
            raise MalformedError(f"{DATABASE_NAME} holds no version of the database")
        # In the order of their commits; older versions play no part.
        newest = versions[-1]
        if newest["root_height"] > MAX_HEIGHT:
            raise MalformedError(f"the database's tree is none: it is {newest['root_height']} nodes high")
        return newest["root"].get("location", ""), newest["root_height"]

    def _node(self, location: str) -> _Node:
        """Return the node at a location, from the cache or from storage. Raises: as `find`."""
        node = self._cache.get(location)
        if node is not None:
            self._cache.move_to_end(location)
            return node
        stored = _file_range(location)
        start, nbytes = stored.start, stored.nbytes or 0
        # Refused before the read, for the location may claim any length.
        if nbytes > MAX_NODE_NBYTES:
            raise MalformedError(f"the database's node {location} is too long")
        node = _Node.from_dump(
            self._dump(self._root.read(stored.file, start, start + nbytes), f"btreenode::node:0:{nbytes}")
        )
        self._cache[location] = node
        self._num_cached += node.num_keys
        # The least recently used nodes go first; the nodes of one path down the tree always fit.
        while self._num_cached > MAX_CACHED_KEYS and len(self._cache) > MAX_HEIGHT:
            self._num_cached -= self._cache.popitem(last=False)[1].num_keys
        return node

    @cached_property
    def _context(self) -> Any:
        return open_context()

    def _dump(self, data: bytes, node: str | None = None) -> Any:
        """Decode a node, or without one the database's first file, from memory. Raises: as `find`."""
        _validate_size(data)
        # A new context: stores in memory are shared within a context.
        ts = tensorstore()
        store = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
        store[DATABASE_NAME if node is None else "node"] = data
        return ts.ocdbt.dump(store, node, context=self._context).result()


def _validate_size(data: bytes) -> None:
    """Refuse a node, or the database's first file, that would decode to more than `MAX_NODE_NBYTES`.

    Raises:
        MalformedError: The value would decode to more, or has no header.
    """
    if len(data) < _HEADER_NBYTES + _TRAILER_NBYTES or data[_VERSION] or data[_COMPRESSION] > _ZSTD:
        raise MalformedError("the database is damaged: a node has no header, or is cut short")
    if data[_COMPRESSION] == _ZSTD and zstd_bound(data[_HEADER_NBYTES:-_TRAILER_NBYTES]) > MAX_NODE_NBYTES:
        raise MalformedError(f"the database is damaged: a node decompresses to more than {MAX_NODE_NBYTES} bytes")


def _file_range(location: str) -> FileRange:
    """Parse a location as TensorStore's dump writes it: ``<kind>:<folder>:<name>:<start>:<nbytes>``.

    Raises:
        MalformedError: The location is malformed, or leads out of the checkpoint.
    """
    try:
        # Five fields, or it is refused: no file or folder of a save's database has a colon in its name.
        _, folder, name, start, nbytes = location.split(":")
        return FileRange(_validated_name(folder + name), int(start), int(nbytes))
    except ValueError:
        raise MalformedError(f"the database is damaged: it refers to {location!r:.200}") from None


@lru_cache(maxsize=256)
def _validated_name(name: str) -> str:
    if any(segment in _ODD_NAMES for segment in name.split("/")) or "\0" in name:
        raise ValueError("this is no name of a file below a folder")
    return name
