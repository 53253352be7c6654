"""`PartFiles`: the parts of one save in memory, wherever they lie, as the files of an open checkpoint.

So a restore from the local tier, or of a live version, is the restore of any checkpoint, onto any mesh. Only the reads
differ. Pieces that this host
holds are read from its memory. Of other pieces, another host sends exactly the boxes that are needed. If a copy is
damaged, or its host does not answer, the restore uses another copy and logs why.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from typing_extensions import override

from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.layout_tags import validate_expected_tags
from dtckpt.checkpoint.parts.open_part import OpenPart, piece_seed
from dtckpt.checkpoint.parts.peers import BoxRequest, Peer
from dtckpt.checkpoint.parts.records import PartCopy, PartIndex, SaveId
from dtckpt.checkpoint.parts.server import MAX_BOXES
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.piece_reads import PieceInfo
from dtckpt.checkpoint.reading.pieces import Piece, PieceIndex, PieceTensor
from dtckpt.checkpoint.reading.read_chunks import convert, cut, validate_convertible
from dtckpt.checkpoint.reading.tensor_info import TensorInfo, TensorInfos
from dtckpt.checkpoint.reading.verified_reads import spare_threads
from dtckpt.errors import CheckpointCorruptError, DtckptError, RegionNotFoundError, StorageError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union
from dtckpt.format.digest import as_bytes, bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.tiers")

REQUEST_NBYTES = 8 << 20
"""Bytes that one request to another host asks for; a larger box has a separate request."""
REQUESTS = 4
"""Requests under way at a time."""


@dataclass(slots=True)
class PartTraffic:
    """The bytes that a restore took, by source.

    Args:
        local: Bytes from this host's memory.
        by_host: Bytes from other hosts.
        damaged: The hosts that were passed over, and the reasons.
        damaged_copies: The copies of parts that turned out to be damaged.
    """

    local: int = 0
    by_host: dict[str, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    damaged_copies: set[PartCopy] = field(default_factory=set)

    @property
    def received(self) -> int:
        """Bytes from other hosts."""
        return sum(self.by_host.values())


@dataclass(frozen=True, slots=True)
class PartHolder:
    """A host that holds parts.

    Args:
        name: Its name.
        source: Its server; or, if it is this host, the folder of its parts.
    """

    name: str
    source: Peer | HostFolder


@dataclass(frozen=True, slots=True, eq=False)
class _BoxRead:
    """A box of a piece that some memory needs.

    Args:
        client: The client whose part has the piece.
        number: Its number there.
        here: Where it lies on this host: the client whose part has it, or a near copy of it, and its number there.
        box: The box, relative to the piece.
        target: The memory.
        dtype: The stored dtype.
    """

    client: int
    number: int
    here: tuple[int, int] | None
    box: Region
    target: np.ndarray[Any, Any]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether bytes go to the target without a conversion."""
        return self.target.dtype == self.dtype and self.target.flags.c_contiguous

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Yield memory for the box: the target's own, or memory whose elements are converted at the end."""
        if self.is_direct:
            yield as_bytes(self.target).data
            return
        elements = np.empty(self.box.shape, self.dtype)
        yield as_bytes(elements).data
        convert(elements, self.target)


class _PartInfo(PieceInfo):
    """A tensor of a save in memory: exactly the elements that a region needs are read."""

    @override
    def read_nbytes(self, region: Region) -> int:
        return region.numel * self.tensor.itemsize


