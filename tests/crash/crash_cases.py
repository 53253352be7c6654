"""Functions that client processes run in the crash tests, and the check of what restores afterwards."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

from checkpoint.client_cases import Tensors, mesh_over_all, tree_on
from support.states import bits_of, tensor_of

import dtckpt
from dtckpt import SaveOptions
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import CheckpointNotFoundError

DEVICES = 4
TENSORS: Tensors = {
    "weight": ((64, 8), "float32", [("x", "y"), "unsharded"]),
    "blocks": ((600, 256), "float32", ["x", "unsharded"]),  # chunks large enough to be cut into blocks
    "uneven": ((101, 3), "bfloat16", [("x", "y"), "unsharded"]),  # rows between shards change hands
    "copies": ((40, 5), "int64", ["unsharded", "unsharded"]),
}
OWN_SHAPE = (7,)


def save(path: str, generation: str, *, has_own: bool = False, **options: Any) -> None:
    """Save the tensors of a generation when all clients are there.

    Args:
        path: The checkpoint.
        generation: What the elements follow from.
        has_own: Whether every client also saves a tensor that the others do not have.
        options: As `SaveOptions`.
    """
    coordination = current_coordination()
    coordination.register()
    coordination.barrier("ready", timeout_s=30)
    mesh = mesh_over_all({"x": 2, "y": DEVICES // 2}, DEVICES // dtckpt.num_clients())
    options = {"overwrite": True, "timeout_s": 30.0, **options}
    tree = tree_on(mesh, TENSORS, generation)
    if has_own:
        tree["own"] = {str(dtckpt.client_id()): tensor_of("own" + generation, OWN_SHAPE, "float32")}
    dtckpt.save(path, tree, options=SaveOptions(**options))


FROZEN = ("weight", "blocks", "copies")


def save_on_base(path: str, base: str, generation: str, **options: Any) -> None:
    """Save tensors that ``base`` has, of generation ``old``, and others of a generation, when all clients are there."""
    coordination = current_coordination()
    coordination.register()
    coordination.barrier("ready", timeout_s=30)
    mesh = mesh_over_all({"x": 2, "y": DEVICES // 2}, DEVICES // dtckpt.num_clients())
    frozen = tree_on(mesh, {name: TENSORS[name] for name in FROZEN}, "old")
    changed = tree_on(mesh, {name: TENSORS[name] for name in TENSORS if name not in FROZEN}, generation)
    options = {"overwrite": True, "timeout_s": 30.0, **options}
    dtckpt.save(path, {**frozen, **changed}, options=SaveOptions(**options), base=base)


def generation_on_base_at(path: str | Path) -> str | None:
    """Return which generation of `save_on_base` restores bit for bit; errors as `generation_at`."""
    try:
        restored = dtckpt.restore(path)
    except CheckpointNotFoundError:
        return None
    generation = restored.pop("step")
    assert restored.keys() == TENSORS.keys()
    for name in TENSORS:
        assert bits_of(restored[name]) == _saved_bits(name, "old" if name in FROZEN else generation), name
    return generation


def reshard_part(source: str, target: str, index: int, count: int, **options: Any) -> bool:
    """Do the part of one of several workers; return whether the new checkpoint is there."""
    from dtckpt.checkpoint.resharding.reshard import reshard
    from dtckpt.checkpoint.resharding.workers import Worker

    mesh = dtckpt.abstract_mesh({"x": 3})
    part = reshard(source, target, mesh=mesh, worker=Worker(index, count), options=SaveOptions(**options)).part
    assert part is not None
    return part.is_committed


def generation_at(path: str | Path) -> str | None:
    """Return which generation restores bit for bit; None if there is no checkpoint.

    Raises:
        AssertionError: The restored state differs from the saved state.
        CheckpointError: There is a checkpoint, but it cannot be restored.
    """
    try:
        restored = dtckpt.restore(path)
    except CheckpointNotFoundError:
        return None
    generation = restored.pop("step")
    own = tensor_of("own" + generation, OWN_SHAPE, "float32")
    assert all(bits_of(tensor) == bits_of(own) for tensor in restored.pop("own", {}).values())
    assert restored.keys() == TENSORS.keys()
    for name in TENSORS:
        assert bits_of(restored[name]) == _saved_bits(name, generation), name
    return generation


@functools.lru_cache(maxsize=32)
def _saved_bits(name: str, generation: str) -> bytes:
    shape, dtype, _ = TENSORS[name]
    return bits_of(tensor_of(name + generation, shape, dtype))


def names_in(folder: str) -> list[str]:
    return sorted(os.listdir(folder))


def remove(path: str) -> None:
    shutil.rmtree(path)
