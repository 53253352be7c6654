"""Open checkpoints: what is in them, and verified reads of any region."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch

from dtckpt.checkpoint.leaves import host_array, torch_dtype
from dtckpt.checkpoint.verifying import Progress, VerifyReport, verify
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigTypeError,
    RegionError,
    RegionNotFoundError,
    StorageError,
    TensorNotFoundError,
    capped,
)
from dtckpt.format import tree as trees
from dtckpt.format.digest import as_bytes, bytes_digest, digest_chunk, digest_of_blocks, documents_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import BLOCKS_NAME, MANIFEST_NAME, ArrayEntry, Manifest
from dtckpt.layout import Layout
from dtckpt.region import Region
from dtckpt.storage import directory
from dtckpt.storage.arrays import ArrayReader, client_folder, stored_empty
from dtckpt.storage.failures import translated

MAX_NBYTES_IN_FLIGHT = 64 << 20
"""Chunks being read at one time; bounds the memory that a read needs beside its destination.

More would not be faster: memory that is used again soon is in the cache and needs no new pages.
"""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One stored chunk: the region it covers, its key below the store's root, its digest, the client that wrote it."""

    region: Region
    key: str
    digest: int
    client: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """One tensor of a checkpoint.

    Args:
        name: Tensor name.
        shape: Global shape.
        dtype: The tensor's dtype.
        stored_dtype: The dtype of its elements on storage.
        layout: Layout at the time of the save; None if it was on no mesh.
        nbytes: Bytes of its elements on storage.
        content_digest: Says what the tensor holds: tensors of equal shape and stored dtype have equal elements if and
            only if their content digests are equal (but for one case in 2**32), whatever their layouts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_dtype: torch.dtype
    layout: Layout | None
    nbytes: int
    content_digest: int | None
    _entry: ArrayEntry

    @property
    def chunks(self) -> list[ChunkInfo]:
        """The chunk list: every stored chunk, row-major."""
        entry = self._entry
        found = []
        for number in range(entry.grid.num_chunks):
            if number not in entry.missing:
                index = entry.grid.index(number)
                key = "/".join([entry.path, "c", *map(str, index)])
                found.append(
                    ChunkInfo(entry.grid.region(index), key, int(entry.digests[number]), int(entry.writers[number]))
                )
        return found

    @property
    def num_chunks(self) -> int:
        """Stored chunks."""
        return self._entry.grid.num_chunks - len(self._entry.missing)

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor was saved."""
        return not self._entry.missing

    @property
    def max_chunk_nbytes(self) -> int:
        """Bytes of the largest chunk's elements on storage."""
        return min(math.prod(self._entry.grid.chunk_shape), math.prod(self.shape)) * self.stored_dtype.itemsize

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Elements per dim of a chunk."""
        return self._entry.grid.chunk_shape

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Elements per dim of the smallest part of a chunk that a read takes from storage."""
        blocks, shape = self._entry.blocks, list(self._entry.grid.chunk_shape)
        if shape:
            shape[blocks.dim] = min(blocks.rows, shape[blocks.dim])
        return tuple(shape)

    def read_nbytes(self, region: Region) -> int:
        """Return the bytes that a read of a region takes from storage: those of all blocks that meet it."""
        return sum(read.nbytes for read in _chunk_reads(self._entry, [(region, None)]))


