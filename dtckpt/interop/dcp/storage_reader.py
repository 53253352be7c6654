"""`DtckptStorageReader`: has DCP's ``load`` read checkpoints of ours, by any writer.

DCP's planner makes an item of every stored chunk that a rank needs. This reader shows it each tensor as one chunk, so
it makes one item for every box of the rank. `dtckpt.checkpoint.reading` knows which parts of which stored chunks a box
takes.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.leaves import Leaf, as_leaf, host_array
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.fill import fill_tensors
from dtckpt.checkpoint.timing import Phases
from dtckpt.comm import host_memory
from dtckpt.dtensor.torch_checkpoint import copies_of
from dtckpt.errors import CheckpointConflictError, CheckpointError, DtckptError, DTypeError, ShapeMismatchError
from dtckpt.format import tree as trees
from dtckpt.format.dtypes import is_convertible, is_lossless
from dtckpt.interop.dcp.columns import ReadItems, ShortMetadata
from dtckpt.interop.dcp.known_saves import note_saves
from dtckpt.interop.dcp.save_operation import rank_folder
from dtckpt.interop.dcp.state_items import StateItems
from dtckpt.layout.region import Region
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import location_of

BATCH_NBYTES = 256 << 20
"""Bytes of tensors that are resolved and read before they are given back to the planner, which may have made them."""


class DtckptStorageReader(StorageReader):
    """Reads checkpoints of ours through `torch.distributed.checkpoint`, into any mesh; every byte is verified.

    Either `dtckpt.save` or DCP with a `DtckptStorageWriter` may have saved the checkpoint. All ranks must see the same
    save; else they raise a `CheckpointConflictError`, which DCP wraps. No pickle of a checkpoint is read: DCP's planner
    loads plain values from bytes that this reader makes of them.

    The reader may be used again.

    Args:
        path: Directory or URL of the checkpoint. The ``checkpoint_id`` of a load takes its place.
        cast: The dtype conversions that are allowed, as `RestoreOptions.cast`; by default any, as in DCP.

    Attributes:
        load_id: A random id, as DCP's own reader has; `reset` changes it.

    Raises:
        CheckpointNotFoundError: The text is no path at all.
        ConfigError: No checkpoint can have such a path; or there is no such ``cast``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, cast: str = "any") -> None:
        super().__init__()
        self._path = None if path is None else location_of(path)
        self._cast = RestoreOptions(cast=cast).cast
        self.load_id = str(uuid.uuid4())
        self._opened: _OpenCheckpoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}  # another process opens the checkpoint anew

    @property
    def checkpoint_id(self) -> str | Path | None:
        """The path or URL of the checkpoint."""
        return self._path if self._path is None or isinstance(self._path, Path) else str(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can have this path or URL."""
        try:
            commit_target_of(location_of(checkpoint_id))
        except DtckptError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of the given checkpoint, else of the same as before."""
        self._close()
        if checkpoint_id:
            self._path = location_of(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002  (DCP's)
        """Open the checkpoint, and describe its items as DCP does.

        Args:
            args: Ignored.
            kwargs: ``rank``: the rank whose own checkpoint is meant, as a save without collectives writes it.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointIncompleteError: There is data, but the save did not complete.
            CheckpointCorruptError: Its manifest is damaged.
            TreeError: Two of its items have one key.
        """
        self._close()
        if self._path is None:
            raise CheckpointError("there is no path to load from; pass checkpoint_id, or DtckptStorageReader(path)")
        rank = kwargs.get("rank")
        checkpoint = open_checkpoint(self._path if rank is None else self._path / rank_folder(rank))
        # The checkpoint of a single rank is a separate save, so ranks have no identity to compare.
        with gc_paused():
            self._opened = _OpenCheckpoint(
                checkpoint, StateItems(checkpoint), checkpoint.identity if rank is None else ""
            )
            return ShortMetadata(
                _Items(self._opened),
                planner_data={key: item.path for key, item in self._opened.items.by_key.items()},
                storage_data={},
                storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id),
                version=CURRENT_DCP_VERSION,
            )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load on this rank; everything that it takes is known from `read_metadata`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, in a form that is sent quickly, with the save that this rank has opened."""
        return dataclasses.replace(plan, items=ReadItems(plan.items), storage_data=self._open().attempt)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same save. Called by the coordinator.

        Raises:
            CheckpointConflictError: The ranks have opened different saves.
        """
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise CheckpointConflictError(
                    f"rank {rank} and rank 0 opened different saves of {self._path}; a save replaced it meanwhile: "
                    "load again, and use one shared file system"
                )
        return [dataclasses.replace(plan, items=ReadItems(plan.items)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify everything that this rank asks for. Blocks: On storage, so that the future is done.

        Raises:
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
            RegionNotFoundError: A part of a tensor was not saved.
            DTypeError: A conversion is impossible, or not allowed.
            TreeError: An item that DCP loads as a whole holds sharded tensors.
        """
        opened = self._open()
        phases = Phases("restore", 0, lambda _: None)
        with phases.operation(opened.checkpoint.path, is_shown=False), phases.measure("read"):
            for batch in _batches(item for item in plan.items if item.type is not LoadItemType.BYTE_IO):
                self._read_tensors(opened, batch, planner, phases)
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, opened.items.stream(item.storage_index.fqn))
        note_saves([opened.checkpoint.identity])
        self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_tensors(
        self, opened: _OpenCheckpoint, batch: Sequence[ReadItem], planner: LoadPlanner, phases: Phases
    ) -> None:
        checkpoint = opened.checkpoint
        leaves: list[tuple[str, Leaf]] = []
        others: list[tuple[str, Region, torch.Tensor]] = []
        # Local parts of PyTorch's DTensors take much longer where gradients are recorded.
        with gc_paused(), torch.no_grad():
            targets = [planner.resolve_tensor(item).detach() for item in batch]
            for item, target in zip(batch, targets, strict=True):
                name = trees.name_of_tensor(opened.items.by_key[item.storage_index.fqn].node) or ""
                region = _stored_region(item)
                if tuple(target.shape) != region.shape:
                    raise ShapeMismatchError(
                        f"tensor {name!r}: the planner resolves {region} to memory of shape {tuple(target.shape)}"
                    )
                leaf = _leaf(target, name, region)
                if leaf is None:
                    others.append((name, region, target))
                else:
                    self._validate_cast(name, checkpoint.info(name).dtype_name, leaf.dtype)
                    leaves.append((name, leaf))
        fill_tensors(checkpoint, leaves, (), (), phases)
        for name, region, target in others:
            # Of a class that computes its elements: it takes them by its own copy_.
            host = host_memory.allocate(region.shape, checkpoint.info(name).dtype)
            checkpoint.read_all([(name, [(region, host_array(host))])], count=phases.count)
            target.copy_(host)
        for item, target in zip(batch, targets, strict=True):
            planner.commit_tensor(item, target)

    def _validate_cast(self, name: str, saved: str, wanted: str) -> None:
        is_allowed = saved == wanted or (
            is_convertible(saved, wanted)
            and (self._cast == "any" or (self._cast == "lossless" and is_lossless(saved, wanted)))
        )
        if not is_allowed:
            raise DTypeError(
                f"tensor {name!r} would be converted; got {wanted} in the state dict, saved as {saved}; conversions "
                f"allowed now: {self._cast}"
            )

    def _open(self) -> _OpenCheckpoint:
        if self._opened is None:
            raise CheckpointError("read_metadata must be called first")
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.checkpoint.close()
        self._opened = None


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenCheckpoint:
    """A checkpoint that is open.

    Args:
        checkpoint: The checkpoint.
        items: Its items.
        attempt: The save that all ranks must have opened; empty if each rank opens a separate save.
    """

    checkpoint: Checkpoint
    items: StateItems
    attempt: str


class _Items(dict[str, Any]):
    """The items of a checkpoint as DCP describes them.

    For planners that do not flatten, the mapping also has the containers at the top of the state tree. Its keys are the
    items alone, not these containers.
    """

    def __init__(self, opened: _OpenCheckpoint) -> None:
        super().__init__()
        self._whole = opened.items.whole.keys()
        for key, item in opened.items.by_key.items():
            is_tensor = "tensor" in item.node
            self[key] = _described(opened.checkpoint.info(item.node["tensor"])) if is_tensor else BytesStorageMetadata()

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._whole

    def __missing__(self, key: str) -> BytesStorageMetadata:
        if key in self._whole:
            return BytesStorageMetadata()
        raise KeyError(key)


def _described(info: TensorInfo) -> TensorStorageMetadata:
    boxes = [Region.full(info.shape)] if info.is_whole else [chunk.region for chunk in info.chunks]
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=info.dtype), torch.Size(info.shape), chunks)


def _batches(items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
    """Yield the items in batches of at most so many bytes, or of one item."""
    batch: list[ReadItem] = []
    nbytes = 0
    for item in items:
        item_nbytes = Region.full(item.lengths).numel * 8  # of the largest usual dtype
        if batch and nbytes + item_nbytes > BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += item_nbytes
    if batch:
        yield batch


def _stored_region(item: ReadItem) -> Region:
    """Return the region of the stored tensor that an item asks for."""
    start = item.storage_index.offset or (0,) * len(item.lengths)
    offset = tuple(chunk + inside for chunk, inside in zip(start, item.storage_offsets, strict=True))
    return Region(offset, tuple(item.lengths))


def _leaf(target: torch.Tensor, name: str, region: Region) -> Leaf | None:
    """Return the memory that an item fills; None if it is not dense memory."""
    copies = copies_of(target)
    try:
        leaf = as_leaf(copies[0], name)
    except DTypeError:
        return None
    return dataclasses.replace(leaf, regions=(region,) * len(copies), components=copies)
