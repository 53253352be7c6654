"""Saves and loads through `torch.distributed.checkpoint` with our writer and reader; runs in client processes."""

from __future__ import annotations

import copy
import gc
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.saving.union_cases import Block, fill, stage_state, state_of, wrong_in
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dtckpt
from dtckpt import errors
from dtckpt.interop import DtckptStorageReader, DtckptStorageWriter

VALUES = {"step": 7, "betas": (0.9, 0.99), "note": "a/b", "groups": [{"lr": 0.1, "names": ["x", "y"]}], "none": None}


def state_on(axes: Mapping[str, int]) -> dict[str, Any]:
    """Return a model and its optimizer on a mesh of these axes; on ``replicate`` and ``shard`` it is HSDP's."""
    if "shard" in axes:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleDict({str(layer): Block() for layer in range(2)})})
        for block in model["layers"].values():
            fully_shard(block, mesh=mesh)
        state = state_of(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    else:
        state = stage_state(2, axes)
    state["nested"] = nested()
    state["bfloat16"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    state["scalar"] = torch.zeros(())
    state["empty"] = torch.zeros(0, 3)
    return state


def nested() -> torch.Tensor:
    """Return a tensor with shards that form no regular grid on 4 clients: 258, 257, 257, 257 rows."""
    shape = {4: (2, 2), 2: (1, 2), 3: (3, 1), 1: (1, 1)}[dist.get_world_size()]
    mesh = init_device_mesh("cpu", shape)
    return distribute_tensor(torch.zeros(1029, 3), mesh, [Shard(0), Shard(0)])


def save(path: str, axes: Mapping[str, int], by: str = "dcp", **options: Any) -> None:
    state = state_on(axes)
    fill(state)
    state |= VALUES
    if by == "dcp":
        quietly(dcp.save, state, storage_writer=DtckptStorageWriter(path, **options))
    else:
        dtckpt.save(path, state)


def load(path: str, axes: Mapping[str, int], by: str = "dcp") -> list[str]:
    """Return the names of values that were not loaded as saved."""
    state: dict[str, Any] = state_on(axes)
    fill(state, -1.0)
    state |= {"step": 0, "betas": None, "note": "", "groups": [{"lr": 0.0, "names": []}], "none": 1}
    if by == "dcp":
        quietly(dcp.load, state, storage_reader=DtckptStorageReader(path))
    else:
        dtckpt.restore(path, state)
    return wrong_in(state) + [name for name, value in VALUES.items() if state[name] != value]


def quietly(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of DCP without its warnings, which are about DCP itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


# --- histories ---


def plain_state(value: float, extra: bool = False) -> dict[str, Any]:
    """Return a small state: a sharded tensor, a copied one, and a value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.full((8, 3), value), mesh, [Shard(0)])
    state = {"sharded": sharded, "copied": torch.full((4,), value), "value": value}
    return state | ({"extra": torch.full((2,), value)} if extra else {})


def values_at(path: str) -> list[float]:
    """Return the values that a checkpoint of `plain_state` holds; all tensors must be whole."""
    tree = dtckpt.restore(path, group=[dist.get_rank()])
    return sorted({value for tensor in tree.values() for value in torch.as_tensor(tensor).flatten().tolist()})


def save_by_cached_plans(path: str) -> list[Any]:
    """Save some steps with a planner that caches plans; the last with a tensor that only the last rank has."""
    found: list[Any] = []
    for step, extra in enumerate([False, False, False, True, True]):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = plain_state(float(step), extra=extra and dist.get_rank() == dist.get_world_size() - 1)
        quietly(dcp.save, state, checkpoint_id=f"{path}_{step}", storage_writer=DtckptStorageWriter(), planner=planner)
        dist.barrier()
        found.append((values_at(f"{path}_{step}"), "extra" in dtckpt.open_checkpoint(f"{path}_{step}").tensors))
    dcp.planner.SavePlanner._cached_save_plan.clear()
    return found


class Refusing(dcp.DefaultSavePlanner):
    """Fails on one rank while data is written."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == self.rank:
            raise RuntimeError("no data here")
        return super().resolve_data(write_item)


def save_after_failures(path: str) -> list[Any]:
    """Save; fail on each rank; save again with the same writer. Return the observations in between."""
    seen: list[Any] = []
    writer = DtckptStorageWriter(path)
    quietly(dcp.save, plain_state(1.0), storage_writer=writer)
    for rank in range(dist.get_world_size()):
        try:
            quietly(dcp.save, plain_state(2.0), storage_writer=writer, planner=Refusing(rank))
        except dcp.CheckpointException as error:
            seen.append((sorted(error.failures), values_at(path)))
        dist.barrier()
    quietly(dcp.save, plain_state(3.0), storage_writer=writer)
    seen.append(values_at(path))
    with suppress(dcp.CheckpointException):
        quietly(dcp.save, plain_state(4.0), storage_writer=writer, planner=Refusing(1))
    del writer
    gc.collect()
    dist.barrier()
    seen.append(sorted(entry.name for entry in Path(path).parent.iterdir()))
    return seen


class OwnStager:
    """A stager as a user writes one; it stages in the thread that saves."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self.num_staged = 0

    def stage(self, state: Any) -> Any:
        self.num_staged += 1
        return copy.deepcopy(state)

    def synchronize_staging(self) -> None:
        raise AssertionError("no rank should wait")

    def close(self) -> None:
        """Hold nothing."""


def save_in_background(path: str, kind: str) -> list[Any]:
    """Save steps in the background, with and without stagers of the caller's; return what the checkpoints hold."""
    writer, own = DtckptStorageWriter(), OwnStager()
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=kind == "process",
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    in_thread = DefaultStager(options)
    for step, stager in enumerate([None, own, in_thread]):
        state = plain_state(float(step))
        future = quietly(
            dcp.async_save,
            state,
            checkpoint_id=f"{path}_{step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType(kind),
            async_stager=stager,
        )
        if stager is in_thread:
            future.staging_completion.result()
            future = future.upload_completion
        for tensor in (state["sharded"], state["copied"]):
            tensor.fill_(-1.0)
        future.result()
        dist.barrier()
    in_thread.close()
    assert own.num_staged == 1
    found = [values_at(f"{path}_{step}") for step in range(3)]
    return [*found, str(dtckpt.open_checkpoint(f"{path}_0").tensors["sharded"].layout)]


def error_of_memory(kind: str) -> str:
    """Save to ``memory://`` in the background; return the error."""
    writer = DtckptStorageWriter(options=dtckpt.SaveOptions(kvstore="zarr"))
    where = {"checkpoint_id": "memory://dcp/lost", "storage_writer": writer}
    future = quietly(dcp.async_save, {"a": torch.ones(1)}, **where, async_checkpointer_type=AsyncCheckpointerType(kind))
    return str(future.exception())


def save_copies(path: str, to_lowest_rank: bool) -> list[int]:
    """Save tensors that all ranks hold; return the ranks that wrote them."""
    state = {f"t{number}": torch.full((8,), float(number)) for number in range(8)}
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest_rank)
    quietly(dcp.save, state, storage_writer=DtckptStorageWriter(path), planner=planner)
    dist.barrier()
    assert values_at(path) == [float(number) for number in range(8)]
    return sorted(dtckpt.open_checkpoint(path).manifest.costs)


def save_alone(path: str) -> list[float]:
    """Save without the other ranks, each to another path, though there is a process group."""
    rank = dist.get_rank()
    state = {"own": torch.full((4,), float(rank)), "only": {str(rank): rank}}
    quietly(dcp.save, state, storage_writer=DtckptStorageWriter(f"{path}_{rank}"), no_dist=True)
    target = {"own": torch.zeros(4), "only": {str(rank): -1}}
    quietly(dcp.load, target, storage_reader=DtckptStorageReader(f"{path}_{rank}"), no_dist=True)
    return [*target["own"].tolist(), target["only"][str(rank)]]


def load_sharded_tensors(path: str) -> list[str]:
    """Save PyTorch's ShardedTensors of 2 ranks, load them otherwise divided, and whole; return the faults."""
    whole = torch.arange(30.0).view(10, 3)
    specs = [
        ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:1", "rank:0"]),
        ChunkShardingSpec(dim=1, placements=["rank:1", "rank:0"]),
        EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=[0, 0], shard_sizes=[7, 3], placement="rank:1"),
                ShardMetadata(shard_offsets=[7, 0], shard_sizes=[3, 3], placement="rank:0"),
            ]
        ),
    ]
    state = {str(number): sharded_tensor.empty(spec, 10, 3) for number, spec in enumerate(specs)}
    for tensor in state.values():
        for shard in tensor.local_shards():
            shard.tensor.copy_(_part(whole, shard))
    quietly(dcp.save, state, storage_writer=DtckptStorageWriter(path))
    found = {str(number): sharded_tensor.zeros(spec, 10, 3) for number, spec in enumerate(specs[1:] + specs[:1])}
    quietly(dcp.load, found, storage_reader=DtckptStorageReader(path))
    plain = {name: torch.zeros(10, 3) for name in found}
    quietly(dcp.load, plain, storage_reader=DtckptStorageReader(path))
    wrong = [name for name, tensor in plain.items() if not torch.equal(tensor, whole)]
    shards = [(name, shard) for name, tensor in found.items() for shard in tensor.local_shards()]
    return wrong + [name for name, shard in shards if not torch.equal(shard.tensor, _part(whole, shard))]


