"""Plan files of ``torch.save``: all bytes but the elements of tensors, and where these go; pure.

The plan is the same zip that PyTorch writes (see `dtckpt.checkpoint.foreign.torch_zip`), in the order of the file::

    header, pickle | … | header | elements of tensor 0 | their CRC | header | elements of tensor 1 | … | directory

Sizes are known beforehand, and CRCs are not. So the writer of a plan takes the CRC of elements as they pass by, and
puts it where the plan has a `Checksum`.

`build_object` makes the objects that are pickled. ``torch.load`` makes by default only objects of some classes of
PyTorch and Python (``weights_only``). ``torch.distributed.checkpoint`` reads a plain value with all classes there are.
Neither can make an object, such as a dataclass, of which the state tree has only the name of its class.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.foreign.pickle_names import STORAGES
from dtckpt.checkpoint.reading.pieces import c_strides
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import CONTAINERS
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

PREFIX = "archive"
ALIGNMENT = 64
"""Elements begin at a multiple of it, so that a reader may map them."""
_PROTOCOL = 2
_FULL = 0xFFFFFFFF

_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_VERSION = 45
"""Version of the zip format with numbers of eight bytes."""
_UTF8, _HAS_TRAILER = 1 << 11, 1 << 3
_LONG_FIELD, _PADDING_FIELD = 1, 0x4246
"""Extra fields: numbers of eight bytes; and nothing, as PyTorch pads headers."""


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """A box of a tensor's elements, in C order, as a part of a file.

    Args:
        name: The tensor's name.
        dtype: Name of the element type.
        region: The box.
    """

    name: str
    dtype: str
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.region.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC-32 of elements, in four bytes.

    Args:
        number: Which of the plan's elements; the first are 0.
    """

    number: int


Segment = bytes | Elements | Checksum
"""A part of a file."""


def segment_nbytes(segment: Segment) -> int:
    """Return the bytes of a part of a file."""
    if isinstance(segment, Checksum):
        return 4
    return segment.nbytes if isinstance(segment, Elements) else len(segment)


def plan_zip(value: Any, first: int = 0) -> list[Segment]:
    """Return the parts of a file of ``torch.save``.

    Args:
        value: The object: containers and plain values, with `Elements` in place of tensors.
        first: How many elements come before, if the zip is a part of a file.
    """
    pickled, elements = _pickled(value)
    records: list[tuple[str, bytes | Elements]] = [
        ("data.pkl", pickled),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *((f"data/{number}", each) for number, each in enumerate(elements)),
        ("version", b"3\n"),
    ]
    return list(_segments(records, first))


class _Storage:
    """Stands for the storage of a tensor in a pickle."""

    def __init__(self, key: str, elements: Elements) -> None:
        self.key = key
        self.elements = elements


