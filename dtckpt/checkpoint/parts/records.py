"""The values of the local tier, and their text on disk and in votes; pure.

A *local save* is one step as all clients saved it. Each client's share of it is a *part*: the elements in one file, and
an *index* that says which box of which tensor they are. Whether a save can be restored follows from the parts that the
hosts hold together (`dtckpt.checkpoint.tiers.holdings`).
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from dtckpt.checkpoint.reading.pieces import c_strides
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.digest import bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region

FORMAT = 1
MAX_INDEX_NBYTES = 1 << 30
MIN_HELD_NBYTES = 64 << 10
"""Smaller pieces are sent in any case: to leave them out would save little."""
UNKNOWN_ROOT = "00000000"
"""Stands for the identity of a root that storage did not say."""
NearCopies = Mapping[str, tuple[Region, ...]]
"""By tensor, the regions of which a client keeps near copies; see `dtckpt.checkpoint.tiers.near_copies`."""
NO_COPIES: NearCopies = MappingProxyType({})
_SAVE_NAME = re.compile(r"(\d{20})-(\d{1,18})-(\d{1,9})-([01])-([0-9a-f]{8})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """The identity of a local save. A save of greater identity is newer.

    Args:
        number: Nanoseconds since the epoch when the save began, by the clock of client 0; greater than the number of
            every save that the tier held then.
        step: The step.
        num_clients: The clients that saved it, each of which has one part.
        is_durable: Whether the step is to be written to the root, too.
        token: Random, so that two attempts of one number are told apart.
        root: The identity of the root; see `dtckpt.checkpoint.tiers.root_identity`.
    """

    number: int
    step: int
    num_clients: int
    is_durable: bool
    token: str
    root: str = UNKNOWN_ROOT

    def belongs_to(self, root: str) -> bool:
        """Whether the save may be of this root."""
        return self.root == root or UNKNOWN_ROOT in (self.root, root)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.number:020d}-{self.step}-{self.num_clients}-{int(self.is_durable)}-{self.token}-{self.root}"

    @classmethod
    def parse(cls, name: str) -> SaveId:
        """Read a name. Raises: ValueError: It is none."""
        match = _SAVE_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name[:100]!r} is no name of a local save")
        number, step, num_clients, is_durable, token, root = match.groups()
        return cls(int(number), int(step), int(num_clients), is_durable == "1", token, root)


@dataclass(frozen=True, slots=True)
class PartTensor:
    """A tensor that a client passed to a local save: the facts that do not depend on the client.

    Args:
        name: Its name.
        shape: Its global shape.
        dtype: Its dtype.
        layout: Its layout; None for a plain tensor.
        tag: A text of its publisher on how its elements are to be understood; see `dtckpt.Publisher.publish`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    tag: str = ""


@dataclass(frozen=True, slots=True)
class PartPiece:
    """A box of a tensor's elements in a part's file.

    Args:
        tensor: Index of the tensor in the part.
        region: The box.
        offset: Byte of its first element.
        strides: Elements from one element to the next, per dim.
        digest: XXH3 of the elements in C order, bound to the tensor's name and the box.
    """

    tensor: int
    region: Region
    offset: int
    strides: tuple[int, ...]
    digest: int

    @property
    def is_dense(self) -> bool:
        """Whether the file has the elements in C order, without gaps."""
        return self.strides == c_strides(self.region.shape)


@dataclass(frozen=True, slots=True)
class PartBox:
    """A box that readers have announced: a part of a piece, with a separate digest.

    Args:
        tensor: Index of the tensor in the part.
        region: The box.
        digest: Digest of the box's elements, as a piece has one.
    """

    tensor: int
    region: Region
    digest: int


class HeldRange(NamedTuple):
    """A range of a part's bytes that another part has, too.

    Args:
        start: Its first byte.
        stop: The byte behind its last.
        at: Its first byte in the other part.
    """

    start: int
    stop: int
    at: int


