"""`open_checkpoint` and `Checkpoint`: the tensors and values of a checkpoint, and verified reads of any region."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from dtckpt.checkpoint.reading.block_digests import BlockDigests
from dtckpt.checkpoint.reading.read_regions import UNCHECKED_NBYTES, RegionReader
from dtckpt.checkpoint.reading.tensor_info import TensorInfo, TensorInfos
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    TensorNotFoundError,
    capped,
)
from dtckpt.format import tree as trees
from dtckpt.format.digest import documents_digest
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, ArrayEntry, Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.chunk_reader import ChunkReader
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.location import Location, is_remote, location_of

if TYPE_CHECKING:
    import torch

    from dtckpt.checkpoint.reading.verify import Progress, VerifyReport


class Checkpoint:
    """A committed checkpoint, open for reading. Thread-safe; closes as a context manager.

    Reads are local: any client may read any region at any time, without the others.
    """

    def __init__(self, path: Location, root: Folder, manifest: Manifest) -> None:
        self._structure = trees.load(manifest.tree) if manifest.tree else None
        # Lists, not sets: a name that occurs twice is refused, too.
        if self._structure is not None and sorted(trees.tensor_names(self._structure)) != sorted(manifest.arrays):
            raise CheckpointCorruptError(
                f"the manifest of {path} contradicts itself: its state tree does not name every tensor once"
            )
        self.path = path
        self.manifest = manifest
        self.is_remote = is_remote(path)
        # Local files are read by preadv into the destination; elsewhere many requests have to be under way at once.
        self._reader = ChunkReader(manifest.kvstore, root, by_file=not self.is_remote)
        self._root = root
        self._block_digests = BlockDigests(manifest, root)
        self._regions = RegionReader(path, root, self._reader, self._block_digests, is_remote=self.is_remote)
        self.tensors: Mapping[str, TensorInfo] = TensorInfos(manifest.arrays)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors)"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that reading holds open."""
        self._reader.close()

    @property
    def values(self) -> dict[str, Any]:
        """The plain values of the state tree, by path."""
        return dict(trees.values(self.structure)) if self.manifest.tree else {}

    @property
    def structure(self) -> trees.Node:
        """The saved state tree's structure (see `dtckpt.format.tree`), which must not be changed.

        A flat set of named tensors counts as a dict of them.
        """
        if self._structure is not None:
            return self._structure
        return {"dict": [[name, {"tensor": name}] for name in self.tensors]}

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Return a tensor, or a region of it, as a new CPU tensor; every byte is verified.

        Raises:
            TensorNotFoundError: There is no such tensor.
            RegionError: The region is outside the tensor.
            RegionNotFoundError: That part of the tensor was not saved.
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
        """
        # Here, because they import PyTorch, which takes seconds: commands that only look or verify do without it.
        from dtckpt.checkpoint.leaves import host_array
        from dtckpt.checkpoint.reading.tensor_memory import new_memory

        info = self.info(name)
        region = Region.full(info.shape) if region is None else region
        # Before memory is taken: the tensor's shape is a claim of the manifest, and may be any.
        self.validate_stored([(name, region)])
        result = new_memory(name, region.shape, info.dtype)
        self.read_into(name, region, host_array(result))
        return result

    def info(self, name: str) -> TensorInfo:
        """Return the facts about a tensor. Raises: as `entry`."""
        return self.tensors[self.entry(name).name]

    def entry(self, name: str) -> ArrayEntry:
        """Return a tensor's entry in the manifest.

        Raises:
            TensorNotFoundError: There is no such tensor.
        """
        try:
            return self.manifest.arrays[name]
        except KeyError:
            raise TensorNotFoundError(
                f"checkpoint {self.path} has no tensor {name!r}; it has {capped(map(repr, self.tensors))}", name=name
            ) from None

    def read_into(
        self, name: str, region: Region, into: np.ndarray[Any, Any], *, max_in_flight: int | None = None
    ) -> int:
        """Read a region of a tensor into an array of its shape, converting to the array's dtype.

        Only chunks that intersect the region are read, and of large chunks only the blocks that do. Chunks inside the
        region are read straight into ``into``.

        Args:
            name: Tensor name.
            region: The region to read, in global indices.
            into: Array of the region's shape.
            max_in_flight: Bound on the bytes of chunks that are read at one time (one chunk may exceed it); default: as
                is fast for the storage.

        Returns:
            The bytes read from storage.
        """
        return self.read_all([(name, [(region, into)])], max_in_flight=max_in_flight)

    def read_all(
        self,
        requests: Iterable[tuple[str, Sequence[tuple[Region, np.ndarray[Any, Any]]]]],
        *,
        max_in_flight: int | None = None,
        count: Callable[[int], object] = lambda _: None,
    ) -> int:
        """Read regions of many tensors at the same time, each as `read_into`.

        A chunk that several regions of one tensor need is read once.

        Args:
            requests: For each tensor its name, and the regions to read, each with an array of its shape.
            max_in_flight: As for `read_into`.
            count: Called with the bytes of every part of a chunk that was read.

        Returns:
            The bytes read from storage.
        """
        # An iterator: the reads of millions of chunks are never planned all at once.
        entries = ((self.entry(name), buffers) for name, buffers in requests)
        try:
            return self._regions.read(entries, max_in_flight, count)
        except (CheckpointCorruptError, StorageError) as error:
            raise self._cause_of(error) from error

    def validate_stored(self, regions: Iterable[tuple[str, Region]], *, unchecked: int = UNCHECKED_NBYTES) -> None:
        """As `RegionReader.validate_stored`, by names of tensors."""
        entries = ((self.entry(name), region) for name, region in regions)
        try:
            self._regions.validate_stored(entries, unchecked=unchecked)
        except (CheckpointCorruptError, StorageError) as error:
            raise self._cause_of(error) from error

    def validate_documents(self) -> None:
        """Check every ``zarr.json``, which other readers than dtckpt need.

        Raises:
            CheckpointCorruptError: A document is not the one that was written.
        """
        # An iterator: the documents of millions of arrays are never in memory together.
        documents = self._reader.read_documents(entry.path for entry in self.manifest.arrays.values())
        if documents_digest(documents) != self.manifest.documents:
            raise CheckpointCorruptError(
                f"a zarr.json in {self.path} is damaged or missing; dtckpt reads all tensors without it, others cannot"
            )

    def block_digests(self, entry: ArrayEntry, number: int) -> list[int]:
        """Return the digests of all blocks of a chunk, as `BlockDigests.read`."""
        return self._block_digests.read(entry, number, range(sys.maxsize))

    def _cause_of(self, error: CheckpointError) -> CheckpointError:
        """Return the error, or another one if a save has replaced the checkpoint since it was opened."""
        try:
            # The token of an attempt is random, so equal tokens mean that no save came in between.
            is_same = open_checkpoint(self.path).manifest.attempt == self.manifest.attempt
        except CheckpointNotFoundError:
            is_same = False
        except CheckpointError:
            # It cannot be told, and the first error says more than this one.
            is_same = True
        if is_same:
            return error
        return CheckpointConflictError(f"{self.path} was replaced or removed while it was being read; open it again")

    def verify(self, *, threads: int | None = None, progress: Progress | None = None) -> VerifyReport:
        """Read everything and compare all digests: of chunks, of their blocks, and of the tensors' content.

        Args:
            threads: Chunks that are read and digested at one time; default: one per core, at most 8. Fewer, where
                chunks are so large that they would need more than 256 MiB of memory.
            progress: See `dtckpt.checkpoint.reading.verify.Progress`.

        Raises:
            CheckpointConflictError: A save replaced the checkpoint meanwhile.
        """
        # Here, because its digests are slow to import, and few who open a checkpoint verify it.
        from dtckpt.checkpoint.reading.verify import verify

        return verify(self, threads=threads, progress=progress)


def open_checkpoint(path: str | Location) -> Checkpoint:
    """Open a committed checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointIncompleteError: There is data, but the save did not complete.
        CheckpointVersionError: A newer version of dtckpt wrote the checkpoint.
        CheckpointCorruptError: Its manifest is damaged.
        StoragePermissionError: It may not be read.
    """
    place = commit_target_of(location_of(path))
    # A save may replace the checkpoint between the look-up and the read; then the second look-up finds the new one.
    for is_last in (False, True):
        folder = place.locate()
        try:
            with translate_errors("read the manifest", folder, is_read=True):
                data = folder.read_whole(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
            return Checkpoint(place.where, folder, Manifest.from_bytes(data, f"{folder}/{MANIFEST_NAME}"))
        except CheckpointError:
            # Still the same folder: the error is about this checkpoint, and another try would give it again.
            if is_last or str(place.locate()) == str(folder):
                raise
    # Not reached: the last try returns or raises.
    raise CheckpointNotFoundError(f"there is no checkpoint at {place.where}")
