"""`TensorInfo`: the facts about one tensor of an open checkpoint, without its elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One stored chunk: the region it covers, its key below the store's root, its digest, the client that wrote it.

    Its origin is the name of the earlier checkpoint that first wrote it; None if this checkpoint wrote it.

    In another library's checkpoint a chunk is a piece of the tensor in one file; its key is the file's name and the
    piece's first byte. Its digest and its writer are unknown.
    """

    region: Region
    key: str
    digest: int | None
    client: int | None
    origin: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo(ABC):
    """One tensor of a checkpoint. A subclass for the format of the files knows how it is cut into chunks.

    Args:
        name: Tensor name.
        shape: Global shape.
        dtype_name: Name of the tensor's dtype, such as ``bfloat16``.
        stored_dtype_name: Name of the dtype of its elements on storage.
        layout: Layout at the time of the save; None if the tensor was on no mesh.
        nbytes: Bytes of its elements on storage, before compression.
        content_digest: Digest of the tensor's elements, independent of layout and chunks. Tensors of equal shape and
            stored dtype have equal elements if and only if their content digests are equal (but for one case in 2**64).
            The digest is the CRC-64/NVME of the elements as they are stored, in C order; elements that were not saved
            count as zeros. None if the save took none.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    stored_dtype_name: str
    layout: Layout | None
    nbytes: int
    content_digest: int | None

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return _torch_dtype(self.dtype_name)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of its elements on storage."""
        return _torch_dtype(self.stored_dtype_name)

    @property
    @abstractmethod
    def chunks(self) -> list[ChunkInfo]:
        """The chunk list: every stored chunk, row-major; in another library's checkpoint in the order of its index."""

    @property
    @abstractmethod
    def codec(self) -> str:
        """How chunks are compressed: ``none``, ``zstd`` or ``blosc``."""

    @property
    @abstractmethod
    def num_chunks(self) -> int:
        """Number of stored chunks."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether all of the tensor was saved."""

    @property
    @abstractmethod
    def max_chunk_nbytes(self) -> int:
        """Bytes of the largest part of the tensor for which a read allocates memory, before compression."""

    @property
    @abstractmethod
    def chunk_shape(self) -> tuple[int, ...]:
        """Elements per dim of a chunk; of the largest one, where they differ."""

    @property
    @abstractmethod
    def block_shape(self) -> tuple[int, ...]:
        """Elements per dim of the smallest part of a chunk that storage is read in; of a compressed chunk, all."""

    @property
    @abstractmethod
    def row_dim(self) -> int:
        """The dim whose rows a read takes with the fewest bytes that it does not need."""

    @property
    def origin_nbytes(self) -> Mapping[str, int]:
        """Bytes of its chunks that the save took from earlier checkpoints, by the checkpoint that first wrote them."""
        return {}

    @abstractmethod
    def read_nbytes(self, region: Region) -> int:
        """Return the bytes, before compression, that a read of a region takes from storage."""


def _torch_dtype(name: str) -> torch.dtype:
    from dtckpt.checkpoint.leaves import torch_dtype  # here, because commands that only look do without PyTorch

    return torch_dtype(name)


class TensorInfos(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by name; each is described when it is asked for, as there may be many.

    Args:
        names: The names.
        describe: Describes the tensor of a name.
    """

    def __init__(self, names: Collection[str], describe: Callable[[str], TensorInfo]) -> None:
        self._names = names
        self._describe = describe

    def __getitem__(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise KeyError(name)
        return self._describe(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