class Checkpoint:
    """A committed checkpoint, open for reading. Thread-safe; closes as a context manager.

    Reads are local: any client may read any region at any time, without the others.
    """

    def __init__(self, path: Path, root: Path, manifest: Manifest) -> None:
        if manifest.tree and sorted(trees.tensor_names(trees.load(manifest.tree))) != sorted(manifest.arrays):
            raise CheckpointCorruptError(
                f"the manifest of {path} contradicts itself: its state tree does not name every tensor once"
            )
        self.path = path
        self.manifest = manifest
        self._reader = ArrayReader(manifest.kvstore, root)
        self._root = root
        self._block_starts: dict[str, npt.NDArray[np.int64]] | None = None
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                name=name,
                shape=entry.shape,
                dtype=torch_dtype(entry.dtype),
                stored_dtype=torch_dtype(entry.stored_dtype),
                layout=entry.layout,
                nbytes=entry.stored_nbytes,
                content_digest=entry.content,
                _entry=entry,
            )
            for name, entry in manifest.arrays.items()
        }

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors)"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what reading holds open."""
        self._reader.close()

    @property
    def values(self) -> dict[str, Any]:
        """The plain values of the state tree, by path."""
        return dict(trees.values(self.structure)) if self.manifest.tree else {}

    @property
    def structure(self) -> trees.Node:
        """The saved state tree's structure (see `dtckpt.format.tree`).

        A flat set of named tensors counts as a dict of them.
        """
        if self.manifest.tree:
            return trees.load(self.manifest.tree)
        return {"dict": [[name, {"tensor": name}] for name in self.tensors]}

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Return a tensor, or a region of it, as a new CPU tensor; every byte is verified.

        Raises:
            TensorNotFoundError: There is no such tensor.
            RegionError: The region is outside the tensor.
            RegionNotFoundError: That part of the tensor was not saved.
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
        """
        info = self.info(name)
        region = Region.full(info.shape) if region is None else region
        result = torch.empty(region.shape, dtype=info.dtype)
        self.read_into(name, region, host_array(result))
        return result

    def info(self, name: str) -> TensorInfo:
        """Return what is known of a tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorNotFoundError(
                f"checkpoint {self.path} has no tensor {name!r}; it has {capped(map(repr, self.tensors))}", name=name
            ) from None

    def read_into(
        self, name: str, region: Region, into: np.ndarray[Any, Any], *, max_in_flight: int = MAX_NBYTES_IN_FLIGHT
    ) -> int:
        """Read a region of a tensor into ready memory of its shape, converting to the memory's dtype.

        Only chunks that meet the region are read, and of large ones only the blocks that do; chunks inside the region
        go straight into ``into``.

        Args:
            name: Tensor name.
            region: What to read, in global indices.
            into: Memory of the region's shape.
            max_in_flight: Bytes of chunks being read at one time (one chunk may exceed it).

        Returns:
            The bytes read from storage.
        """
        return self.read_all([(name, [(region, into)])], max_in_flight=max_in_flight)

    def read_all(
        self,
        requests: Iterable[tuple[str, Sequence[tuple[Region, np.ndarray[Any, Any]]]]],
        *,
        max_in_flight: int = MAX_NBYTES_IN_FLIGHT,
    ) -> int:
        """Read regions of many tensors, each as `read_into`, with the reads of all of them under way together.

        A chunk that several regions of one tensor need is read once.

        Args:
            requests: Per tensor its name and the regions to be read, each with memory of its shape.
            max_in_flight: As for `read_into`.

        Returns:
            The bytes read from storage.
        """
        nbytes = in_flight = 0
        pending: deque[_ChunkRead] = deque()
        try:
            for name, wanted in requests:
                for read in _chunk_reads(self.info(name)._entry, wanted):
                    while pending and in_flight + read.nbytes > max_in_flight:
                        in_flight -= self._finish(pending.popleft())
                    self._start(read)
                    pending.append(read)
                    in_flight += read.nbytes
                    nbytes += read.nbytes
            while pending:
                self._finish(pending.popleft())
        except (CheckpointCorruptError, StorageError) as error:
            raise self._cause_of(error) from error
        finally:
            # After a failure nothing may go on writing into the caller's memory.
            for read in pending:
                read.handle.exception()
        return nbytes

    def _start(self, read: _ChunkRead) -> None:
        (_, first), *more = read.uses
        is_direct = not more and first.shape == read.box.shape and first.dtype.name == read.entry.stored_dtype
        if is_direct and first.flags.aligned and read.is_whole:
            read.memory, read.uses = first, ()
        elif read.is_whole:
            read.memory = stored_empty(read.entry.stored_dtype, read.box.shape)
        entry = read.entry
        if read.is_whole:
            read.handle = self._reader.start(entry.path, entry.grid, entry.stored_dtype, read.chunk, read.memory)
        else:
            read.handle = self._reader.start_span(entry.path, read.index, *_stored_span(entry, read.chunk, read.box))

    def _finish(self, read: _ChunkRead) -> int:
        """Wait for one chunk, verify it, and deliver it; return its bytes."""
        entry, memory = read.entry, read.memory
        number = entry.grid.number(read.index)
        digest = int(entry.digests[number])
        if read.is_whole:
            self._reader.finish(read.handle, entry.path, read.chunk)
            is_sound = digest_chunk(entry.name, read.index, memory, entry.blocks)[0] == digest
        else:
            start, stop = _stored_span(entry, read.chunk, read.box)
            data = self._reader.finish_span(read.handle, entry.path, read.box, stop - start)
            memory = _from_span(entry, read.box, data)
            digests = self.block_digests(entry, number)[read.blocks.start : read.blocks.stop]
            boxes = entry.blocks.cut(Region.full(memory.shape))
            found = [bytes_digest(as_bytes(memory[box.slices()]).data) for box in boxes]
            is_sound = found == digests
        if not is_sound:
            raise CheckpointCorruptError(
                f"chunk {read.chunk} of tensor {entry.name!r} in {self.path} is damaged: its digest does not match "
                f"(written by client {int(entry.writers[number])}); restore another checkpoint"
            )
        for source, target in read.uses:
            convert(memory[source] if source else memory, target)
        return read.nbytes

    def validate_documents(self) -> None:
        """Check every ``zarr.json``, which only other readers need.

        Raises:
            CheckpointCorruptError: One is not what was written.
        """
        found = self._reader.read_documents(entry.path for entry in self.manifest.arrays.values())
        if documents_digest(found) != self.manifest.documents:
            raise CheckpointCorruptError(
                f"a zarr.json in {self.path} is damaged or missing; dtckpt reads all tensors without it, others cannot"
            )

    def block_digests(self, entry: ArrayEntry, number: int) -> list[int]:
        """Return the digests of a chunk's blocks, verified by that of the chunk; none, if it has one block only."""
        index = entry.grid.index(number)
        count = entry.blocks.count(entry.grid.region(index).shape)
        if count <= 1:
            return []
        file = self._root / client_folder(int(entry.writers[number])) / BLOCKS_NAME
        data, start = b"", 8 * self._blocks_before(entry.name, number)
        with translated("read block digests", file), suppress(FileNotFoundError), open(file, "rb") as stream:
            stream.seek(start)
            data = stream.read(8 * count)
        digests = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
        if digest_of_blocks(entry.name, index, digests) != int(entry.digests[number]):
            raise CheckpointCorruptError(
                f"the block digests of chunk {number} of tensor {entry.name!r} in {file} are damaged; read the whole "
                "chunk, or restore another checkpoint"
            )
        found: list[int] = digests.tolist()
        return found

    def _blocks_before(self, name: str, number: int) -> int:
        """Return how many block digests stand before those of a chunk in its writer's file."""
        if self._block_starts is None:
            self._block_starts = _block_starts(self.manifest)
        return int(self._block_starts[name][number])

    def _cause_of(self, error: CheckpointError) -> CheckpointError:
        """Tell damage from a checkpoint that a save has replaced since it was opened."""
        try:
            is_same = open_checkpoint(self.path).manifest.attempt == self.manifest.attempt
        except CheckpointNotFoundError:
            is_same = False
        except CheckpointError:
            is_same = True
        if is_same:
            return error
        return CheckpointConflictError(f"{self.path} was replaced or removed while it was being read; open it again")

    def verify(self, *, threads: int | None = None, progress: Progress | None = None) -> VerifyReport:
        """Read everything and compare all digests: of chunks, of their blocks, and of the tensors' content.

        Args:
            threads: Chunks that are read and digested at one time; default: one per core, at most 8. Fewer, where
                chunks are so large that they would need more than 256 MiB of memory.
            progress: See `dtckpt.checkpoint.verifying.Progress`.

        Raises:
            CheckpointConflictError: A save replaced the checkpoint meanwhile.
        """
        return verify(self, threads=threads, progress=progress)


