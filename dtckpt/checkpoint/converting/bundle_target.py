"""Plan a TensorFlow V2 checkpoint, which TensorFlow reads by names or into objects; pure.

A folder has the files of the prefix ``ckpt``, and ``checkpoint``, by which TensorFlow finds this prefix in the folder::

    checkpoint   ckpt.index   ckpt.data-00000-of-00001

TensorFlow has tensors only: a number becomes a tensor without dims, and a text a string. Containers are objects, and
tensors are variables, in a graph of objects. So ``tf.train.Checkpoint(model=…).restore`` finds them by their paths, and
``tf.train.load_checkpoint`` by keys such as ``model/w/.ATTRIBUTES/VARIABLE_VALUE``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from awscrt.checksums import crc32c

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.converting.file_plan import FileDigests, FilePlan, FileSlot
from dtckpt.checkpoint.foreign.bundle_files import STATE_FILE
from dtckpt.checkpoint.foreign.dcp_metadata import structure_of
from dtckpt.checkpoint.foreign.object_graph import graph_bytes
from dtckpt.checkpoint.foreign.sstable import mask, table_bytes, varint
from dtckpt.checkpoint.foreign.tensor_bundle import (
    DTYPE_NUMBERS,
    OBJECT_GRAPH,
    STRING,
    BundleEntry,
    header_bytes,
    key_of,
)
from dtckpt.errors import DTypeError, RegionNotFoundError, TensorNameError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import decode_value, encode_value
from dtckpt.layout.region import Region

STEM = "ckpt"
ALIGNMENT = 64
"""Elements begin at multiples of so many bytes, as any numbers are allowed, and reads into memory are faster then."""
_OWN = re.compile(rf"{STATE_FILE}|{STEM}\.index|{STEM}\.data-[0-9]{{5}}-of-[0-9]{{5}}")
_INT64 = 1 << 63


def is_own(path: Path) -> bool:
    """Whether a file of a directory is one of such a checkpoint."""
    return _OWN.fullmatch(path.name) is not None


def dropped(structure: trees.Node) -> dict[str, str]:
    """Return, by path, why TensorFlow does not keep something."""
    lost = (name for name, _, node in _leaves(structure) if node in _NOTHING)
    return dict.fromkeys(lost, "TensorFlow has neither None nor empty containers")


def read_back(structure: trees.Node) -> trees.Node:
    """Return the structure that a reader finds for this one: dicts, in which numbers are tensors."""
    nodes: dict[tuple[str | int, ...], trees.Node] = {}
    for name, path, node in _leaves(structure):
        if node in _NOTHING:
            continue
        value = None if "tensor" in node or "ndarray" in node else _value(name, node)
        nodes[path] = encode_value(value, name) if isinstance(value, bytes) else {"tensor": name}
    return structure_of(nodes)


def plan_folder(export: Export, max_file_nbytes: int) -> list[FilePlan]:
    """Plan the files; the index comes behind the elements, whose checksums it holds.

    Args:
        export: The tensors and values to write.
        max_file_nbytes: Bound on the elements' bytes of a file; a larger tensor has a file to itself.

    Raises:
        DTypeError: TensorFlow lacks the dtype of a tensor.
        RegionNotFoundError: A tensor was saved in part.
        TensorNameError: Two tensors would have one name.
        TreeError: TensorFlow has no such plain value.
    """
    shards = [_Shard()]
    slots: dict[str, tuple[int, FileSlot]] = {}
    for tensor in export.tensors:
        _validate(tensor)
        if shards[-1].stop and shards[-1].stop + tensor.nbytes > max_file_nbytes:
            shards.append(_Shard())
        slots[tensor.name] = len(shards) - 1, shards[-1].add_tensor(tensor)
    places: dict[bytes, tuple[int, FileSlot | _Stored]] = {}
    keys = []
    for name, path, node in _leaves(export.structure):
        if node in _NOTHING:
            continue
        key = key_of(path)
        if key.encode() in places:
            raise TensorNameError(f"two tensors would have the name {name[:200]!r}; rename one")
        is_tensor = "tensor" in node or "ndarray" in node
        place = slots[name] if is_tensor else (len(shards) - 1, shards[-1].add_value(_value(name, node)))
        places[key.encode()] = place
        keys.append((path, key))
    places[OBJECT_GRAPH.encode()] = len(shards) - 1, shards[-1].add_value(graph_bytes(keys))

    def index(checksums: Mapping[FileSlot, int]) -> bytes:
        entries = [
            (name, _entry(shard, place, checksums).to_bytes()) for name, (shard, place) in sorted(places.items())
        ]
        return table_bytes([(b"", header_bytes(len(shards))), *entries])

    def frame(written: FileDigests) -> Iterator[tuple[int, bytes]]:
        yield 0, index(written.checksums)

    state = f'model_checkpoint_path: "{STEM}"\nall_model_checkpoint_paths: "{STEM}"\n'.encode()
    return [
        *(shard.plan(f"{STEM}.data-{number:05d}-of-{len(shards):05d}") for number, shard in enumerate(shards)),
        FilePlan(f"{STEM}.index", len(index({})), frame=frame),
        FilePlan(STATE_FILE, len(state), frame=lambda _: [(0, state)]),
    ]


_NOTHING: tuple[trees.Node, ...] = ({"value": None}, {"dict": []}, {"list": []}, {"tuple": []})


def _leaves(node: trees.Node, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...], trees.Node]]:
    """Yield the name, the path and the node of every leaf; an empty container is one."""
    opened = trees.items_of(node)
    if opened is not None and opened[1]:
        for key, child in opened[1]:
            yield from _leaves(child, (*keys, str(key)))
        return
    name = "/".join(map(name_of_key, keys))
    own = node.get("tensor", node.get("ndarray")) or name
    # The path must give the name back.
    path = keys if own == name and all(keys) else tuple(own.split("/"))
    yield own, path, node if opened is None else {opened[0]: []}


def _value(path: str, node: trees.Node) -> Any:
    """Return a number, or a string as bytes."""
    ((kind, content),) = node.items()
    value = decode_value(kind, content)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if type(value) in (bool, float, bytes) or (type(value) is int and -_INT64 <= value < _INT64):
        return value
    raise TreeError(
        f"TensorFlow keeps numbers of 64 bits and strings only; got {type(value).__name__} at {path[:200]!r}; leave it "
        "out by select"
    )


def _validate(tensor: ExportedTensor) -> None:
    if tensor.dtype not in DTYPE_NUMBERS:
        raise DTypeError(
            f"TensorFlow cannot hold tensor {tensor.name!r} of dtype {tensor.dtype}; expected one of "
            f"{', '.join(DTYPE_NUMBERS)}; leave it out, or convert it"
        )
    if not tensor.info.is_whole:
        raise RegionNotFoundError(f"tensor {tensor.info.name!r} was saved in part; leave it out")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A plain value as its bytes, with their place and checksum."""

    dtype: int
    offset: int
    data: bytes
    crc: int

    @classmethod
    def of(cls, value: Any, offset: int) -> _Stored:
        """Return a value at a place."""
        if not isinstance(value, bytes):
            data = np.asarray(value).tobytes()
            return cls(DTYPE_NUMBERS[np.asarray(value).dtype.name], offset, data, crc32c(data))
        length = struct.pack("<I" if len(value) < 1 << 32 else "<Q", len(value))
        checksum = struct.pack("<I", mask(crc32c(length)))
        # The checksums are of the length as a number of fixed size, and not as the varint that is stored.
        crc = crc32c(length + checksum + value)
        return cls(STRING, offset, varint(len(value)) + checksum + value, crc)


