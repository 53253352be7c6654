"""`TargetState`: a restore's target as a value; one visit makes it, and asks each object for its state once.

The rest of a restore works on this value: `dtckpt.checkpoint.restoring.match` compares it with the checkpoint, and
`dtckpt.checkpoint.restoring.fill` writes into its tensors. A ``state_dict()`` may be slow, or collective as in FSDP1.

After the memory of the tensors is filled, `fill` of each place gives the place its new value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dtckpt.checkpoint.leaves import is_stateful, is_tensor, mesh_of
from dtckpt.checkpoint.low_bit_state import close_state, open_state
from dtckpt.checkpoint.parameter_names import ParameterNames, parameters_of
from dtckpt.checkpoint.per_client import PerClient
from dtckpt.checkpoint.shards import ShardMark, Shards, marks_in_state, named_tensors, shard_marks
from dtckpt.comm.torch_private import is_fake
from dtckpt.errors import DTypeError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import TensorParts, fields_of, name_of
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import is_plain
from dtckpt.layout.mesh import Mesh

Path = tuple[str, ...]
"""The keys that lead to a place of a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place of a target. This class itself has a value that no restore can fill.

    Args:
        value: The value at the place.
        path: The keys that lead to the place.
    """

    value: Any
    path: Path

    @property
    def below(self) -> Iterable[Slot]:
        """The places directly below."""
        return ()

    def walk(self, *, enters_optimizers: bool = True) -> Iterator[Slot]:
        """Yield this place and all places below it, in the order of the tree."""
        yield self
        if enters_optimizers or not isinstance(self.value, Optimizer):
            for slot in self.below:
                yield from slot.walk(enters_optimizers=enters_optimizers)

    @property
    def has_meta(self) -> bool:
        """Whether a tensor here or below, or a parameter of an optimizer there, is on the meta device."""
        return any(is_meta(tensor) for slot in self.walk() for tensor in (slot.value, *parameters_of(slot.value)))


@dataclass(frozen=True, slots=True, eq=False)
class PlainSlot(Slot):
    """The place of a plain value."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot(Slot):
    """The place of a tensor of any kind, or of an array of numpy.

    Args:
        mark: The mark of a tensor in the state of an object; see `dtckpt.checkpoint.shards`.
    """

    mark: ShardMark | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ContainerSlot(Slot):
    """The place of a container.

    Args:
        items: The items, by key or by position.
        slots: The places of the items.
    """

    items: Mapping[Any, Any] | Sequence[Any]
    slots: Mapping[Any, Slot]

    @property
    def below(self) -> Iterable[Slot]:
        """The places of the items."""
        return self.slots.values()

    @property
    def node(self) -> trees.Node:
        """The node that a save of the container stores."""
        return trees.flatten(self.value, is_tensor)[1]

    @property
    def by_position(self) -> ContainerSlot:
        """The place of a named tuple with its items by position instead of by field."""
        return replace(self, items=self.value, slots=dict(enumerate(self.slots.values())))

    def fill(self, values: Mapping[Any, Any], *, drops: bool) -> Any:
        """Give the container new items; return it, or another one in its place if it cannot change.

        Args:
            values: The items, by key or by position; of a sequence all of them.
            drops: Whether other items of a dict go.
        """
        target, items = self.value, self.items
        if not isinstance(items, Mapping):
            return _with_items(target, list(values.values()))
        if drops and isinstance(target, MutableMapping):
            target.clear()
            target.update(values)
            return target
        # The current items: an item may have changed since the visit, or is made anew at each look.
        changed = {key: value for key, value in values.items() if key not in items or items[key] is not value}
        if isinstance(target, MutableMapping):
            target.update(changed)
            return target
        if isinstance(target, MappingProxyType):
            return MappingProxyType({**target, **changed})
        if isinstance(target, tuple):
            return target._replace(**changed)  # type: ignore[attr-defined]
        for name, value in changed.items():
            object.__setattr__(target, name, value)  # frozen dataclasses are filled, too
        return target


def _with_items(target: Any, values: list[Any]) -> Any:
    """Return a sequence with other items; the same one if it can change."""
    if isinstance(target, MutableSequence):
        target.clear()
        target.extend(values)
        return target
    return type(target)._make(values) if hasattr(target, "_make") else tuple(values)


