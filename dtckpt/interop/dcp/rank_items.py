"""The items that one rank writes, as DCP's planner resolves them: elements, plain values, layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from typing_extensions import override

from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.leaves import as_leaf, dtype_name, host_array, validate_mode
from dtckpt.checkpoint.saving.plan import TensorPlan
from dtckpt.checkpoint.saving.replica_check import Replica
from dtckpt.checkpoint.saving.state import MemorySource
from dtckpt.checkpoint.saving.write import PENDING_NBYTES, Source
from dtckpt.dtensor import DTensor, torch_interop
from dtckpt.dtensor.torch_checkpoint import copies_of
from dtckpt.errors import DtckptError, ShapeMismatchError, TreeError
from dtckpt.format import tree as trees
from dtckpt.interop.dcp.client_parts import CopyPlace, RankCopies, TensorCopy, comparable
from dtckpt.interop.dcp.state_items import encode_item, path_of
from dtckpt.interop.dcp.write_plan import Share, TensorBoxes, box_of
from dtckpt.layout import device_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.layout.root_layout import root_layout

Boxes = Mapping[str, Sequence[tuple[Region, WriteItem]]]
"""By name of the tensor, the boxes that a rank writes."""


@dataclass(frozen=True, slots=True, eq=False)
class RankItems:
    """The resolved items that a rank writes.

    Args:
        source: The elements of its tensors.
        dtypes: The dtypes of its tensors as the planner resolves them, by name.
        values: The nodes of its items that are no tensors, by key.
        inner: The tensors and arrays inside of these items.
        layouts: The layouts of its tensors, by name, as far as the planner has the tensors.
    """

    source: Source
    dtypes: Mapping[str, str]
    values: Mapping[str, trees.Node]
    inner: tuple[TensorBoxes, ...]
    layouts: Mapping[str, Layout]


def resolve_items(items: Sequence[WriteItem], planner: SavePlanner, share: Share, mappings: object) -> RankItems:
    """Resolve the items of a rank.

    Args:
        items: The items.
        planner: Resolves them.
        share: The rank's share of the save.
        mappings: The planner's paths; see `path_of`.

    Raises:
        TreeError: An item is neither a tensor nor a value that a state tree can hold.
        DTypeError: A tensor is not dense memory, or its dtype cannot be stored.
    """
    names = {key: facts[0] for key, facts in share.tensors.items()}
    validate_mode()
    # Local parts of PyTorch's DTensors take much longer where gradients are recorded.
    with gc_paused(), torch.no_grad():
        boxes: dict[str, list[tuple[Region, WriteItem]]] = {}
        values: dict[str, trees.Node] = {}
        inner: dict[str, Any] = {}
        for item in items:
            key = item.index.fqn
            if item.tensor_data is not None:
                region = Region(*box_of(item.tensor_data.chunk))
                boxes.setdefault(names[key], []).append((region, item))
            else:
                values[key], below = encode_item(_value(planner, item), key, path_of(key, [mappings]))
                inner.update(below)
        leaves = {name: as_leaf(leaf, name) for name, leaf in inner.items()}
        own = {name: leaf.distinct_parts() for name, leaf in leaves.items()}
        shapes = tuple(
            TensorBoxes(
                name, leaf.shape, leaf.dtype, tuple((box.offset, box.shape, share.client) for box, _ in own[name])
            )
            for name, leaf in leaves.items()
        )
        source, dtypes = _source(planner, boxes, own)
        return RankItems(source, dtypes, values, shapes, _layouts(planner, items, names))


def resolve_copies(items: Iterable[WriteItem], planner: SavePlanner, mappings: object) -> RankCopies:
    """Digest a rank's copies of items that other ranks have, too.

    Args:
        items: The items.
        planner: Resolves them.
        mappings: The planner's paths; see `path_of`.

    Raises:
        TreeError: As `resolve_items`.
        DTypeError: As `resolve_items`.
    """
    tensors: dict[CopyPlace, TensorCopy] = {}
    values: dict[str, trees.Node] = {}
    with torch.no_grad():
        for item in items:
            key, data = item.index.fqn, item.tensor_data
            if data is not None:
                region = Region(*box_of(data.chunk))
                memory, *_ = _resolved(planner, item, region, key)
                tensors[key, region.offset] = TensorCopy.of(memory, tuple(data.size))
                continue
            node, below = encode_item(_value(planner, item), key, path_of(key, [mappings]))
            values[key] = comparable(node)
            for name, value in below.items():
                (memory,) = as_leaf(value, name).components
                tensors[name, (0,) * memory.ndim] = TensorCopy.of(memory, tuple(memory.shape))
    return RankCopies(tensors, values)


def _is_plain(planner: SavePlanner) -> bool:
    """Whether a planner gives the tensors themselves, and the bytes that ``torch.save`` makes of all else."""
    methods = ("resolve_data", "transform_object")
    return all(getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name) for name in methods)


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the value of an item that is no tensor."""
    if _is_plain(planner):
        return planner.lookup_object(item.index)  # type: ignore[attr-defined]  # a DefaultSavePlanner
    stream: Any = planner.resolve_data(item)
    try:
        stream.seek(0)
        # These bytes come from this process's own planner, now, and not from a checkpoint.
        return torch.load(stream, weights_only=False)
    except Exception as error:
        raise TreeError(
            f"item {item.index.fqn!r}: {type(planner).__name__} makes bytes of it that torch.load does not read; "
            "resolve_data must return a tensor, or the bytes that torch.save writes"
        ) from error