class _Shard:
    """A data file that is being planned."""

    def __init__(self) -> None:
        self.stop = 0
        self._slots: list[FileSlot] = []
        self._values: list[_Stored] = []

    def add_tensor(self, tensor: ExportedTensor) -> FileSlot:
        """Add a tensor; return its place."""
        slot = FileSlot(tensor, Region.full(tensor.shape), -(-self.stop // ALIGNMENT) * ALIGNMENT)
        self._slots.append(slot)
        self.stop = slot.offset + slot.nbytes
        return slot

    def add_value(self, value: Any) -> _Stored:
        """Add a plain value; return its place."""
        stored = _Stored.of(value, self.stop)
        self._values.append(stored)
        self.stop += len(stored.data)
        return stored

    def plan(self, name: str) -> FilePlan:
        """Return the file."""
        values = [(each.offset, each.data) for each in self._values]
        return FilePlan(name, self.stop, tuple(self._slots), lambda _: values, checksum=crc32c)


def _entry(shard: int, place: FileSlot | _Stored, checksums: Mapping[FileSlot, int]) -> BundleEntry:
    if isinstance(place, _Stored):
        return BundleEntry(place.dtype, (), shard, place.offset, len(place.data), place.crc, ())
    # The checksum of no bytes is zero.
    dtype, crc = DTYPE_NUMBERS[place.tensor.dtype], checksums.get(place, 0)
    return BundleEntry(dtype, place.tensor.shape, shard, place.offset, place.nbytes, crc, ())
