"""Plan a save whose tensors DCP has divided among its ranks: from boxes to chunks.

DCP's planner says which rank writes which box of which tensor. The coordinator chooses the chunks, and tells each rank
the chunks of its tensors (`Share`). The rank of a box writes the chunks inside it. One more client, the
*assembler*, puts together the few chunks that a box edge cuts: the coordinator, when all ranks have written::

    boxes    |----- rank 0 -----|----- rank 1 -----|
    chunks   |...|...|...|...|..+|...|...|...|...|..|
                              ^ both ranks leave their pieces in files; the assembler, client 2, writes the chunk
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan as DcpPlan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dtckpt.checkpoint.leaves import dtype_name
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, Holding, SavePlan, TensorSpec, plan_part, plan_save
from dtckpt.checkpoint.saving.stored_dtypes import StoredDtypes
from dtckpt.errors import SaveDisagreementError, TensorNameError, TreeError, capped
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.grid import ChunkGrid
from dtckpt.interop.dcp.columns import Place, WriteItems, places_of
from dtckpt.interop.dcp.state_items import name_of, path_of
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

Numbers = tuple[int, ...]
Box = tuple[Numbers, Numbers, int]
"""Offset and shape of a box, and the client that writes it."""


class TensorBoxes(NamedTuple):
    """A tensor, and which client writes which box of it. Empty boxes are left out; the others are sorted."""

    name: str
    shape: Numbers
    dtype: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a plan, which the coordinator sends it.

    Args:
        client: The rank's place in the process group.
        num_clients: Ranks in the process group.
        topic: The topic of the plan.
        tensors: Of each tensor that the rank writes a box of, by DCP's key: name, array path and chunk shape.
        shared: The rank's items of which other ranks have copies, whether this rank writes them or not.
    """

    client: int
    num_clients: int
    topic: bytes
    tensors: Mapping[str, tuple[str, str, Numbers]]
    shared: Sequence[WriteItem] = ()


def shared_items(plans: Sequence[DcpPlan]) -> list[Sequence[WriteItem]]:
    """Return, for each rank, its items of which other ranks have copies. DCP's planner has one of them write.

    Args:
        plans: The plans of all ranks after that; ``storage_data`` has a rank's items as it passed them.

    Raises:
        SaveDisagreementError: The planner has dropped these.
    """
    if len(plans) == 1:
        return [()]
    for client, plan in enumerate(plans):
        if not isinstance(plan.storage_data, WriteItems):
            raise SaveDisagreementError(
                f"copies cannot be compared: the planner's global plan has no storage_data of this writer for rank "
                f"{client}; create_global_plan must keep the storage_data of the local plans, or save with "
                "SaveOptions(check_replicas=False)"
            )
    holders = Counter(item.index for plan in plans for item in plan.storage_data)
    return [WriteItems(item for item in plan.storage_data if holders[item.index] > 1) for plan in plans]


def boxes_of_plans(plans: Sequence[DcpPlan]) -> dict[str, TensorBoxes]:
    """Return the tensors of the plans of all ranks, by key."""
    paths = [plan.planner_data for plan in plans]
    tensors: dict[str, TensorBoxes] = {}
    boxes: dict[str, list[Box]] = {}
    for client, plan in enumerate(plans):
        for item in plan.items:
            data, key = item.tensor_data, item.index.fqn
            if data is not None:
                if key not in tensors:
                    name = name_of(path_of(key, paths))
                    tensors[key] = TensorBoxes(name, tuple(data.size), dtype_name(data.properties.dtype), ())
                boxes.setdefault(key, []).append((*box_of(data.chunk), client))
    return {key: tensor._replace(boxes=_sorted(boxes[key])) for key, tensor in tensors.items()}


