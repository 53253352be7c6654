"""`ManifestFiles`: the files of a checkpoint of this library's format, which a manifest describes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from typing_extensions import override

from dtckpt.checkpoint.reading.block_digests import BlockDigests
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.plan import max_chunk_nbytes, plan_tensor_reads
from dtckpt.checkpoint.reading.tensor_info import ChunkInfo, TensorInfo, TensorInfos
from dtckpt.checkpoint.reading.verified_reads import RegionReader
from dtckpt.errors import CheckpointCorruptError, DtckptError
from dtckpt.format import tree as trees
from dtckpt.format.digest import documents_digest
from dtckpt.format.manifest import ArrayEntry, Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.chunk_reader import ChunkReader
from dtckpt.storage.folder import Folder
from dtckpt.storage.location import Location

KIND = "dtckpt"


@dataclass(frozen=True, slots=True, eq=False)
class ArrayInfo(TensorInfo):
    """A tensor that is stored as one array, which has an entry in the manifest."""

    entry: ArrayEntry
    origins: Sequence[str] = ()

    @classmethod
    def of(cls, entry: ArrayEntry, origins: Sequence[str] = ()) -> ArrayInfo:
        """Return the facts about the array of an entry; ``origins`` as in the manifest."""
        return cls(
            name=entry.name,
            shape=entry.shape,
            dtype_name=entry.dtype,
            stored_dtype_name=entry.stored_dtype,
            layout=entry.layout,
            nbytes=entry.stored_nbytes,
            content_digest=entry.content,
            entry=entry,
            origins=origins,
        )

    @property
    @override
    def chunks(self) -> list[ChunkInfo]:
        entry = self.entry
        chunks = []
        for number in range(entry.grid.num_chunks):
            if number not in entry.missing:
                index = entry.grid.index(number)
                key = "/".join([entry.path, "c", *map(str, index)])
                facts = entry.grid.region(index), key, int(entry.digests[number]), int(entry.writers[number])
                chunks.append(ChunkInfo(*facts, self._origin(number)))
        return chunks

    def _origin(self, number: int) -> str | None:
        origin = 0 if self.entry.origins is None else int(self.entry.origins[number])
        return self.origins[origin - 1] if origin else None

    @property
    @override
    def origin_nbytes(self) -> Mapping[str, int]:
        if self.entry.origins is None:
            return {}
        nbytes: Counter[str] = Counter()
        for chunk in self.chunks:
            if chunk.origin is not None:
                nbytes[chunk.origin] += chunk.region.numel * self.entry.itemsize
        return nbytes

    @property
    @override
    def codec(self) -> str:
        return self.entry.codec

    @property
    @override
    def num_chunks(self) -> int:
        return self.entry.grid.num_chunks - len(self.entry.missing)

    @property
    @override
    def is_whole(self) -> bool:
        return not self.entry.missing

    @property
    @override
    def max_chunk_nbytes(self) -> int:
        return max_chunk_nbytes(self.entry)

    @property
    @override
    def chunk_shape(self) -> tuple[int, ...]:
        return self.entry.grid.chunk_shape

    @property
    @override
    def block_shape(self) -> tuple[int, ...]:
        blocks, shape = self.entry.blocks, list(self.entry.grid.chunk_shape)
        if shape and self.entry.has_readable_blocks:
            shape[blocks.dim] = min(blocks.rows, shape[blocks.dim])
        return tuple(shape)

    @property
    @override
    def row_dim(self) -> int:
        return self.entry.blocks.dim

    @override
    def read_nbytes(self, region: Region) -> int:
        # All blocks that intersect the region are read.
        return sum(part.nbytes for part in plan_tensor_reads(self.entry, (region,)))


class ManifestFiles(CheckpointFiles):
    """The files of a checkpoint with a manifest.

    Args:
        path: The checkpoint, for messages.
        root: Its folder.
        manifest: Its manifest.
        is_remote: Whether the checkpoint is on other storage than this machine's.

    Raises:
        CheckpointCorruptError: The manifest contradicts itself.
    """

    kind = KIND
    has_digests = True
    refused: Mapping[str, DtckptError] = MappingProxyType({})
    files: Sequence[str] = ()
    unread: Sequence[str] = ()

    def __init__(self, path: Location, root: Folder, manifest: Manifest, *, is_remote: bool) -> None:
        self._structure = trees.load(manifest.tree) if manifest.tree else None
        # Lists, not sets: a name that occurs twice is refused, too.
        if self._structure is not None and sorted(trees.tensor_names(self._structure)) != sorted(manifest.arrays):
            raise CheckpointCorruptError(
                f"the manifest of {path} contradicts itself: its state tree does not name every tensor once"
            )
        self.manifest = manifest
        self.identity = manifest.attempt  # a random token
        self._path = path
        # Local files are read by preadv into the destination; elsewhere many requests have to be under way at once.
        self._reader = ChunkReader(manifest.kvstore, root, by_file=not is_remote)
        self._block_digests = BlockDigests(manifest, root)
        self.regions = RegionReader(path, root, self._reader, self._block_digests, is_remote=is_remote)
        self.tensors = TensorInfos(manifest.arrays, self._describe)

    @cached_property
    @override
    def structure(self) -> trees.Node:
        # A flat set of named tensors counts as a dict of them.
        if self._structure is not None:
            return self._structure
        return {"dict": [[name, {"tensor": name}] for name in self.tensors]}

    @property
    @override
    def tree(self) -> bytes:
        return self.manifest.tree

    def _describe(self, name: str) -> TensorInfo:
        return ArrayInfo.of(self.manifest.arrays[name], self.manifest.origins)

    @override
    def fingerprint(self) -> bytes:
        return self.manifest.to_bytes()

    @override
    def read(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        # An iterator: the reads of millions of chunks are never planned all at once.
        entries = ((self.manifest.arrays[name], buffers) for name, buffers in requests)
        return self.regions.read(entries, max_in_flight, count)

    @override
    def validate_stored(self, regions: Iterable[tuple[str, Region]], unchecked: int) -> None:
        entries = ((self.manifest.arrays[name], region) for name, region in regions)
        self.regions.validate_stored(entries, unchecked=unchecked)

    @override
    def parts(self, name: str) -> Iterator[Region]:
        entry = self.manifest.arrays[name]
        numbers = (number for number in range(entry.grid.num_chunks) if number not in entry.missing)
        return (entry.grid.region(entry.grid.index(number)) for number in numbers)

    @override
    def validate_part(self, name: str, region: Region) -> None:
        # Reads of whole chunks do not look at the digests of blocks.
        entry = self.manifest.arrays[name]
        index = tuple(start // size for start, size in zip(region.offset, entry.grid.chunk_shape, strict=True))
        self._block_digests.read(entry, entry.grid.number(index), range(sys.maxsize))

    @override
    def validate_rest(self) -> None:
        # Check every ``zarr.json``, which other readers than dtckpt need.
        # An iterator: the documents of millions of arrays are never in memory together.
        documents = self._reader.read_documents(entry.path for entry in self.manifest.arrays.values())
        if documents_digest(documents) != self.manifest.documents:
            raise CheckpointCorruptError(
                f"a zarr.json in {self._path} is damaged or missing; dtckpt reads all tensors without it, others cannot"
            )

    @override
    def tied(self) -> Mapping[str, str]:
        # Every tensor is stored by itself.
        return {}

    @override
    def close(self) -> None:
        self._reader.close()