_Use = tuple[tuple[slice, ...], np.ndarray[Any, Any]]
"""A part of what is read, as an index into it, and the memory that wants it."""


@dataclass(slots=True, eq=False)
class _ChunkRead:
    """A chunk, or some of its blocks, on its way: what to do with it, and once it was started, where it goes."""

    entry: ArrayEntry
    index: tuple[int, ...]
    chunk: Region
    blocks: range
    box: Region
    """What of the chunk is read."""
    uses: Sequence[_Use]
    memory: Any = None
    handle: Any = None

    @property
    def is_whole(self) -> bool:
        return self.box == self.chunk

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.entry.itemsize


def _chunk_reads(entry: ArrayEntry, wanted: Iterable[tuple[Region, Any]]) -> Iterator[_ChunkRead]:
    """Yield what must be read, chunk by chunk, for some regions of a tensor."""
    parts: dict[tuple[int, ...], list[tuple[Region, Any]]] = {}
    for region, into in wanted:
        if region.ndim != len(entry.shape) or not Region.full(entry.shape).contains(region):
            raise RegionError(f"region {region} is outside tensor {entry.name!r} of shape {entry.shape}")
        for index in entry.grid.meeting(region):
            chunk = entry.grid.region(index)
            if entry.grid.number(index) in entry.missing:
                raise RegionNotFoundError(
                    f"tensor {entry.name!r} was saved in part, without {chunk}; read a region that was saved"
                )
            overlap = chunk.intersect(region)
            if overlap is not None:
                is_part = into is not None and region.ndim
                target = into[overlap.relative_to(region).slices()] if is_part else into
                parts.setdefault(index, []).append((overlap, target))
    blocks = entry.blocks
    for index, uses in parts.items():
        chunk = box = entry.grid.region(index)
        needed = range(blocks.count(chunk.shape))
        if len(needed) > 1:
            spans = [blocks.meeting(chunk, overlap) for overlap, _ in uses]
            needed = range(min(span.start for span in spans), max(span.stop for span in spans))
            box = blocks.span(chunk, needed.start, needed.stop)
        cuts = [(overlap.relative_to(box).slices(), target) for overlap, target in uses]
        yield _ChunkRead(entry, index, chunk, needed, box, cuts)