def _part(whole: torch.Tensor, shard: Any) -> torch.Tensor:
    """Return the elements of a shard."""
    offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def save_to_object_store(environment: Mapping[str, str], path: str) -> list[Any]:
    """Save twice to an object store; return what the checkpoint holds, and loads of it by DCP."""
    os.environ.update(environment)
    for value in (1.0, 2.0):
        quietly(dcp.save, plain_state(value), storage_writer=DtckptStorageWriter(path))
    target = plain_state(0.0)
    quietly(dcp.load, target, storage_reader=DtckptStorageReader(path))
    return [values_at(path), sorted({*target["sharded"].to_local().flatten().tolist(), *target["copied"].tolist()})]


def save_in_groups(path: str) -> list[float]:
    """Save in two groups at one time, to two paths."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "rank"))["rank"]
    state = {"sharded": distribute_tensor(torch.full((8, 3), float(own)), mesh, [Shard(0)])}
    quietly(dcp.save, state, storage_writer=DtckptStorageWriter(f"{path}_{own}"), process_group=groups[own])
    target = {"sharded": distribute_tensor(torch.zeros(8, 3), mesh, [Replicate()])}
    reader = DtckptStorageReader(f"{path}_{own}")
    quietly(dcp.load, target, storage_reader=reader, process_group=groups[own])
    loaded: DTensor = target["sharded"]
    return sorted(set(loaded.to_local().flatten().tolist())) + values_at(f"{path}_{own}")


def save_without_collectives(path: str) -> list[Any]:
    state = plain_state(5.0)
    quietly(dcp.save, state, storage_writer=DtckptStorageWriter(path), use_collectives=False)
    target = plain_state(0.0)
    quietly(dcp.load, target, storage_reader=DtckptStorageReader(path))
    return sorted({*target["sharded"].to_local().flatten().tolist(), *target["copied"].tolist(), target["value"]})


def errors_of_disagreements(path: str) -> list[list[str]]:
    """Save with what differs by rank; return the classes of the errors that this rank was told of."""
    rank = dist.get_rank()
    calls = {
        "path": lambda: DtckptStorageWriter(f"{path}_{rank}"),
        "options": lambda: DtckptStorageWriter(
            path, options=dtckpt.SaveOptions(chunk_nbytes=1024 + rank, overwrite=True)
        ),
        "overwrite": lambda: DtckptStorageWriter(path, overwrite=False),
    }
    quietly(dcp.save, plain_state(1.0), storage_writer=DtckptStorageWriter(path))
    told: list[list[str]] = []
    for make in calls.values():
        try:
            quietly(dcp.save, plain_state(2.0), storage_writer=make())
        except dcp.CheckpointException as error:
            told.append(sorted({type(failure).__name__ for failure, _ in error.failures.values()}))
    dist.barrier()
    assert values_at(path) == [1.0]
    return told


class Dying(dcp.DefaultSavePlanner):
    """Ends its process while data is written, on the last rank."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)
        return super().resolve_data(write_item)


