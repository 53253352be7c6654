"""`TargetTree`: the target of a restore, whose objects are asked for their state once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.leaves import is_stateful, is_tensor, mesh_of
from dtckpt.checkpoint.low_bit_state import close_state, open_state
from dtckpt.checkpoint.parameter_names import ParameterNames, parameters_of
from dtckpt.checkpoint.per_client import PerClient
from dtckpt.checkpoint.restoring.meta_tensors import state_of_module
from dtckpt.checkpoint.shards import ShardMark, Shards, marks_in_state, shard_marks
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import TensorParts, fields_of, name_of
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import is_plain
from dtckpt.layout.mesh import Mesh


class TargetTree:
    """The tree that a restore fills.

    Args:
        target: The tree.
        root: The keys that lead to it in a larger tree.
    """

    def __init__(self, target: Any, root: tuple[str, ...] = ()) -> None:
        self.target = target
        self._root = root
        # By id, with the object itself, so that no other one gets its id.
        self._states: dict[int, tuple[Any, Any]] = {}
        self._opened: dict[int, tuple[TensorParts, Any]] = {}
        self._marks: dict[int, ShardMark] = {}

    @cached_property
    def shard_marks(self) -> Mapping[int, ShardMark]:
        """The marks of parameters, by their ids; see `dtckpt.checkpoint.shards.shard_marks`."""
        return shard_marks()

    def mark_of(self, tensor: Any) -> ShardMark | None:
        """Return the mark of a tensor in the state of an object; None if it is not marked."""
        return self._marks.get(id(tensor))

    def state_of(self, value: Any) -> Any:
        """Return the state of an object; of a module on the meta device with its very tensors, not detached ones."""
        if id(value) not in self._states:
            state = state_of_module(value) if isinstance(value, nn.Module) else value.state_dict()
            if isinstance(value, Optimizer):
                state, opened = open_state(state)
                self._opened |= opened
            self._marks |= marks_in_state(value, state, self.shard_marks)
            self._states[id(value)] = value, state
        return self._states[id(value)][1]

    def close(self, value: Any, state: Any) -> Any:
        """Return what an object loads, given its state (`state_of`) with new values."""
        return close_state(state, self._opened) if isinstance(value, Optimizer) else state

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, each with its last key, and the parameters of optimizers; of parts, the global tensors.

        Raises:
            TreeError: The tree is too deep.
        """
        for path, value in self._walk(self.target, self._root):
            key = path[-1] if path else ""
            if isinstance(value, Shards):
                yield key, value.whole(key)
            elif is_tensor(value):
                yield key, _whole(value, self.mark_of(value), key)
            else:
                for parameter in parameters_of(value):
                    yield "", _whole(parameter, self.shard_marks.get(id(parameter)), key)

    def root_meshes(self) -> set[Mesh]:
        """Return the meshes that the tensors lie on, of slices the whole meshes. Raises: as `tensors`."""
        # One tensor on each mesh, as a mesh of PyTorch takes long to be converted.
        tensors = {id(getattr(tensor, "device_mesh", None)): tensor for _, tensor in self.tensors()}
        # A tensor on a slice is on another slice elsewhere; so all clients with such a tensor name the same meshes.
        return {mesh.root_offsets[0] for tensor in tensors.values() if (mesh := mesh_of(tensor)) is not None}

    @cached_property
    def parameter_names(self) -> ParameterNames:
        """The names of the tree's tensors, as a save of the tree would store them."""
        names = ParameterNames()
        for path, value in self._walk(self.target, self._root, enters_optimizers=False):
            if is_tensor(value):
                names.add_tensors({"/".join(map(name_of_key, path)): value})
            elif isinstance(value, nn.Module):
                names.add_module(value, "/".join(map(name_of_key, path)))
        return names

    def _walk(
        self, value: Any, path: tuple[str, ...], depth: int = 0, *, enters_optimizers: bool = True
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the tensors and the objects at and below a part of the tree, each with its path."""
        if depth > trees.MAX_DEPTH:
            raise TreeError(f"the target is deeper than {trees.MAX_DEPTH} levels; does it contain itself?")
        if is_tensor(value):
            yield path, value
            return
        if is_stateful_target(value):
            yield path, value
            if enters_optimizers or not isinstance(value, Optimizer):
                yield from self._walk(self.state_of(value), path, depth + 1, enters_optimizers=enters_optimizers)
        elif isinstance(value, PerClient):
            yield from self._walk(value.value, path, depth + 1, enters_optimizers=enters_optimizers)
        elif (items := items_of_target(value)) is not None:
            for key, child in items.items() if isinstance(items, Mapping) else enumerate(items):
                yield from self._walk(child, (*path, str(key)), depth + 1, enters_optimizers=enters_optimizers)


def _whole(tensor: torch.Tensor, mark: ShardMark | None, name: str) -> torch.Tensor:
    return tensor if mark is None else mark.whole(tensor, name)


def is_stateful_target(target: Any) -> bool:
    """Whether a target is an object that returns and loads its state, and neither a container nor a plain value."""
    return type(target) not in (dict, list, tuple) and not is_plain(target) and is_stateful(target)


def items_of_target(target: Any) -> Mapping[Any, Any] | Sequence[Any] | None:
    """Return what a target that is a container holds, by key or by position; None for all else.

    A container of a class that is not Python's must be mutable: it is changed in place, which keeps its class.
    """
    if name_of(target) in ("namedtuple", "dataclass", "SimpleNamespace"):
        return fields_of(target)
    if name_of(target) == "TensorParts":
        return TensorParts.of(target)
    if type(target) in (tuple, MappingProxyType) or isinstance(target, MutableMapping | list | deque):
        return target  # type: ignore[no-any-return]
    return None