class PartFiles(CheckpointFiles):
    """The parts of one save.

    Args:
        save: The save.
        indexes: The index of each client's part.
        holders: By client whose part it is, the hosts to ask for it, in this order.
        kind: The kind of the checkpoint.
        title: Names the save in messages, as ``step 7 of the local tier``.
        lost_error: Raised if no host that holds a part answers.
        validate_held: Called after each read, before what it brought counts; raises if the parts may have been freed
            meanwhile. Default: they are not.

    Attributes:
        tags: The layout tags of the tensors.
    """

    refused: Mapping[str, DtckptError] = {}
    files: Sequence[str] = ()
    unread: Sequence[str] = ()
    has_digests = True

    def __init__(
        self,
        save: SaveId,
        indexes: Mapping[int, PartIndex],
        holders: Mapping[int, Sequence[PartHolder]],
        *,
        kind: str,
        title: str,
        lost_error: type[DtckptError] = CheckpointCorruptError,
        validate_held: Callable[[], object] = lambda: None,
    ) -> None:
        self.kind = kind
        self._lost_error, self._validate_held = lost_error, validate_held
        self.save = save
        self.indexes = indexes
        self.traffic = PartTraffic()
        self._lock = threading.Lock()
        self.identity = save.name
        self._holders = holders
        self._title = title
        self._parts: dict[int, OpenPart] = {}
        self._numbers: dict[tuple[str, Region], tuple[int, int]] = {}
        self._near: dict[tuple[str, Region], tuple[int, int]] = {}
        self.index = PieceIndex(kind, self._tensors(), _united_tree(indexes))
        self.tensors = TensorInfos(self.index.tensors, self._describe)

    def _tensors(self) -> dict[str, PieceTensor]:
        pieces: dict[str, list[Piece]] = defaultdict(list)
        facts: dict[str, tuple[tuple[int, ...], str, str, Any]] = {}
        for client, index in sorted(self.indexes.items()):
            for tensor in index.tensors:
                own = tensor.shape, tensor.dtype, tensor.tag
                if facts.setdefault(tensor.name, (*own, tensor.layout))[:3] != own:
                    raise CheckpointCorruptError(f"the parts of {self._title} describe {tensor.name!r} differently")
            for number, piece in enumerate(index.pieces):
                name = index.tensors[piece.tensor].name
                pieces[name].append(Piece(piece.region, str(client), piece.offset, piece.strides))
                self._numbers[name, piece.region] = client, number
            for number, piece in enumerate(index.copies, len(index.pieces)):
                self._near[index.tensors[piece.tensor].name, piece.region] = client, number
        self.tags = {name: tag for name, (*_, tag, _) in facts.items()}
        return {
            name: PieceTensor(name, shape, dtype, tuple(pieces[name]), layout)
            for name, (shape, dtype, _, layout) in facts.items()
        }

    def _describe(self, name: str) -> TensorInfo:
        tensor = self.index.tensors[name]
        return _PartInfo.of(tensor, max_gap=0, max_nbytes=REQUEST_NBYTES)

    @property
    @override
    def structure(self) -> trees.Node:
        return self.index.structure

    @property
    @override
    def tree(self) -> bytes:
        return trees.dump(self.structure)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that the step was saved with."""
        return self.indexes[0].metrics

    @override
    def fingerprint(self) -> bytes:
        return f"{bytes_digest(self.identity.encode()):016x}".encode()

    # --- reads --------------------------------------------------------------------------------------------------

    @override
    def read(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        self._validate_held()
        # `max_in_flight` bounds nothing: local reads need no memory, and the others are few at a time.
        local: list[_BoxRead] = []
        remote: dict[int, list[_BoxRead]] = defaultdict(list)
        for read in self._reads(requests):
            (remote[read.client] if read.here is None else local).append(read)
        total = 0
        with ThreadPoolExecutor(max(REQUESTS, spare_threads()), thread_name_prefix="dtckpt-tier") as pool:
            batches = [batch for reads in remote.values() for batch in _batches(reads)]
            waiting = [pool.submit(self._read_from_peers, batch) for batch in batches]
            waiting += [pool.submit(self._read_here, batch) for batch in _batches(local)]
            try:
                for future in waiting:
                    nbytes = future.result()
                    total += nbytes
                    count(nbytes)
            except BaseException as error:
                # After a failure nothing may go on writing into the caller's memory.
                pool.shutdown(cancel_futures=True)
                if isinstance(error, DtckptError):
                    self._validate_held()  # says more: memory that was freed has other elements
                raise
        self._validate_held()
        return total

    def _reads(self, requests: Iterable[tuple[str, RegionBuffers]]) -> Iterator[_BoxRead]:
        for name, buffers in requests:
            tensor = self.index.tensors[name]
            validate_convertible(name, tensor.dtype, buffers)
            for region, buffer in buffers:
                found = 0
                for piece in tensor.pieces:
                    common = piece.region.intersect(region)
                    if common is None:
                        continue
                    client, number = self._numbers[name, piece.region]
                    target = cut(buffer, common.relative_to(region).slices())
                    box = common.relative_to(piece.region)
                    found += box.numel
                    here = self._place_here(name, piece.region)
                    yield _BoxRead(client, number, here, box, target, DTYPES[tensor.dtype])
                if found != region.numel:
                    raise RegionNotFoundError(f"{region} of tensor {name!r} was not saved whole in {self._title}")

    def _place_here(self, name: str, region: Region) -> tuple[int, int] | None:
        """Return where this host has a piece: the client whose part or near copy it is, and its number there."""
        client, number = self._numbers[name, region]
        if self._own_folder(client) is not None:
            return client, number
        near = self._near.get((name, region))
        if near is None or self.indexes[near[0]].piece(near[1]).digest != self.indexes[client].piece(number).digest:
            # Copies that differed when they were saved: the part's counts, on every host.
            return None
        return near

    def _read_here(self, batch: Sequence[_BoxRead]) -> int:
        """Read boxes of this host's parts; boxes that are damaged here come from another host."""
        nbytes = 0
        for read in batch:
            assert read.here is not None  # noqa: S101  else it is not read here
            client, number = read.here
            try:
                part, piece = self._own_part(client), self.indexes[client].piece(number)
                if read.is_direct and piece.is_dense and read.box.shape == piece.region.shape:
                    part.copy_whole(number, as_bytes(read.target).data)
                else:
                    convert(cut(part.elements(number), read.box.slices()), read.target)
            except CheckpointCorruptError as error:
                self._pass_over("this host", error)
                if number < len(self.indexes[client].pieces):  # else a near copy, which is no copy of the part
                    own = (each.name for each in self._holders[client] if isinstance(each.source, HostFolder))
                    self.traffic.damaged_copies.update(PartCopy(client, host) for host in own)
                nbytes += self._read_from_peers([read], error)
                continue
            self._count(None, read.nbytes)
            nbytes += read.nbytes
        return nbytes

    def _own_folder(self, client: int) -> HostFolder | None:
        """Return the folder of this host that has a client's part; None if this host does not hold it."""
        return next((each.source for each in self._holders[client] if isinstance(each.source, HostFolder)), None)

    def map_parts(self) -> None:
        """Map the parts of this host now: then they stay, even if their files are removed before they are read."""
        for client in self.indexes:
            if self._own_folder(client) is not None:
                with suppress(CheckpointCorruptError):  # it is asked for again when it is read
                    self._own_part(client)

    def _own_part(self, client: int) -> OpenPart:
        part, folder = self._parts.get(client), self._own_folder(client)
        if part is None:
            assert folder is not None  # noqa: S101  else nothing is read here
            try:
                part = OpenPart(folder, self.save, client, self.indexes[client])
            except FileNotFoundError as error:
                raise CheckpointCorruptError(f"the part of client {client} has gone: {error}") from error
            self._parts[client] = part
        return part

    def _read_from_peers(self, batch: Sequence[_BoxRead], failure: DtckptError | None = None) -> int:
        """Read boxes of one client's part from the first host that holds it undamaged."""
        client = batch[0].client
        nbytes = sum(read.nbytes for read in batch)
        for holder in self._holders[client]:
            if isinstance(holder.source, HostFolder):
                continue
            try:
                with ExitStack() as delivery:
                    boxes = [self._request(read, delivery.enter_context(read.buffer())) for read in batch]
                    holder.source.read(self.save, client, boxes)
            except (CheckpointCorruptError, StorageError) as error:
                self._pass_over(f"host {holder.name}", error)
                if isinstance(error, CheckpointCorruptError):
                    self.traffic.damaged_copies.add(PartCopy(client, holder.name))
                failure = error
                continue
            self._count(holder.name, nbytes)
            return nbytes
        is_damaged = isinstance(failure, CheckpointCorruptError)
        raise (CheckpointCorruptError if is_damaged else self._lost_error)(
            f"no host holds the part of client {client} of {self._title} undamaged: {failure}"
        ) from failure

    def _count(self, host: str | None, nbytes: int) -> None:
        """Count bytes from another host, or from this host."""
        with self._lock:  # reads run in several threads
            if host is None:
                self.traffic.local += nbytes
            else:
                self.traffic.by_host[host] = self.traffic.by_host.get(host, 0) + nbytes

    def _request(self, read: _BoxRead, buffer: memoryview) -> BoxRequest:
        index = self.indexes[read.client]
        piece = index.pieces[read.number]
        is_whole = piece.is_dense and read.box.shape == piece.region.shape
        seed = piece_seed(index.tensors[piece.tensor].name, piece.region) if is_whole else None
        return BoxRequest(read.number, read.box, buffer, seed, piece.digest)

    def _pass_over(self, where: str, error: DtckptError) -> None:
        text = f"{where}: {error}"
        if text not in self.traffic.damaged:
            self.traffic.damaged.append(text)
            logger.warning("%s: another copy is taken, because of %s", self._title, text)

    # --- checks -------------------------------------------------------------------------------------------------

    @override
    def validate_stored(self, regions: Iterable[tuple[str, Region]], unchecked: int) -> None:
        # A part takes as much memory as it describes.
        for name, region in regions:
            tensor = self.index.tensors[name]
            if not tensor.is_whole and sum(
                common.numel for piece in tensor.pieces if (common := piece.region.intersect(region)) is not None
            ) != math.prod(region.shape):
                raise RegionNotFoundError(f"{region} of tensor {name!r} was not saved whole in {self._title}")

    @override
    def parts(self, name: str) -> Iterator[Region]:
        return (piece.region for piece in self.index.tensors[name].pieces)

    @override
    def validate_part(self, name: str, region: Region) -> None:
        # Reads verify everything.
        return

    @override
    def validate_rest(self) -> None:
        # There is nothing else.
        return

    @override
    def tied(self) -> Mapping[str, str]:
        return {}

    @override
    def close(self) -> None:
        self._parts.clear()