def save_and_die(path: str) -> None:
    quietly(dcp.save, plain_state(1.0), storage_writer=DtckptStorageWriter(path))
    dist.barrier()
    quietly(dcp.save, plain_state(2.0), storage_writer=DtckptStorageWriter(path), planner=Dying())


def die_in_save(path: str) -> None:
    quietly(dcp.save, plain_state(2.0), storage_writer=DtckptStorageWriter(path), planner=Dying())


def save_again(path: str) -> list[float]:
    quietly(dcp.save, plain_state(3.0), storage_writer=DtckptStorageWriter(path))
    dist.barrier()
    return values_at(path)


# --- copies ---


def differing_states(kind: str) -> dict[str, Any]:
    """Return this rank's state, in which something under one name differs by rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((4, 3), float(rank))
    states: dict[str, Any] = {
        "elements": {"experts.0.w": local},
        "one element of many": {"w": torch.arange(300_000).index_fill_(0, torch.tensor(299_999), rank)},
        "replicated": {"w": DTensor.from_local(local, mesh, [Replicate()], run_check=False)},
        "shape": {"w": torch.ones(4 + rank)},
        "dtype": {"w": torch.ones(4, dtype=(torch.float32, torch.float64)[rank])},
        "value": {"optimizer": {"lr": rank}},
        "tuple": {"betas": (0.9, rank)},
        "array in a tuple": {"random": ("MT19937", np.full(5, rank))},
    }
    return {"same": torch.ones(2), "step": 7, **states[kind]}


def errors_of_copies(path: str, kind: str, to_lowest_rank: bool) -> list[str]:
    """Save a state of `differing_states` through DCP and by `dtckpt.save`; return class and text of both errors."""
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest_rank)
    found: list[str] = []
    try:
        quietly(dcp.save, differing_states(kind), storage_writer=DtckptStorageWriter(path), planner=planner)
    except dcp.CheckpointException as error:
        ((cause, _),) = error.failures.values()
        found.append(f"{type(cause).__name__}: {cause}")
    try:
        dtckpt.save(f"{path}_by_save", differing_states(kind))
    except errors.DtckptError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def save_unchecked(path: str) -> bool:
    """Save different copies by a writer that does not compare them."""
    writer = DtckptStorageWriter(path, options=dtckpt.SaveOptions(check_replicas=False))
    quietly(dcp.save, differing_states("elements"), storage_writer=writer)
    dist.barrier()
    return dtckpt.open_checkpoint(path).verify().is_sound


def forget_plans() -> None:
    """Clear what planners with ``enable_plan_caching`` keep in this process."""
    planner = dcp.planner.SavePlanner
    for kept in (
        planner._cached_save_plan,
        planner._cached_all_plans,
        planner._cached_global_plan,
        planner._cached_final_save_plan,
        planner._cached_metadata,
    ):
        kept.clear()


def errors_of_cached_copies(path: str) -> list[str]:
    """Save by cached plans: first equal copies, then different ones; return the errors and what was saved last."""
    found: list[str] = []
    forget_plans()
    for value in (0.0, 1.0, 2.0):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        own = torch.full((4,), value + (value == 1.0) * dist.get_rank())
        try:
            quietly(dcp.save, {"w": own}, storage_writer=DtckptStorageWriter(path), planner=planner)
        except dcp.CheckpointException as error:
            found += [type(cause).__name__ for cause, _ in error.failures.values()]
    dist.barrier()
    forget_plans()
    return [*found, str(values_at(path))]


def save_cached_dtypes(path: str, before: Any, after: Any, value: Any) -> list[Any]:
    """Save by cached plans, first in one dtype, then in another; return what is saved."""
    forget_plans()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step, dtype in enumerate((before, after)):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        whole = torch.full((7, 3), value if step else 1, dtype=dtype)
        state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "copied": whole, "scalar": whole[0, 0]}
        quietly(dcp.save, state, checkpoint_id=f"{path}_{step}", storage_writer=DtckptStorageWriter(), planner=planner)
    dist.barrier()
    forget_plans()
    tree = dtckpt.restore(f"{path}_1", group=[dist.get_rank()])
    return [dtckpt.open_checkpoint(f"{path}_1").verify().is_sound] + [
        (tensor.dtype == after, bool((tensor == torch.tensor(value, dtype=after)).all())) for tensor in tree.values()
    ]


# --- loops that look for checkpoints themselves ---


def newest_step(root: Path) -> int:
    """Return the newest step as loops find it: a name with ``step-N`` anywhere in it, and a file ``.metadata``."""
    steps = [
        int(match[1])
        for name in (os.listdir(root) if root.is_dir() else [])
        if (match := re.search(r"step-(\d+)", name)) and os.path.isfile(root / name / ".metadata")
    ]
    return max(steps, default=-1)


def run_loop(path: str, steps: int, *, load_step: int = -1, keep: int = 2, in_background: bool = False) -> list[Any]:
    """Train and save each step, from the newest checkpoint or a given one; keep the newest directories.

    Returns:
        The step that the loop began with, the values at its end, and the directories.
    """
    root, rank = Path(path), dist.get_rank()
    state = plain_state(0.0) | {"loader": {f"dp_rank_{rank % 2}": {"position": 0}}}
    start = newest_step(root) if load_step == -1 else load_step
    if start != -1:
        quietly(dcp.load, state, checkpoint_id=str(root / f"step-{start}"), storage_reader=DtckptStorageReader())
    dist.barrier()
    own_loader, future = state["loader"][f"dp_rank_{rank % 2}"], None
    for step in range(max(start, 0) + 1, steps + 1):
        state["sharded"].add_(1.0)
        state["copied"].add_(1.0)
        state["value"] += 1.0
        own_loader["position"] += 1
        if future is not None:
            future.result()
        where = {"checkpoint_id": str(root / f"step-{step}"), "storage_writer": DtckptStorageWriter()}
        future = quietly(dcp.async_save, state, **where) if in_background else None
        if not in_background:
            quietly(dcp.save, state, **where)
        if rank == 0 and root.is_dir():
            found = sorted(int(match[1]) for name in os.listdir(root) if (match := re.search(r"step-(\d+)", name)))
            for old in found[:-keep]:
                shutil.rmtree(root / f"step-{old}", ignore_errors=True)
    if future is not None:
        future.result()
    dist.barrier()
    values = {*state["sharded"].to_local().flatten().tolist(), *state["copied"].tolist(), state["value"]}
    return [start, sorted({*values, float(own_loader["position"])}), sorted(os.listdir(root))]