def _source(
    planner: SavePlanner, boxes: Boxes, own: Mapping[str, Sequence[tuple[Region, list[torch.Tensor]]]]
) -> tuple[Source, dict[str, str]]:
    """Return the elements, and the dtypes of the items' tensors by name.

    The elements come all at once where they are memory that stays anyway, else one item after the other.
    """
    if _is_plain(planner):
        parts = {
            name: [(region, _resolved(planner, item, region, name)) for region, item in each]
            for name, each in boxes.items()
        }
        dtypes = {name: dtype_name(each[0][1][0].dtype) for name, each in parts.items()}
        if all(copy.is_cpu for each in parts.values() for _, copies in each for copy in copies):
            return MemorySource({**parts, **own}), dtypes
    else:
        # Such a planner makes elements, of any dtype; the planned dtype may come from an older save.
        dtypes = {
            name: dtype_name(_resolved(planner, item, region, name)[0].dtype)
            for name, ((region, item), *_) in boxes.items()
        }
    return PlannerSource(planner, boxes, MemorySource(own)), dtypes


def _resolved(planner: SavePlanner, item: WriteItem, region: Region, name: str) -> list[torch.Tensor]:
    """Return the dense memory of a box: of each of this rank's devices that has a copy."""
    tensor: Any = planner.resolve_data(item)
    memories = [memory for copy in copies_of(tensor.detach()) for memory in as_leaf(copy, name).components]
    if shapes := {tuple(memory.shape) for memory in memories} - {region.shape}:
        raise ShapeMismatchError(f"item {item.index.fqn!r}: the planner resolves {region} to shape {min(shapes)}")
    return memories


class PlannerSource(Source):
    """Elements that a planner makes, or that lie on a GPU: one item at a time is in host memory.

    Args:
        planner: The planner.
        boxes: The items.
        own: The elements of further tensors.
    """

    max_pending_nbytes: int | None = PENDING_NBYTES

    def __init__(self, planner: SavePlanner, boxes: Boxes, own: MemorySource) -> None:
        self._planner = planner
        self._boxes = boxes
        self._own = own
        self._latest: tuple[WriteItem, np.ndarray[Any, Any]] | None = None

    @override
    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        pass  # nothing is resolved before it is fetched

    @override
    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        name = plan.spec.name
        if name not in self._boxes:
            return self._own.fetch(plan, region)
        box, item = next(each for each in self._boxes[name] if each[0].contains(region))
        # The chunks of an item come one after the other.
        if self._latest is None or self._latest[0] is not item:
            self._latest = None  # before the next one is made
            self._latest = item, host_array(_resolved(self._planner, item, box, name)[0])
        array = self._latest[1]
        return array[region.relative_to(box).slices()] if region != box else array

    @override
    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        # There is one, which is not made again to be compared with nothing.
        return [Replica(None)]


def _layouts(planner: SavePlanner, items: Sequence[WriteItem], names: Mapping[str, str]) -> dict[str, Layout]:
    """Return the layouts of the tensors, by name."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, Mapping):
        return {}
    # Many tensors are alike; meshes of PyTorch take long to be converted.
    kept: dict[Any, Layout | None] = {}
    layouts: dict[str, Layout] = {}
    for item in items:
        value = state.get(item.index.fqn) if item.tensor_data is not None else None
        if isinstance(value, DTensor):
            layouts[names[item.index.fqn]] = root_layout(value.layout)
        elif torch_interop.is_torch_dtensor(value):
            tensor: Any = value
            kind = id(tensor.device_mesh), tensor.placements, tensor.ndim
            if kind not in kept:
                kept[kind] = _torch_layout(tensor)
            if (layout := kept[kind]) is not None:
                layouts[names[item.index.fqn]] = layout
    return layouts


def _torch_layout(tensor: Any) -> Layout | None:
    try:
        mesh = device_mesh.mesh_of(tensor.device_mesh)
        return root_layout(Layout.from_placements(mesh, tensor.placements, tensor.ndim))
    # A layout is recorded for its readers' convenience; the boxes say where the elements are.
    except DtckptError:
        return None