class PartCheckpoint(Checkpoint):
    """A save in memory, open for reading.

    Args:
        files: Its parts.
        path: Its directory on this host, or its location.
        is_remote: Whether other hosts hold parts that this host lacks.
        layout_tags: The tags that its reader expects, by glob on names.
    """

    def __init__(
        self,
        files: PartFiles,
        path: Location,
        *,
        is_remote: bool,
        layout_tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(path, files)
        self.parts = files
        self._layout_tags = layout_tags
        # Where clients need the same bytes, one of them reads each, and sends it on.
        self.is_remote = is_remote

    @override
    def validate_wanted(self, names: Iterable[str]) -> None:
        tags = self.parts.tags
        validate_expected_tags(((name, tags[name]) for name in names), self._layout_tags, str(self.path))


def _united_tree(indexes: Mapping[int, PartIndex]) -> trees.Node:
    by_text: dict[bytes, int] = {}
    for client, index in sorted(indexes.items()):
        by_text.setdefault(index.tree, client)
    return tree_union.unite({client: trees.load(text) for text, client in by_text.items()})


def _batches(reads: Iterable[_BoxRead]) -> Iterator[list[_BoxRead]]:
    batch: list[_BoxRead] = []
    nbytes = 0
    for read in reads:
        if batch and (nbytes + read.nbytes > REQUEST_NBYTES or len(batch) == MAX_BOXES):
            yield batch
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += read.nbytes
    if batch:
        yield batch