def gaps(ranges: Sequence[HeldRange], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges between given ones, as first byte and byte behind the last.

    Args:
        ranges: Ascending, and apart.
        nbytes: The end.
    """
    start = 0
    for each in ranges:
        if start < each.start:
            yield start, each.start
        start = each.stop
    if start < nbytes:
        yield start, nbytes


@dataclass(frozen=True, slots=True)
class PartIndex:
    """The description of one part.

    Args:
        save: The save.
        client: The client that saved it.
        nbytes: Bytes of the part's file.
        tree: Structure of the client's state tree and its plain values, as JSON.
        tensors: The tensors that the client passed.
        pieces: The boxes that the file holds.
        metrics: The metrics that client 0 passed.
        copies: Near copies behind them in the file, if it lies on the host of the client; see
            `dtckpt.checkpoint.tiers.near_copies`.
        boxes: Boxes of the pieces that have separate digests; see `dtckpt.checkpoint.parts.announced_boxes`.
    """

    save: SaveId
    client: int
    nbytes: int
    tree: bytes
    tensors: tuple[PartTensor, ...]
    pieces: tuple[PartPiece, ...]
    metrics: Mapping[str, float]
    copies: tuple[PartPiece, ...] = ()
    boxes: tuple[PartBox, ...] = ()

    def digests(self) -> dict[tuple[str, Region], int]:
        """Return the digests of pieces and announced boxes, by tensor and region."""
        described: tuple[PartBox | PartPiece, ...] = (*self.boxes, *self.pieces)
        return {(self.tensors[each.tensor].name, each.region): each.digest for each in described}

    def piece(self, number: int) -> PartPiece:
        """Return a piece; the near copies are numbered behind the others."""
        return self.pieces[number] if number < len(self.pieces) else self.copies[number - len(self.pieces)]

    def ranges_in(self, base: PartIndex) -> list[HeldRange]:
        """Return the ranges of this part's bytes that another part has, too: large dense pieces of equal digests.

        Both sides of a copy compute the same ranges, so that only the other bytes are sent.
        """
        theirs = {base._facts(piece): piece.offset for piece in base.pieces if piece.is_dense}
        ranges: list[HeldRange] = []
        end = 0
        for piece in sorted((each for each in self.pieces if each.is_dense), key=attrgetter("offset")):
            at = theirs.get(self._facts(piece))
            nbytes = piece.region.numel * DTYPES[self.tensors[piece.tensor].dtype].itemsize
            if at is None or nbytes < MIN_HELD_NBYTES:
                continue
            # An index of another host may claim anything.
            if end <= piece.offset <= self.nbytes - nbytes and at <= base.nbytes - nbytes:
                end = piece.offset + nbytes
                ranges.append(HeldRange(piece.offset, end, at))
        return ranges

    def _facts(self, piece: PartPiece) -> tuple[str, str, Region, int]:
        tensor = self.tensors[piece.tensor]
        return tensor.name, tensor.dtype, piece.region, piece.digest

    def without_copies(self) -> PartIndex:
        """Return the index of the part as sent to other hosts: the part's file up to the near copies."""
        if not self.copies:
            return self
        return replace(self, copies=(), nbytes=min(piece.offset for piece in self.copies))

    def to_bytes(self) -> bytes:
        """Return the index file."""
        facts = {
            "format": FORMAT,
            "save": self.save.name,
            "client": self.client,
            "nbytes": self.nbytes,
            "tree": self.tree.decode(),
            "tensors": _tensors_to_text(self.tensors),
            "pieces": [_piece_to_json(piece) for piece in self.pieces],
            "copies": [_piece_to_json(piece) for piece in self.copies],
            "metrics": dict(self.metrics),
        }
        if self.boxes:
            facts["boxes"] = [(box.tensor, box.region.offset, box.region.shape, box.digest) for box in self.boxes]
        data = zlib.compress(json.dumps(facts, separators=(",", ":")).encode(), 1)
        return bytes_digest(data).to_bytes(8, "big") + data

    @classmethod
    def from_bytes(cls, file: bytes) -> PartIndex:
        """Read an index file. Raises: CheckpointCorruptError: The file is damaged."""
        digest, data = file[:8], file[8:]
        if len(digest) < 8 or bytes_digest(data) != int.from_bytes(digest, "big"):
            raise CheckpointCorruptError("the index of a part is damaged: its digest differs")
        try:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(data, MAX_INDEX_NBYTES)
            facts = json.loads(text)
            if facts["format"] != FORMAT:
                raise ValueError(f"its format is {facts['format']!r}")
            index = cls(
                save=SaveId.parse(facts["save"]),
                client=int(facts["client"]),
                nbytes=int(facts["nbytes"]),
                tree=facts["tree"].encode(),
                tensors=_tensors_of_text(facts["tensors"]),
                pieces=tuple(_piece_of_json(piece) for piece in facts["pieces"]),
                metrics={str(name): float(value) for name, value in facts["metrics"].items()},
                copies=tuple(_piece_of_json(piece) for piece in facts["copies"]),
                boxes=tuple(_box_of_json(box) for box in facts.get("boxes", ())),
            )
            index._validate()
            return index
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, zlib.error, RecursionError) as error:
            raise CheckpointCorruptError(f"the index of a part cannot be read: {error}") from error

    def _validate(self) -> None:
        """Check that each piece is inside its tensor and inside the file. Raises: ValueError: A piece is not."""
        if not 0 <= self.client < self.save.num_clients or self.nbytes < 0:
            raise ValueError(f"it is of client {self.client}, with {self.nbytes} bytes")
        wholes = [(Region.full(tensor.shape), DTYPES[tensor.dtype].itemsize) for tensor in self.tensors]
        for piece in (*self.pieces, *self.copies):
            tensor, (whole, itemsize) = self.tensors[piece.tensor], wholes[piece.tensor]
            is_inside = whole.contains(piece.region) and not piece.region.is_empty
            if not is_inside or piece.tensor < 0 or piece.offset < 0 or min(piece.strides, default=0) < 0:
                raise ValueError(f"{piece.region} is not in {tensor.name[:200]!r}")
            last = sum((size - 1) * step for size, step in zip(piece.region.shape, piece.strides, strict=True))
            if piece.offset + (last + 1) * itemsize > self.nbytes:
                raise ValueError(f"{piece.region} of {tensor.name[:200]!r} would end behind the file")
        for box in self.boxes:
            if box.tensor < 0 or not wholes[box.tensor][0].contains(box.region):
                raise ValueError(f"{box.region} is not in {self.tensors[box.tensor].name[:200]!r}")


