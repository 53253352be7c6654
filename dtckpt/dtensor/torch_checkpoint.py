"""Support ``torch.distributed.checkpoint``: the chunks of a DTensor that this client holds, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import ComponentError, LayoutError, capped
from dtckpt.layout.region import Region

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the regions of this client's devices as chunks, each once, without empty regions.

    Raises:
        LayoutError: Reductions are pending.
    """
    return [_chunk(region) for region in _copies_by_region(tensor)]


def write_items(name: str, tensor: DTensor) -> list[WriteItem]:
    """Return an item for each chunk of `chunk_list`, for PyTorch to write. Errors: as there."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            MetadataIndex(name, region.offset),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                _chunk(region), TensorProperties.create_from_tensor(copies[0].detach()), tensor.size()
            ),
        )
        for region, copies in _copies_by_region(tensor).items()
    ]


def shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """Return the memory of a chunk of `chunk_list`. A write to it reaches all copies that this client holds.

    Raises:
        ComponentError: This client holds no such chunk.
    """
    chunks = _copies_by_region(tensor)
    for region, copies in chunks.items():
        if index.offset is None or tuple(index.offset) == region.offset:
            return copies[0] if len(copies) == 1 else _Copies(copies)
    raise ComponentError(
        f"tensor {index.fqn!r} has no chunk at {tuple(index.offset or ())}; got chunks {capped(chunks)} on this client"
    )


def copies_of(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the copies for which a tensor of `shard_at`, or a slice of it, stands: mostly the tensor alone."""
    return shard.copies if isinstance(shard, _Copies) else (shard,)


def _chunk(region: Region) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape))


def _copies_by_region(tensor: DTensor) -> Mapping[Region, Sequence[torch.Tensor]]:
    """Return the regions of this client's devices, with all copies of each.

    Empty regions are left out: an empty region may begin at the offset of another region, and PyTorch identifies chunks
    by their offset. A tensor without elements has one empty region, so that the checkpoint knows it.
    """
    layout, shape = tensor.layout, tuple(tensor.shape)
    if layout.partial:
        raise LayoutError(
            f"a tensor with pending reductions has no values to save yet; got partial axes {layout.partial}; "
            "redistribute it to sharded or replicated first"
        )
    if tensor.components and not tensor.numel():
        return {Region.full(shape): [tensor.components[0].new_empty(shape)]}
    regions: dict[Region, list[torch.Tensor]] = {}
    for device, component in zip(layout.mesh.local_device_ids(), tensor.components, strict=True):
        region = layout.region(device, shape)
        if not region.is_empty:
            regions.setdefault(region, []).append(component)
    return regions


class _Copies(torch.Tensor):
    """Copies of the same elements on several devices, as one tensor. An operation on it runs on every copy."""

    copies: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, copies: Sequence[torch.Tensor]) -> _Copies:
        tensor = copies[0].detach().as_subclass(cls)
        tensor.copies = tuple(copies)
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        count = next(len(arg.copies) for arg in args if isinstance(arg, _Copies))
        calls = ([arg.copies[index] if isinstance(arg, _Copies) else arg for arg in args] for index in range(count))
        results = [func(*each, **(kwargs or {})) for each in calls]
        return cls(results) if isinstance(results[0], torch.Tensor) else results[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copies[0].__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it untyped
