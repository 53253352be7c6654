"""Open checkpoints: what is in them, and verified reads of any region."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from dtckpt.checkpoint.leaves import host_array, torch_dtype
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
from dtckpt.format.digest import chunk_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import MANIFEST_NAME, ArrayEntry, Manifest
from dtckpt.layout import Layout
from dtckpt.region import Region
from dtckpt.storage import directory
from dtckpt.storage.arrays import ArrayReader, stored_empty
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
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_dtype: torch.dtype
    layout: Layout | None
    nbytes: int
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


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that does not hold what was saved."""

    tensor: str
    region: Region
    reason: str


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
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                name=name,
                shape=entry.shape,
                dtype=torch_dtype(entry.dtype),
                stored_dtype=torch_dtype(entry.stored_dtype),
                layout=entry.layout,
                nbytes=entry.stored_nbytes,
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

        Only chunks that meet the region are read; those inside it go straight into ``into``.

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
                entry = self.info(name)._entry
                for index, uses in _uses_by_chunk(entry, wanted).items():
                    size = entry.grid.region(index).numel * DTYPES[entry.stored_dtype].itemsize
                    while pending and in_flight + size > max_in_flight:
                        in_flight -= self._finish(pending.popleft())
                    pending.append(self._start(entry, index, uses))
                    in_flight += size
                    nbytes += size
            while pending:
                self._finish(pending.popleft())
        except (CheckpointCorruptError, StorageError) as error:
            raise self._cause_of(error) from error
        finally:
            # After a failure nothing may go on writing into the caller's memory.
            for read in pending:
                read.handle.exception()
        return nbytes

    def _start(self, entry: ArrayEntry, index: tuple[int, ...], uses: Sequence[_Use]) -> _ChunkRead:
        chunk = entry.grid.region(index)
        (_, first), *more = uses
        is_direct = not more and first.shape == chunk.shape and first.dtype.name == entry.stored_dtype
        if is_direct and first.flags.aligned:
            memory, uses = first, ()
        else:
            memory = stored_empty(entry.stored_dtype, chunk.shape)
        handle = self._reader.start(entry.path, entry.grid, entry.stored_dtype, chunk, memory)
        return _ChunkRead(entry, index, chunk, memory, uses, handle)

    def _finish(self, read: _ChunkRead) -> int:
        """Wait for one chunk, verify it, and deliver it; return its bytes."""
        entry = read.entry
        self._reader.finish(read.handle, entry.path, read.chunk)
        number = entry.grid.number(read.index)
        if chunk_digest(entry.name, read.index, read.memory) != int(entry.digests[number]):
            raise CheckpointCorruptError(
                f"chunk {read.chunk} of tensor {entry.name!r} in {self.path} is damaged: its digest does not match "
                f"(written by client {int(entry.writers[number])}); restore another checkpoint"
            )
        for source, target in read.uses:
            convert(read.memory[source] if source else read.memory, target)
        return read.memory.nbytes

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

    def verify(self) -> list[Damage]:
        """Read every chunk and compare digests.

        Returns:
            What is damaged; empty if nothing is.
        """
        found = []
        for name, info in self.tensors.items():
            entry = info._entry
            for chunk in info.chunks:
                try:
                    self.read_into(name, chunk.region, stored_empty(entry.stored_dtype, chunk.region.shape))
                except CheckpointError as error:
                    found.append(Damage(name, chunk.region, error.message))
        return found


_Use = tuple[tuple[slice, ...], np.ndarray[Any, Any]]
"""A part of a chunk, as an index into it, and the memory that wants it."""


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRead:
    """A chunk on its way: ``memory`` takes all of it; ``uses`` is what to do with it then."""

    entry: ArrayEntry
    index: tuple[int, ...]
    chunk: Region
    memory: np.ndarray[Any, Any]
    uses: Sequence[_Use]
    handle: Any


def _uses_by_chunk(
    entry: ArrayEntry, wanted: Iterable[tuple[Region, np.ndarray[Any, Any]]]
) -> dict[tuple[int, ...], list[_Use]]:
    """Return, per chunk that meets any of the wanted regions, which part goes where."""
    uses: dict[tuple[int, ...], list[_Use]] = {}
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
                target = into[overlap.relative_to(region).slices()] if region.ndim else into
                uses.setdefault(index, []).append((overlap.relative_to(chunk).slices(), target))
    return uses


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
