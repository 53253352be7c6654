"""OCDBT databases as readers see them: a B+tree of keys, whose leaves hold small values and say where the others lie.

TensorStore decodes the nodes, but reads no file: a stranger's database may name any path, whose open would wait or
worse, nodes that are their own children, or nodes that decompress to more than any memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import tensorstore as ts

from dtckpt.format.codecs import zstd_bound
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder
from dtckpt.storage.zarr_tensorstore import DATABASE_NAME

MAX_NODE_NBYTES = 64 << 20
"""Bytes of a node, decoded; TensorStore writes nodes of 8 MiB."""
MAX_HEIGHT = 16
MAX_KNOWN_KEYS = 1 << 19
"""Keys of nodes that are kept, or those of one path through the tree."""

_VERSION, _COMPRESSION, _HEADER_NBYTES = 12, 13, 14
"""Where these stand in a node, behind magic and length."""
_TRAILER_NBYTES = 4
_ZSTD = 1
_ODD_NAMES = ("", ".", "..")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies.

    Args:
        file: The file, by its name below the checkpoint's folder.
        start: Where in the file it begins.
        nbytes: Its length; None: up to the file's end.
    """

    file: str
    start: int = 0
    nbytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A decoded node. A leaf's ``entries`` are values and places by key; an inner node's are its children, in order."""

    height: int
    entries: Mapping[bytes, bytes | str]
    keys: list[bytes]
    children: list[tuple[str, bytes]]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> _Node:
        entries = found["entries"]
        if not found["height"]:
            values = {entry["key"]: entry.get("indirect_value", entry.get("inline_value")) for entry in entries}
            return cls(0, values, [], [])
        children = [(entry["location"], entry["subtree_common_prefix"]) for entry in entries]
        return cls(found["height"], {}, [entry["key"] for entry in entries], children)

    @property
    def num_keys(self) -> int:
        return len(self.entries) + len(self.keys)


class Database:
    """The keys of a database. Thread-safe.

    Args:
        root: The database's folder.
        context: TensorStore's context.
    """

    def __init__(self, root: Folder, context: Any) -> None:
        self._root = root
        self._context = context
        self._lock = Lock()
        self._known: OrderedDict[str, _Node] = OrderedDict()
        self._num_known = 0

    def find(self, key: str) -> Place | bytes:
        """Return where a value lies, or the value itself, if it is small. Blocks: On storage.

        Raises:
            FileNotFoundError: There is no such key.
            MalformedError: The database is none that TensorStore writes.
            ValueError: TensorStore cannot decode it.
        """
        with self._lock:
            found = self._find(key.encode())
        if found is None:
            raise FileNotFoundError(f"{key} is missing")
        return found if isinstance(found, bytes) else _place(found)

    def _find(self, key: bytes) -> bytes | str | None:
        location, height = self._top
        while location:
            node = self._node(location)
            if node.height != height:
                raise MalformedError(f"the database's tree is none: node {location} is of height {node.height}")
            if not height:
                return node.entries.get(key)
            at = bisect_right(node.keys, key) - 1
            location, prefix = node.children[max(0, at)]
            if not key.startswith(prefix):
                return None
            key, height = key[len(prefix) :], height - 1
        return None

    @cached_property
    def _top(self) -> tuple[str, int]:
        """Location and height of the tree's root; no location, if it is empty."""
        data = self._root.read_whole(DATABASE_NAME, MAX_NODE_NBYTES)
        versions = self._dump(data).get("versions")
        if not versions:
            raise MalformedError(f"{DATABASE_NAME} holds no version of the database")
        newest = versions[-1]
        if newest["root_height"] > MAX_HEIGHT:
            raise MalformedError(f"the database's tree is none: it is {newest['root_height']} nodes high")
        return newest["root"].get("location", ""), newest["root_height"]

    def _node(self, location: str) -> _Node:
        node = self._known.get(location)
        if node is not None:
            self._known.move_to_end(location)
            return node
        place = _place(location)
        start, nbytes = place.start, place.nbytes or 0
        if nbytes > MAX_NODE_NBYTES:
            raise MalformedError(f"the database's node {location} is too long")
        node = _Node.of(self._dump(self._root.read(place.file, start, start + nbytes), f"btreenode::node:0:{nbytes}"))
        self._known[location] = node
        self._num_known += node.num_keys
        while self._num_known > MAX_KNOWN_KEYS and len(self._known) > MAX_HEIGHT:
            self._num_known -= self._known.popitem(last=False)[1].num_keys
        return node

    def _dump(self, data: bytes, node: str | None = None) -> Any:
        _validate(data)
        # A store of its own: TensorStore shares those in memory within a context.
        store = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
        store[DATABASE_NAME if node is None else "node"] = data
        return ts.ocdbt.dump(store, node, context=self._context).result()


def _validate(data: bytes) -> None:
    """Refuse a node, or the database's first file, before it is decoded to more than is sensible."""
    if len(data) < _HEADER_NBYTES + _TRAILER_NBYTES or data[_VERSION] or data[_COMPRESSION] > _ZSTD:
        raise MalformedError("the database is damaged: a node has no header, or is cut short")
    if data[_COMPRESSION] == _ZSTD and zstd_bound(data[_HEADER_NBYTES:-_TRAILER_NBYTES]) > MAX_NODE_NBYTES:
        raise MalformedError(f"the database is damaged: a node decompresses to more than {MAX_NODE_NBYTES} bytes")


def _place(location: str) -> Place:
    """Read a location: kind, path in two parts, start and length.

    Raises:
        MalformedError: It leads out of the checkpoint, or nowhere.
    """
    try:
        _, folder, name, start, nbytes = location.split(":")
        return Place(_file(folder + name), int(start), int(nbytes))
    except ValueError:
        raise MalformedError(f"the database is damaged: it refers to {location!r:.200}") from None


@lru_cache(maxsize=256)
def _file(name: str) -> str:
    if any(segment in _ODD_NAMES for segment in name.split("/")) or "\0" in name:
        raise ValueError("this is no name of a file below a folder")
    return name