def _tensors_to_text(tensors: tuple[PartTensor, ...]) -> str:
    meshes: dict[Mesh, int] = {}
    rows = [
        (each.name, each.shape, each.dtype, _layout_to_json(each.layout, meshes), *((each.tag,) if each.tag else ()))
        for each in tensors
    ]
    return json.dumps([[mesh.portable().to_string() for mesh in meshes], rows], separators=(",", ":"))


# Most clients of a job pass the same tensors, and a restore reads the indexes of all.
@lru_cache(maxsize=16)
def _tensors_of_text(text: str) -> tuple[PartTensor, ...]:
    names, rows = json.loads(text)
    meshes = [Mesh.from_string(name) for name in names]
    return tuple(
        PartTensor(str(name), tuple(shape), dtype, _layout_of_json(layout, meshes), *map(str, tag))
        for name, shape, dtype, layout, *tag in rows
    )


def _layout_to_json(layout: Layout | None, meshes: dict[Mesh, int]) -> Any:
    return None if layout is None else [meshes.setdefault(layout.mesh, len(meshes)), layout.sharding_specs]


def _layout_of_json(facts: Any, meshes: Sequence[Mesh]) -> Layout | None:
    if facts is None:
        return None
    mesh, specs = facts
    return Layout([tuple(spec) if isinstance(spec, list) else spec for spec in specs], meshes[mesh])


def _piece_to_json(piece: PartPiece) -> tuple[Any, ...]:
    strides = None if piece.strides == c_strides(piece.region.shape) else piece.strides
    return piece.tensor, piece.region.offset, piece.region.shape, piece.offset, strides, piece.digest


def _piece_of_json(facts: Sequence[Any]) -> PartPiece:
    tensor, at, shape, offset, strides, digest = facts
    region = Region(tuple(at), tuple(shape))
    return PartPiece(tensor, region, offset, c_strides(region.shape) if strides is None else tuple(strides), digest)


def _box_of_json(facts: Sequence[Any]) -> PartBox:
    tensor, at, shape, digest = facts
    return PartBox(tensor, Region(tuple(at), tuple(shape)), digest)


class PartCopy(NamedTuple):
    """One copy of a part of a save.

    Args:
        client: The client whose part it is.
        host: The host that holds the copy.
    """

    client: int
    host: str


@dataclass(frozen=True, slots=True)
class HostParts:
    """The parts that a host holds.

    Args:
        voted: By save, the clients whose parts it holds and knows to belong to a save that all clients voted complete.
        written: By save, the clients whose parts it holds whole, without knowing how the vote ended.
    """

    voted: Mapping[SaveId, frozenset[int]]
    written: Mapping[SaveId, frozenset[int]]

    def to_text(self, max_chars: int) -> str:
        """Return a text for a vote; if it would be too long, the oldest saves are left out."""
        saves = sorted(self.voted.keys() | self.written.keys(), reverse=True)
        while True:
            text = json.dumps(
                [
                    [
                        save.name,
                        _clients_to_text(self.voted.get(save, ())),
                        _clients_to_text(self.written.get(save, ())),
                    ]
                    for save in saves
                ]
            )
            if len(text) <= max_chars or not saves:
                return text
            saves = saves[:-1]

    @classmethod
    def from_text(cls, text: str) -> HostParts:
        """Read the text of a vote. Raises: ValueError, TypeError: The text is malformed."""
        voted, written = {}, {}
        for name, of_voted, of_written in json.loads(text):
            save = SaveId.parse(name)
            voted[save], written[save] = _clients_of_text(of_voted), _clients_of_text(of_written)
        return cls(voted, written)


def _clients_to_text(clients: Sequence[int] | frozenset[int] | tuple[int, ...]) -> str:
    """Return a set of clients as the bits of a number, in base 64: a host holds the parts of few clients."""
    bits = sum(1 << client for client in clients)
    return base64.b64encode(zlib.compress(bits.to_bytes(-(-bits.bit_length() // 8), "big"), 9)).decode() if bits else ""


def _clients_of_text(text: str) -> frozenset[int]:
    if not text:
        return frozenset()
    bits = int.from_bytes(zlib.decompress(base64.b64decode(text)), "big")
    return frozenset(position for position in range(bits.bit_length()) if bits >> position & 1)


@dataclass(frozen=True, slots=True)
class HostInfo:
    """A host of the job, as its clients describe it.

    Args:
        name: Its name.
        domain: The part of the cluster that fails with it.
        clients: Its clients, ascending.
        servers: By client, the address ``host:port`` of its server.
    """

    name: str
    domain: str
    clients: tuple[int, ...]
    servers: Mapping[int, str]
