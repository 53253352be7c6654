"""`TensorInfo`: the facts about one tensor of an open checkpoint, without its elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtckpt.checkpoint.reading.plan import max_chunk_nbytes, plan_tensor_reads
from dtckpt.format.manifest import ArrayEntry
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

if TYPE_CHECKING:
    import torch


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
        dtype_name: Name of the tensor's dtype, such as ``bfloat16``.
        stored_dtype_name: Name of the dtype of its elements on storage.
        layout: Layout at the time of the save; None if the tensor was on no mesh.
        nbytes: Bytes of its elements on storage, before compression.
        content_digest: Digest of the tensor's elements, independent of layout and chunks: tensors of equal shape and
            stored dtype have equal elements if and only if their content digests are equal (but for one case in
            2**64). It is the CRC-64/NVME of the elements as they are stored, in C order; elements that were not saved
            count as zeros. None if the save took none.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    stored_dtype_name: str
    layout: Layout | None
    nbytes: int
    content_digest: int | None
    _entry: ArrayEntry

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return _torch_dtype(self.dtype_name)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of its elements on storage."""
        return _torch_dtype(self.stored_dtype_name)

    @property
    def chunks(self) -> list[ChunkInfo]:
        """The chunk list: every stored chunk, row-major."""
        entry = self._entry
        chunks = []
        for number in range(entry.grid.num_chunks):
            if number not in entry.missing:
                index = entry.grid.index(number)
                key = "/".join([entry.path, "c", *map(str, index)])
                chunks.append(
                    ChunkInfo(entry.grid.region(index), key, int(entry.digests[number]), int(entry.writers[number]))
                )
        return chunks

    @property
    def codec(self) -> str:
        """How chunks are compressed: ``none``, ``zstd`` or ``blosc``."""
        return self._entry.codec

    @property
    def num_chunks(self) -> int:
        """Number of stored chunks."""
        return self._entry.grid.num_chunks - len(self._entry.missing)

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor was saved."""
        return not self._entry.missing

    @property
    def max_chunk_nbytes(self) -> int:
        """Bytes of the largest chunk's elements, before compression."""
        return max_chunk_nbytes(self._entry)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Elements per dim of a chunk."""
        return self._entry.grid.chunk_shape

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Elements per dim of the smallest part of a chunk that storage is read in; of a compressed chunk, all."""
        blocks, shape = self._entry.blocks, list(self._entry.grid.chunk_shape)
        if shape and self._entry.has_readable_blocks:
            shape[blocks.dim] = min(blocks.rows, shape[blocks.dim])
        return tuple(shape)

    @property
    def row_dim(self) -> int:
        """The dim whose rows a read takes with the fewest bytes that it does not need."""
        return self._entry.blocks.dim

    def read_nbytes(self, region: Region) -> int:
        """Return the bytes, before compression, of all blocks that intersect a region: a read takes so many."""
        return sum(part.nbytes for part in plan_tensor_reads(self._entry, (region,)))


def _torch_dtype(name: str) -> torch.dtype:
    from dtckpt.checkpoint.leaves import torch_dtype  # here, because commands that only look do without PyTorch

    return torch_dtype(name)


class TensorInfos(Mapping[str, TensorInfo]):
    """The tensors of a manifest by name; each is described when it is asked for, as there may be many."""

    def __init__(self, entries: Mapping[str, ArrayEntry]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> TensorInfo:
        entry = self._entries[name]
        return TensorInfo(
            name=name,
            shape=entry.shape,
            dtype_name=entry.dtype,
            stored_dtype_name=entry.stored_dtype,
            layout=entry.layout,
            nbytes=entry.stored_nbytes,
            content_digest=entry.content,
            _entry=entry,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