@dataclass(frozen=True, slots=True, eq=False)
class PerClientSlot(Slot):
    """The place of a `dtckpt.PerClient`.

    Args:
        inner: The place of its value.
    """

    inner: Slot

    @property
    def below(self) -> Iterable[Slot]:
        """The place of the value."""
        return (self.inner,)

    def fill(self, value: Any) -> PerClient:
        """Replace the value; return the object."""
        self.value.value = value
        return self.value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectSlot(Slot):
    """The place of an object that returns and loads its state.

    Args:
        state: The place of its state.
        opened: By id, the tensors in the state of an optimizer that `open_state` replaced by their parts.
        has_meta: Whether the state has tensors on the meta device.
    """

    state: Slot
    opened: Mapping[int, tuple[TensorParts, Any]]
    has_meta: bool

    @property
    def below(self) -> Iterable[Slot]:
        """The place of the state."""
        return (self.state,)

    @property
    def is_scheduler(self) -> bool:
        """Whether the state depends on the groups of an optimizer that the object holds."""
        return isinstance(getattr(self.value, "optimizer", None), Optimizer)

    def fill(self, state: Any, where: str) -> None:
        """Let the object load its state with new values.

        Args:
            state: The state.
            where: The path of the object, for messages.

        Raises:
            DTypeError: The object keeps tensors on the meta device.
        """
        self.value.load_state_dict(close_state(state, self.opened))
        # A copy to a tensor on the meta device does nothing; PyTorch only warns.
        if self.has_meta and _keeps_meta(self.value):
            raise DTypeError(
                f"{type(self.value).__name__} at {where!r} keeps tensors on the meta device; restore its module "
                "itself, or let its load_state_dict assign the tensors"
            )


def _keeps_meta(target: Any) -> bool:
    """Tell whether an object has tensors on the meta device after a load; ask it again unless it is a module."""
    if isinstance(target, nn.Module):
        return any(is_meta(tensor) for _, tensor in named_tensors(target))
    return visit_target(target.state_dict()).root.has_meta


@dataclass(frozen=True, eq=False)
class TargetState:
    """A restore's target, as one visit found it.

    Args:
        root: The place of the whole tree.
        shard_marks: The marks of parameters, by their ids.
    """

    root: Slot
    shard_marks: Mapping[int, ShardMark]

    @cached_property
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """The tensors, each with its last key, and the parameters of optimizers; of parts, the global tensors."""
        found: list[tuple[str, torch.Tensor]] = []
        for slot in self.root.walk():
            key, value = slot.path[-1] if slot.path else "", slot.value
            if isinstance(value, Shards):
                found.append((key, value.whole(key)))
            elif isinstance(slot, TensorSlot) and not isinstance(value, np.ndarray):
                found.append((key, _whole(value, slot.mark, key)))
            else:
                parameters = parameters_of(value)
                found.extend(("", _whole(each, self.shard_marks.get(id(each)), key)) for each in parameters)
        return found

    @cached_property
    def meshes(self) -> frozenset[Mesh]:
        """The meshes that the tensors lie on; of slices, the whole meshes."""
        # One tensor on each mesh, because the conversion of PyTorch's meshes takes long.
        tensors = {id(getattr(tensor, "device_mesh", None)): tensor for _, tensor in self.tensors}
        # On other clients a tensor on a slice is on another slice; so all clients with such a tensor name the same
        # meshes.
        found = (mesh_of(tensor) for tensor in tensors.values())
        return frozenset(mesh.root_offsets[0] for mesh in found if mesh is not None)

    @cached_property
    def parameter_names(self) -> ParameterNames:
        """The names of the tree's tensors, as a save of the tree would store them."""
        names = ParameterNames()
        for slot in self.root.walk(enters_optimizers=False):
            if is_tensor(slot.value):
                names.add_tensors({"/".join(map(name_of_key, slot.path)): slot.value})
            elif isinstance(slot.value, nn.Module):
                names.add_module(slot.value, "/".join(map(name_of_key, slot.path)))
        return names