def _stored_span(entry: ArrayEntry, chunk: Region, box: Region) -> tuple[int, int]:
    """Return where in a stored chunk, which is as long as any, some blocks begin and end, in bytes."""
    dim = entry.blocks.dim
    row = math.prod(entry.grid.chunk_shape[dim + 1 :]) * entry.itemsize
    start = (box.offset[dim] - chunk.offset[dim]) * row
    return start, start + box.shape[dim] * row


def _from_span(entry: ArrayEntry, box: Region, data: bytes) -> np.ndarray[Any, Any]:
    """Return the elements of blocks as they are stored, without the padding of edge chunks."""
    dim = entry.blocks.dim
    stored = (*box.shape[: dim + 1], *entry.grid.chunk_shape[dim + 1 :])
    elements = np.frombuffer(data, DTYPES[entry.stored_dtype]).reshape(stored)
    return elements[tuple(slice(size) for size in box.shape)]


def _block_starts(manifest: Manifest) -> dict[str, npt.NDArray[np.int64]]:
    """Return per tensor and chunk how many block digests stand before the chunk's in its writer's file."""
    totals: dict[int, int] = {}
    starts: dict[str, npt.NDArray[np.int64]] = {}
    for name, entry in manifest.arrays.items():
        grid, blocks = entry.grid, entry.blocks
        if not grid.num_chunks or blocks.count(grid.chunk_shape) <= 1:
            continue
        lengths = np.minimum(
            grid.chunk_shape[blocks.dim],
            grid.shape[blocks.dim] - np.arange(grid.counts[blocks.dim]) * grid.chunk_shape[blocks.dim],
        )
        along = -(-lengths // blocks.rows)
        along[along == 1] = 0  # a chunk of one block has no digests but its own
        counts = np.broadcast_to(along.reshape(-1, *[1] * (len(grid.counts) - blocks.dim - 1)), grid.counts).reshape(-1)
        starts[name] = np.zeros(grid.num_chunks, np.int64)
        for writer in np.unique(entry.writers).tolist():
            mine = entry.writers == writer
            ends = np.cumsum(counts[mine]) + totals.get(writer, 0)
            starts[name][mine] = ends - counts[mine]
            totals[writer] = int(ends[-1])
    return starts


def convert(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Copy elements, converting dtype; floats are rounded to nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a committed checkpoint.

    Raises:
        CheckpointNotFoundError: There is none at the path.
        CheckpointIncompleteError: There is data, but the save did not complete.
        CheckpointVersionError: It was written by a newer version.
        CheckpointCorruptError: Its manifest is damaged.
        StoragePermissionError: It may not be read.
    """
    target = local_path(path)
    # A save may exchange the directory between the look-up and the read; then the second look finds the new one.
    for is_last in (False, True):
        root = directory.locate(target)
        file = root / MANIFEST_NAME
        try:
            with translated("read the manifest", file, is_read=True):
                data = file.read_bytes()
            return Checkpoint(target, root, Manifest.from_bytes(data, str(file)))
        except CheckpointError:
            if is_last or file.exists():
                raise
    raise CheckpointNotFoundError(f"there is no checkpoint at {target}")


def local_path(path: str | Path) -> Path:
    """Return the absolute local path, links followed, of a checkpoint argument (a path or a ``file://`` URL)."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigTypeError(f"a checkpoint's path must be a str or a Path; got {type(path).__name__}")
    text = str(path)
    if "\0" in text or not text:
        raise CheckpointNotFoundError(f"{text!r} is no path")
    if "://" in text and not text.startswith("file://"):
        raise CheckpointNotFoundError(f"cannot open {text}: only local paths and file:// URLs are supported")
    bare = unquote(text.removeprefix("file://")) if text.startswith("file://") else text
    try:
        resolved = os.path.realpath(bare)
        resolved.encode()
    except UnicodeEncodeError:
        raise CheckpointNotFoundError(f"{bare!r} is no path of a checkpoint: it is not valid Unicode") from None
    if "\\" in resolved:
        # TensorStore takes them for slashes: the data would land elsewhere than the manifest.
        raise CheckpointNotFoundError(f"{resolved!r} is no path of a checkpoint: it holds a backslash")
    target = Path(resolved)
    directory.validate_name(target)
    return target