class _Pickler(pickle.Pickler):
    """Writes `Elements` as PyTorch writes tensors; each has its own storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.elements: list[Elements] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        import torch  # here, because it takes seconds, and a process that only reads can do without

        elements, kind = value.elements, STORAGES.get(value.elements.dtype)
        storage = torch.UntypedStorage if kind is None else getattr(torch, kind)
        return "storage", storage, value.key, "cpu", elements.nbytes if kind is None else elements.region.numel

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Elements):
            return NotImplemented
        import torch  # here, as above

        from dtckpt.comm.torch_private import rebuild_tensor_v2, rebuild_tensor_v3

        storage = _Storage(str(len(self.elements)), value)
        self.elements.append(value)
        shape = value.region.shape
        arguments: tuple[Any, ...] = storage, 0, shape, c_strides(shape), False, OrderedDict()
        if value.dtype in STORAGES:
            return rebuild_tensor_v2, arguments
        return rebuild_tensor_v3, (*arguments, getattr(torch, value.dtype))


def _pickled(value: Any) -> tuple[bytes, list[Elements]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.elements


@dataclass(slots=True)
class _Placed:
    """A record at its place."""

    name: bytes
    header: int
    nbytes: int
    crc: bytes | Checksum
    flags: int


def _segments(records: Sequence[tuple[str, bytes | Elements]], first: int) -> Iterator[Segment]:
    position, number = 0, first
    placed = []
    for name, content in records:
        crc: bytes | Checksum
        if isinstance(content, Elements):
            crc, flags, number = Checksum(number), _UTF8 | _HAS_TRAILER, number + 1
        else:
            crc, flags = zlib.crc32(content).to_bytes(4, "little"), _UTF8
        record = _Placed(f"{PREFIX}/{name}".encode(), position, segment_nbytes(content), crc, flags)
        placed.append(record)
        parts: list[Segment] = [_header(record), content, *(_trailer(record) if flags & _HAS_TRAILER else ())]
        yield from parts
        position += sum(map(segment_nbytes, parts))
    directory = [part for record in placed for part in _entry(record)]
    yield from directory
    yield _end(len(placed), position, sum(map(segment_nbytes, directory)))


def _header(record: _Placed) -> bytes:
    """Return the header in front of a record. Elements have their CRC behind them."""
    is_long = record.nbytes >= _FULL
    extra = struct.pack("<HH2Q", _LONG_FIELD, 16, record.nbytes, record.nbytes) if is_long else b""
    start = record.header + _HEADER.size + len(record.name) + len(extra)
    # A field takes four bytes at least.
    padding = (-start - 4) % ALIGNMENT
    extra += struct.pack("<HH", _PADDING_FIELD, padding) + bytes(padding)
    crc = int.from_bytes(record.crc, "little") if isinstance(record.crc, bytes) else 0
    nbytes = min(record.nbytes, _FULL)
    numbers = _VERSION, record.flags, 0, 0, 0, crc, nbytes, nbytes, len(record.name), len(extra)
    return _HEADER.pack(b"PK\3\4", *numbers) + record.name + extra


def _trailer(record: _Placed) -> list[Segment]:
    """Return the bytes behind elements: their CRC and sizes."""
    is_long = max(record.nbytes, record.header) >= _FULL
    sizes = struct.pack("<2Q" if is_long else "<2I", record.nbytes, record.nbytes)
    return [b"PK\7\10", record.crc, sizes]


def _entry(record: _Placed) -> list[Segment]:
    """Return the entry of a record in the directory."""
    longs = [number for number in (record.nbytes, record.nbytes, record.header) if number >= _FULL]
    extra = struct.pack(f"<HH{len(longs)}Q", _LONG_FIELD, 8 * len(longs), *longs) if longs else b""
    nbytes, header = min(record.nbytes, _FULL), min(record.header, _FULL)
    lengths = len(record.name), len(extra), 0
    entry = _ENTRY.pack(
        b"PK\1\2", _VERSION, _VERSION, record.flags, 0, 0, 0, 0, nbytes, nbytes, *lengths, 0, 0, 0, header
    )
    return [entry[:16], record.crc, entry[20:] + record.name + extra]


def _end(count: int, position: int, nbytes: int) -> bytes:
    """Return the end of the directory, which has ``nbytes`` and begins at a position."""
    stop = position + nbytes
    long = _END_64.pack(b"PK\6\6", _END_64.size - 12, _VERSION, _VERSION, 0, 0, count, count, nbytes, position)
    locator = _LOCATOR_64.pack(b"PK\6\7", 0, stop, 1)
    few = min(count, 0xFFFF)
    return long + locator + _END.pack(b"PK\5\6", 0, 0, few, few, min(nbytes, _FULL), min(position, _FULL), 0)


WEIGHTS_ONLY = frozenset(
    {
        *("dict", "list", "tuple", "set", "OrderedDict", "Counter"),
        *("value", "float", "complex", "bytes", "torch.Size", "torch.dtype", "torch.device"),
    }
)
"""The kinds of nodes, and of containers, that ``torch.load(weights_only=True)`` makes."""

ANY_CLASS = WEIGHTS_ONLY | {
    *("frozenset", "range", "numpy", "date", "datetime", "timedelta", "BytesIO"),
    *("PosixPath", "PurePosixPath", "PureWindowsPath"),
    *("defaultdict", "deque", "SimpleNamespace"),
}
"""Those that Python and numpy make."""


def build_object(
    node: trees.Node, kinds: frozenset[str], tensor: Callable[[str], Any], array: Callable[[str], Any], path: str = ""
) -> Any:
    """Return the object of a node.

    Args:
        node: The node.
        kinds: Kinds of nodes that may be in it: `WEIGHTS_ONLY` or `ANY_CLASS`.
        tensor: Returns the object for a tensor, by name.
        array: Returns the object for an array of numpy, by name.
        path: Where the node is in the tree.

    Raises:
        TreeError: Something else is in it.
    """
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "ndarray":
        return array(content)
    if kind == "type":
        kind = content[0]
    if kind not in kinds:
        raise TreeError(
            f"cannot write the {kind} at {path!r}: PyTorch would not read it; convert without it, or save a plain "
            "value in its place"
        )
    if (opened := trees.items_of(node)) is None:
        return trees.build(node, tensor)
    base, items = opened
    children = {
        key: build_object(child, kinds, tensor, array, f"{path}/{key}" if path else str(key)) for key, child in items
    }
    made = children if base == "dict" else (list if base == "list" else tuple)(children.values())
    return CONTAINERS[kind].make(content[1], made) if "type" in node else made