def _whole(tensor: torch.Tensor, mark: ShardMark | None, name: str) -> torch.Tensor:
    return tensor if mark is None else mark.whole(tensor, name)


def visit_target(target: Any, root: Path = ()) -> TargetState:
    """Visit a target: look at every place of it, and ask each of its objects for its state once.

    Args:
        target: The tree.
        root: The keys that lead to it in a larger tree.

    Raises:
        TreeError: The tree is too deep.
    """
    visitor = _Visitor()
    slot = visitor.visit(target, root, 0)
    if visitor.has_asked:
        # A `state_dict` may have changed containers that the visitor had passed.
        slot = visitor.visit(target, root, 0)
    return TargetState(slot, visitor.shard_marks)


class _Visitor:
    """Makes the slots of one target."""

    def __init__(self) -> None:
        self.shard_marks = shard_marks()
        # By id of a tensor in the state of an object.
        self.marks: dict[int, ShardMark] = {}
        # By id, with the object itself, so that no other object gets its id: a tree may hold an object twice.
        self._states: dict[int, tuple[Any, Any, Mapping[int, tuple[TensorParts, Any]]]] = {}

    @property
    def has_asked(self) -> bool:
        """Whether the visitor has asked an object for its state."""
        return bool(self._states)

    def visit(self, value: Any, path: Path, depth: int) -> Slot:
        """Return the slot of a value."""
        if depth > trees.MAX_DEPTH:
            raise TreeError(f"the target is deeper than {trees.MAX_DEPTH} levels; does it contain itself?")
        if is_tensor(value) or type(value) is np.ndarray:
            return TensorSlot(value, path, self.marks.get(id(value)))
        if is_plain(value):
            return PlainSlot(value, path)
        if isinstance(value, PerClient):
            return PerClientSlot(value, path, self.visit(value.value, path, depth + 1))
        if is_stateful_target(value):
            state, opened = self._state_of(value)
            slot = self.visit(state, path, depth + 1)
            return ObjectSlot(value, path, slot, opened, slot.has_meta)
        items = items_of_target(value)
        if items is None:
            return Slot(value, path)
        pairs = items.items() if isinstance(items, Mapping) else enumerate(items)
        slots = {key: self.visit(child, (*path, str(key)), depth + 1) for key, child in pairs}
        return ContainerSlot(value, path, items, slots)

    def _state_of(self, value: Any) -> tuple[Any, Mapping[int, tuple[TensorParts, Any]]]:
        """Return the state of an object, and the tensors in it that were taken apart."""
        if id(value) not in self._states:
            # A module on the meta device then returns its own tensors, not detached copies, because they will get
            # memory.
            keep_vars = isinstance(value, nn.Module) and any(is_meta(tensor) for _, tensor in named_tensors(value))
            state = value.state_dict(keep_vars=True) if keep_vars else value.state_dict()
            opened: Mapping[int, tuple[TensorParts, Any]] = {}
            if isinstance(value, Optimizer):
                state, opened = open_state(state)
            self.marks |= marks_in_state(value, state, self.shard_marks)
            self._states[id(value)] = value, state, opened
        return self._states[id(value)][1:]


def is_meta(tensor: object) -> bool:
    """Whether a tensor is on the meta device by its own choice."""
    return isinstance(tensor, torch.Tensor) and tensor.is_meta and not is_lazy(tensor) and not is_fake(tensor)


def is_stateful_target(target: Any) -> bool:
    """Tell whether a target is an object that returns and loads its state: no container and no plain value."""
    return type(target) not in (dict, list, tuple) and not is_plain(target) and is_stateful(target)


def items_of_target(target: Any) -> Mapping[Any, Any] | Sequence[Any] | None:
    """Return the items of a target that is a container, by key or by position; None for all else.

    A container of a class that is not Python's must be mutable: the restore changes it in place to keep its class.
    """
    if name_of(target) in ("namedtuple", "dataclass", "SimpleNamespace"):
        return fields_of(target)
    if name_of(target) == "TensorParts":
        return TensorParts.of(target)
    if type(target) in (tuple, MappingProxyType) or isinstance(target, MutableMapping | list | deque):
        return target  # type: ignore[no-any-return]
    return None