def boxes_of_results(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> dict[str, TensorBoxes]:
    """Return the boxes of all tensors in the metadata, by key, each with the rank that wrote it.

    Raises:
        SaveDisagreementError: A box in the metadata was written by no rank, or a rank wrote a key that is not in the
            metadata.
    """
    writers: dict[Place, int] = {}
    for client, part in enumerate(results):
        writers |= dict.fromkeys(places_of(part), client)
    tensors: dict[str, TensorBoxes] = {}
    for key, each in metadata.state_dict_metadata.items():
        if isinstance(each, TensorStorageMetadata):
            # A planner may leave the offset of a whole tensor out.
            boxes = [
                (*box_of(chunk), writers.pop((key, chunk.offsets), writers.get((key, None), -1)))
                for chunk in each.chunks
            ]
            if lost := [box[:2] for box in boxes if box[2] == -1 and all(box[1])]:
                raise SaveDisagreementError(
                    f"no rank has written {capped(lost)} of tensor {key!r}; nothing was committed"
                )
            name = name_of(path_of(key, [metadata.planner_data]))
            tensors[key] = TensorBoxes(name, tuple(each.size), dtype_name(each.properties.dtype), _sorted(boxes))
    strangers = sorted({key for key, _ in writers} - metadata.state_dict_metadata.keys())
    if strangers:
        raise SaveDisagreementError(
            f"ranks have written {capped(map(repr, strangers))}, which are not in DCP's plan; nothing was committed"
        )
    return tensors


def box_of(chunk: ChunkStorageMetadata) -> tuple[Numbers, Numbers]:
    """Return offset and shape of a chunk, as DCP calls a box."""
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _sorted(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(sorted(box for box in boxes if all(box[1])))


def plan_boxes(tensors: Iterable[TensorBoxes], options: SaveOptions, num_clients: int) -> SavePlan:
    """Return the plan of a save; it is kept, and found again when tensors of the same boxes are saved again.

    Raises:
        TreeError: Two tensors have one name.
        TensorNameError: A name cannot be stored.
        DTypeError: A dtype cannot be stored.
    """
    return _kept_plan(tuple(tensors), options, num_clients)


@lru_cache(maxsize=2 * KEPT_STRUCTURES)
def _kept_plan(tensors: tuple[TensorBoxes, ...], options: SaveOptions, num_clients: int) -> SavePlan:
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TreeError(f"two tensors of the state dict would both be named {capped(map(repr, twice))}; rename a key")
    specs = _specs(tensors, options)
    return plan_save(specs, options.chunk_nbytes, num_clients.to_bytes(8, "big"), assembler=num_clients)


def _specs(tensors: Iterable[TensorBoxes], options: SaveOptions) -> list[TensorSpec]:
    rules, codec = StoredDtypes(options), options.codec or NO_CODEC
    return [
        TensorSpec(name, shape, dtype, rules.choose(name, dtype, save_as_bf16=False), _holdings(boxes), codec=codec)
        for name, shape, dtype, boxes in tensors
    ]


@lru_cache(maxsize=4096)
def _holdings(boxes: tuple[Box, ...]) -> tuple[Holding, ...]:
    """Return the holdings of boxes: one object for equal boxes, by which plans know that tensors are alike."""
    return tuple(Holding(Region(offset, shape), (client,)) for offset, shape, client in boxes)


def shares_of(
    plans: Sequence[DcpPlan], tensors: Mapping[str, TensorBoxes], plan: SavePlan, options: SaveOptions
) -> list[Share]:
    """Return each rank's share of a plan.

    Raises:
        SaveDisagreementError: Copies cannot be compared; see `shared_items`.
    """
    shared = shared_items(plans) if options.check_replicas else [()] * len(plans)
    planned = {tensor.spec.name: tensor for tensor in plan.tensors}
    facts = {
        key: (tensor.name, planned[tensor.name].path, planned[tensor.name].grid.chunk_shape)
        for key, tensor in tensors.items()
    }
    return [
        Share(
            client,
            len(plans),
            plan.topic,
            {item.index.fqn: facts[item.index.fqn] for item in each.items if item.tensor_data is not None},
            shared[client],
        )
        for client, each in enumerate(plans)
    ]


def plan_share(
    share: Share,
    items: Iterable[WriteItem],
    dtypes: Mapping[str, str],
    inner: Sequence[TensorBoxes],
    options: SaveOptions,
) -> SavePlan:
    """Plan the part of one rank; the plan is kept like the plan of `plan_boxes`.

    Args:
        share: The rank's share, from the coordinator.
        items: The rank's items.
        dtypes: The dtypes of its tensors, by name.
        inner: Tensors and arrays inside of items that are no tensors; the rank holds all of each.
        options: See `SaveOptions`.

    Raises:
        SaveDisagreementError: The rank has an item that the coordinator does not know.
    """
    tensors: dict[str, TensorBoxes] = {}
    boxes: dict[str, list[Box]] = {}
    for item in items:
        data, key = item.tensor_data, item.index.fqn
        if data is None:
            continue
        if key not in share.tensors:
            raise SaveDisagreementError(
                f"rank {share.client} has the item {key!r}, which is not in the coordinator's plan; finish_plan must "
                "not add tensors"
            )
        name = share.tensors[key][0]
        tensors[key] = TensorBoxes(name, tuple(data.size), dtypes[name], ())
        boxes.setdefault(key, []).append((*box_of(data.chunk), share.client))
    places = [share.tensors[key][1:] for key in tensors]
    if inner:
        # No other rank has a part of these, so it needs no coordinator to know their chunks.
        planned = {tensor.spec.name: tensor for tensor in plan_boxes(inner, options, share.num_clients).tensors}
        places += [(planned[tensor.name].path, planned[tensor.name].grid.chunk_shape) for tensor in inner]
    own = (*(tensor._replace(boxes=_sorted(boxes[key])) for key, tensor in tensors.items()), *inner)
    return _kept_part(own, tuple(places), options, share.num_clients, share.topic)


@lru_cache(maxsize=KEPT_STRUCTURES)
def _kept_part(
    tensors: tuple[TensorBoxes, ...],
    places: tuple[tuple[str, Numbers], ...],
    options: SaveOptions,
    assembler: int,
    topic: bytes,
) -> SavePlan:
    paths: dict[str, str] = {}
    grids: dict[str, ChunkGrid] = {}
    for tensor, (path, chunk_shape) in zip(tensors, places, strict=True):
        paths[tensor.name], grids[tensor.name] = path, ChunkGrid(tensor.shape, chunk_shape)
    return plan_part(_specs(tensors, options), paths, grids, assembler=assembler, topic=topic)


def plan_written(
    tensors: Sequence[TensorBoxes],
    inner: Sequence[TensorBoxes],
    dtypes: Mapping[str, str],
    layouts: Mapping[str, Layout],
    *,
    options: SaveOptions,
    num_clients: int,
) -> SavePlan:
    """Return the plan of everything that the ranks have written.

    Args:
        tensors: The tensors, as in `plan_boxes`: in the dtypes by which the chunks were chosen.
        inner: The tensors inside of items of all ranks.
        dtypes: The dtypes in which the tensors were written, by name. A planner that caches its plans keeps older ones.
        layouts: Layouts to be recorded, by name.
        options: See `SaveOptions`.
        num_clients: Ranks in the process group.

    Raises:
        TensorNameError: A name of ``inner`` leads through another tensor, or the other way round.
        TreeError: Two tensors have one name.
    """
    plan = plan_boxes(tensors, options, num_clients)
    if inner:
        paths = {tensor.spec.name: tensor.path for tensor in plan.tensors}
        paths |= {tensor.spec.name: tensor.path for tensor in plan_boxes(inner, options, num_clients).tensors}
        united = plan_boxes((*tensors, *inner), options, num_clients)
        # Each rank has chosen paths by the names that it knew.
        if moved := [tensor.spec.name for tensor in united.tensors if tensor.path != paths[tensor.spec.name]]:
            raise TensorNameError(f"names of tensors lead through {capped(map(repr, moved))}; rename a key")
        plan = replace(united, topic=plan.topic)
    return _as_written(plan, tuple(sorted(layouts.items())), tuple(sorted(dtypes.items())), options)


@lru_cache(maxsize=KEPT_STRUCTURES)
def _as_written(
    plan: SavePlan, layouts: tuple[tuple[str, Layout], ...], dtypes: tuple[tuple[str, str], ...], options: SaveOptions
) -> SavePlan:
    rules, layout_of, dtype_of = StoredDtypes(options), dict(layouts), dict(dtypes)
    tensors = []
    for tensor in plan.tensors:
        name = tensor.spec.name
        dtype = dtype_of.get(name, tensor.spec.dtype)
        stored = rules.choose(name, dtype, save_as_bf16=False)
        spec = replace(tensor.spec, dtype=dtype, stored_dtype=stored, layout=layout_of.get(name))
        tensors.append(replace(tensor, spec=spec))
    return replace(plan, tensors=tuple(tensors))
