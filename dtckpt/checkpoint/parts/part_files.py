"""`PartFiles`: the parts of one save in the memory of hosts, as the files of an open checkpoint.

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
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from typing_extensions import override

from dtckpt.checkpoint.parts.announced_boxes import Box
from dtckpt.checkpoint.parts.changes import WORDS
from dtckpt.checkpoint.parts.held_boxes import BoxContent, HeldBoxes
from dtckpt.checkpoint.parts.layout_tags import validate_expected_tags
from dtckpt.checkpoint.parts.mapped_folder import MappedFolder
from dtckpt.checkpoint.parts.open_part import piece_digest, piece_seed
from dtckpt.checkpoint.parts.records import PartCopy, PartIndex, SaveId
from dtckpt.checkpoint.parts.server import MAX_BOXES
from dtckpt.checkpoint.parts.transports import BoxRequest, PartTransport
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.piece_reads import PieceInfo
from dtckpt.checkpoint.reading.pieces import Piece, PieceIndex, PieceTensor
from dtckpt.checkpoint.reading.read_chunks import cut, validate_convertible
from dtckpt.checkpoint.reading.tensor_info import TensorInfo, TensorInfos
from dtckpt.checkpoint.reading.verified_reads import spare_threads
from dtckpt.errors import CheckpointCorruptError, DtckptError, RegionNotFoundError, StorageError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union
from dtckpt.format.digest import bytes_digest
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
        by_host: Bytes that other hosts sent.
        verified: Bytes that were compared with the digest of the save where they arrived.
        verified_at_source: Bytes that were compared before they were sent or copied.
        unchanged: Bytes that the memory held already.
        has_begun: Whether a read has begun, so that memory may have been written.
        damaged: The hosts that were passed over, and the reasons.
        damaged_copies: The copies of parts that turned out to be damaged.
    """

    local: int = 0
    by_host: dict[str, int] = field(default_factory=dict)
    verified: int = 0
    verified_at_source: int = 0
    unchanged: int = 0
    has_begun: bool = False
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
        source: The way to its parts.
    """

    name: str
    source: PartTransport


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
        content: The digest of the box in this save.
        held: The box that the memory holds already, if that is known.
    """

    client: int
    number: int
    here: tuple[int, int] | None
    box: Region
    target: np.ndarray[Any, Any]
    dtype: np.dtype[Any]
    content: BoxContent
    held: BoxContent | None

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def base(self) -> int | None:
        """The digest of the box of another save that the memory holds, if changes from there could be applied."""
        held, content = self.held, self.content
        can_change = self.target.dtype == self.dtype and self.dtype.itemsize in WORDS and content.digest is not None
        return held.digest if held is not None and held.is_same_box(content) and can_change else None

    @property
    def is_verified(self) -> bool:
        """Whether the memory that holds the box was compared with a digest of it, if there is one to compare with."""
        has_one = self.content.digest is not None and self.target.dtype == self.dtype
        return self.held is not None and (self.held.digest is not None or not has_one)

    def request(self) -> BoxRequest:
        """Return the request to a host that has the part."""
        content = self.content
        if content.digest is None:
            return BoxRequest(self.number, self.box, self.target, self.dtype)
        seed = piece_seed(content.tensor, content.region)
        return BoxRequest(self.number, self.box, self.target, self.dtype, seed, content.digest, self.base)


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
        held: The boxes that the output memory holds; default: none is known.
        lost_error: Raised if no host that holds a part answers.
        validate_held: Called after each read, before its bytes count; raises if the parts may have been freed
            meanwhile. Default: they are not.

    Attributes:
        boxes: By client, the boxes of its pieces that were read or held, but for whole pieces; empty without ``held``.
        tags: The layout tags of the tensors.
        taken: Tensors of which this client took bytes, or another client that reads them together with this client.
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
        held: HeldBoxes | None = None,
        lost_error: type[DtckptError] = CheckpointCorruptError,
        validate_held: Callable[[], object] = lambda: None,
    ) -> None:
        self.kind = kind
        self._lost_error, self._validate_held = lost_error, validate_held
        self.save = save
        self.indexes = indexes
        self.traffic = PartTraffic()
        self.boxes: dict[int, set[Box]] = defaultdict(set)
        self._held = held
        self.taken: set[str] = set()
        self._asked: set[str] = set()
        """Tensors that clients would read together, unless they hold them."""
        self._digests: dict[Box, int] = {}
        self._lock = threading.Lock()
        self.identity = save.name
        self._holders = holders
        self._title = title
        self._numbers: dict[tuple[str, Region], tuple[int, int]] = {}
        self._near: dict[tuple[str, Region], tuple[int, int]] = {}
        self.index = PieceIndex(kind, self._tensors(), _united_tree(indexes))
        self.tensors = TensorInfos(self.index.tensors, self._describe)

    def _tensors(self) -> dict[str, PieceTensor]:
        pieces: dict[str, list[Piece]] = defaultdict(list)
        facts: dict[str, tuple[tuple[int, ...], str, str, Any]] = {}
        for client, index in sorted(self.indexes.items()):
            self._digests |= index.digests()
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
        self._validate_lease()
        if self._held is not None and not self.traffic.has_begun:
            self._held.begin()
        self.traffic.has_begun = True
        # `max_in_flight` bounds nothing: local reads need no memory, and the others are few at a time.
        held: list[_BoxRead] = []
        local: list[_BoxRead] = []
        remote: dict[int, list[_BoxRead]] = defaultdict(list)
        for read in self._reads(requests):
            if read.held is not None and read.held.equals(read.content):
                held.append(read)
            else:
                (remote[read.client] if read.here is None else local).append(read)
        total = 0
        with ThreadPoolExecutor(max(REQUESTS, spare_threads()), thread_name_prefix="dtckpt-tier") as pool:
            batches = [batch for reads in remote.values() for batch in _batches(reads)]
            waiting = [pool.submit(self._read_from_peers, batch) for batch in batches]
            waiting += [pool.submit(self._read_here, batch) for batch in _batches(local)]
            waiting += [pool.submit(self._confirm, batch) for batch in _batches(held)]
            try:
                for future in waiting:
                    nbytes = future.result()
                    total += nbytes
                    count(nbytes)
            except BaseException as error:
                # After a failure nothing may go on writing into the caller's memory.
                pool.shutdown(cancel_futures=True)
                # The error of a lease says more than other errors of ours: memory that was freed has other elements.
                with nullcontext() if isinstance(error, DtckptError) else suppress(DtckptError):
                    self._validate_lease()
                raise
        self._validate_lease()
        return total

    def _validate_lease(self) -> None:
        """Check that the parts were not freed. Else boxes without digests may have come from other elements."""
        try:
            self._validate_held()
        except DtckptError:
            if self._held is not None:
                self._held.clear()
            raise

    def _reads(self, requests: Iterable[tuple[str, RegionBuffers]]) -> Iterator[_BoxRead]:
        for name, buffers in requests:
            tensor = self.index.tensors[name]
            validate_convertible(name, tensor.dtype, buffers)
            for region, buffer in buffers:
                found = 0
                for content, target in self._contents(name, region, buffer):
                    client, number = self._numbers[name, content.piece]
                    found += content.region.numel
                    held = None
                    if self._held is not None:
                        held = self._held.take(target)
                        if content.region != content.piece:
                            self.boxes[client].add((name, content.region))
                    here, box = self._place_here(name, content.piece), content.region.relative_to(content.piece)
                    yield _BoxRead(client, number, here, box, target, DTYPES[tensor.dtype], content, held)
                if found != region.numel:
                    raise RegionNotFoundError(f"{region} of tensor {name!r} was not saved whole in {self._title}")

    def _contents(
        self, name: str, region: Region, buffer: np.ndarray[Any, Any]
    ) -> Iterator[tuple[BoxContent, np.ndarray[Any, Any]]]:
        """Yield the boxes of pieces that make a region of a tensor, each with its part of the region's memory."""
        tensor = self.index.tensors[name]
        for piece in tensor.pieces:
            common = piece.region.intersect(region)
            if common is not None:
                client, number = self._numbers[name, piece.region]
                of_piece = self.indexes[client].pieces[number].digest
                content = BoxContent(
                    name, common, tensor.dtype, self._digests.get((name, common)), piece.region, of_piece
                )
                yield content, cut(buffer, common.relative_to(region).slices())

    def is_held(self, name: str, buffers: RegionBuffers) -> bool:
        """As `Checkpoint.is_held`."""
        held = self._held
        self._asked.add(name)
        if held is None or held.tensors.get(name) != self._digest_of(name):
            return False
        return all(held.has(memory, content) for each in buffers for content, memory in self._contents(name, *each))

    def has_elements(self, name: str, buffers: RegionBuffers) -> bool:
        """As `Checkpoint.has_elements`."""
        return all(
            memory.dtype == DTYPES[self.index.tensors[name].dtype] and _has_content(content, memory)
            for each in buffers
            for content, memory in self._contents(name, *each)
        )

    def note_filled(self, tensors: Iterable[tuple[str, RegionBuffers]]) -> None:
        """As `Checkpoint.note_filled`."""
        if self._held is None:
            return
        for name, buffers in tensors:
            self.taken.add(name)
            for each in buffers:
                for content, memory in self._contents(name, *each):
                    self._held.note(memory, content)
        self._held.note_whole({name: self._digest_of(name) for name in self._asked})

    def _digest_of(self, name: str) -> int:
        """Return a digest of all pieces of a tensor."""
        tensor = self.index.tensors[name]
        pieces = [(piece.region, self._digests[name, piece.region]) for piece in tensor.pieces]
        return bytes_digest(repr((tensor.dtype, pieces)).encode())

    def _place_here(self, name: str, region: Region) -> tuple[int, int] | None:
        """Return where this host has a piece: the client whose part or near copy it is, and its number there."""
        client, number = self._numbers[name, region]
        if self._mapped(client) is not None:
            return client, number
        near = self._near.get((name, region))
        if near is None or self.indexes[near[0]].piece(near[1]).digest != self.indexes[client].piece(number).digest:
            # Copies that differed when they were saved: the part's counts, on every host.
            return None
        return near

    def _confirm(self, batch: Sequence[_BoxRead]) -> int:
        """Verify the boxes that the memory should hold, and read the boxes that it does not hold."""
        nbytes = 0
        for read in batch:
            assert self._held is not None  # noqa: S101  else nothing is held
            if (read.is_verified and self._held.is_private(read.target)) or _has_digest(read):
                self._held.note(read.target, read.content)
                with self._lock:
                    self.traffic.unchanged += read.nbytes
            else:
                other = replace(read, held=None)
                nbytes += self._read_from_peers([other]) if read.here is None else self._read_here([other])
        return nbytes

    def _read_here(self, batch: Sequence[_BoxRead]) -> int:
        """Read boxes of this host's parts; boxes that are damaged here come from another host."""
        nbytes = 0
        for read in batch:
            assert read.here is not None  # noqa: S101  else it is not read here
            client, number = read.here
            mapped = self._mapped(client)
            assert mapped is not None  # noqa: S101  else nothing is read here
            try:
                mapped.open(self.save, client, self.indexes[client])
                mapped.read(self.save, client, [replace(read.request(), number=number)])
            except CheckpointCorruptError as error:
                self._pass_over("this host", error)
                if number < len(self.indexes[client].pieces):  # else a near copy, which is no copy of the part
                    own = (each.name for each in self._holders[client] if isinstance(each.source, MappedFolder))
                    self.traffic.damaged_copies.update(PartCopy(client, host) for host in own)
                nbytes += self._read_from_peers([read], error)
                continue
            self._count(None, read.nbytes, [read])
            nbytes += read.nbytes
        return nbytes

    def _mapped(self, client: int) -> MappedFolder | None:
        """Return the folder of this host that has a client's part; None if this host does not hold it."""
        return next((each.source for each in self._holders[client] if isinstance(each.source, MappedFolder)), None)

    def map_parts(self) -> None:
        """Map the parts of this host now: then they stay, even if their files are removed before they are read."""
        for client in self.indexes:
            if (mapped := self._mapped(client)) is not None:
                with suppress(CheckpointCorruptError):  # it is asked for again when it is read
                    mapped.open(self.save, client, self.indexes[client])

    def _read_from_peers(self, batch: Sequence[_BoxRead], failure: DtckptError | None = None) -> int:
        """Read boxes of one client's part from the first host that holds it undamaged."""
        client = batch[0].client
        nbytes = sum(read.nbytes for read in batch)
        for holder in self._holders[client]:
            if isinstance(holder.source, MappedFolder):
                continue
            try:
                sent = holder.source.read(self.save, client, [read.request() for read in batch])
            except (CheckpointCorruptError, StorageError) as error:
                self._pass_over(f"host {holder.name}", error)
                if isinstance(error, CheckpointCorruptError):
                    self.traffic.damaged_copies.add(PartCopy(client, holder.name))
                failure = error
                continue
            self._count(holder.name, sent, batch)
            return nbytes
        is_damaged = isinstance(failure, CheckpointCorruptError)
        raise (CheckpointCorruptError if is_damaged else self._lost_error)(
            f"no host holds the part of client {client} of {self._title} undamaged: {failure}"
        ) from failure

    def _count(self, host: str | None, nbytes: int, batch: Sequence[_BoxRead]) -> None:
        """Count boxes that were read and verified, and bytes from another host, or from this host; note the boxes."""
        with self._lock:  # reads run in several threads
            if host is None:
                self.traffic.local += nbytes
            else:
                self.traffic.by_host[host] = self.traffic.by_host.get(host, 0) + nbytes
            for read in batch:
                self.taken.add(read.content.tensor)
                if read.content.digest is None:
                    self.traffic.verified_at_source += read.nbytes
                else:
                    self.traffic.verified += read.nbytes
                if self._held is not None:
                    self._held.note(read.target, read.content)

    def _pass_over(self, where: str, error: DtckptError) -> None:
        text = f"{where}: {error}"
        if text not in self.traffic.damaged:
            self.traffic.damaged.append(text)
            logger.warning("%s: another copy is taken, because of %s", self._title, text)

    def have_digests(self, boxes: Iterable[Box]) -> bool:
        """Whether all these boxes have digests in the save."""
        return all(box in self._digests for box in boxes)

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
        for holder in chain.from_iterable(self._holders.values()):
            holder.source.close()


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

    @override
    def is_held(self, name: str, buffers: RegionBuffers) -> bool:
        return self.parts.is_held(name, buffers)

    @override
    def has_taken(self, name: str) -> bool:
        return name in self.parts.taken

    @override
    def has_elements(self, name: str, buffers: RegionBuffers) -> bool:
        return self.parts.has_elements(name, buffers)

    @override
    def note_filled(self, tensors: Iterable[tuple[str, RegionBuffers]]) -> None:
        self.parts.note_filled(tensors)


def _has_digest(read: _BoxRead) -> bool:
    """Whether the memory of a read has the elements that the read would bring; not known of converted elements."""
    return read.target.dtype == read.dtype and _has_content(read.content, read.target)


def _has_content(content: BoxContent, memory: np.ndarray[Any, Any]) -> bool:
    """Whether memory of a box has its elements; not known if it has no digest."""
    return content.digest is not None and piece_digest(content.tensor, content.region, memory) == content.digest


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
