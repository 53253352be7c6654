"""`PlannedMemory`: the memory that a restore fills, and the values made of this memory.

A restore fills a tensor of the target in place. Tensors on the meta device, and parts that the target lacks, such as
the state of a fresh optimizer, get new memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dtckpt.checkpoint.leaves import Leaf, as_leaf, is_fillable, new_memory, with_arrays
from dtckpt.checkpoint.low_bit_state import own_parts, restorer_of
from dtckpt.checkpoint.parameter_names import parameters_of
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.new_tensors import empty_beside, layout_of_tensor
from dtckpt.checkpoint.restoring.pairs import Pair
from dtckpt.checkpoint.restoring.state_layouts import StateLayouts
from dtckpt.checkpoint.restoring.target import ObjectSlot, TensorSlot, is_meta
from dtckpt.checkpoint.shards import ShardMark, Shards, named_tensors
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.torch_interop import KeptLayouts
from dtckpt.errors import DTypeError, LayoutError, TreeError, capped
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region


def plan_memory(
    checkpoint: Checkpoint, layouts: StateLayouts, taken: Iterable[Pair[Any]], objects: Iterable[Pair[ObjectSlot]]
) -> PlannedMemory:
    """Plan the memory for tensors of a checkpoint; allocate the tensors that the target lacks.

    Args:
        checkpoint: The checkpoint.
        layouts: Allocates the tensors that the target lacks.
        taken: The pairs that take saved tensors and values.
        objects: The pairs of objects whose state is restored.

    Raises:
        TreeError: A part of the target cannot be filled.
        DTypeError: The elements of a tensor are not dense memory, or a tensor on the meta device cannot get memory.
        LayoutError: The layout of a tensor that the target lacks is not known.
    """
    memory = PlannedMemory(checkpoint, layouts)
    for pair in taken:
        memory.add(pair)
    for each in objects:
        memory.modules.note_object(each.slot, each.where)
    memory.modules.validate_parameters()
    return memory


class PlannedMemory:
    """The memory that a restore fills.

    Args:
        checkpoint: The checkpoint.
        layouts: Allocates the tensors that the target lacks.

    Attributes:
        leaves: The memory, each with the name of its tensor in the checkpoint.
        used: Names of tensors, and paths of plain values, of the checkpoint that the target takes.
        modules: The memory for tensors of modules that have none.
    """

    def __init__(self, checkpoint: Checkpoint, layouts: StateLayouts) -> None:
        self._checkpoint = checkpoint
        self._layouts = layouts
        self.leaves: list[tuple[str, Leaf]] = []
        self.used: set[str] = set()
        self.modules = MetaTensors()
        self._kept: KeptLayouts = {}
        # By id of a pair, with the pair itself, so that no other pair gets its id.
        self._values: dict[int, tuple[Pair[Any], Callable[[], Any]]] = {}

    def value_of(self, pair: Pair[Any]) -> Any:
        """Return the new value of a place; call this after the memory is filled."""
        return self._values[id(pair)][1]()

    def add(self, pair: Pair[Any]) -> None:
        """Plan the memory of a pair."""
        is_filled = isinstance(pair.slot, TensorSlot)
        self._values[id(pair)] = pair, self._of_tensor(pair) if is_filled else self._of_new(pair)

    def _of_tensor(self, pair: Pair[TensorSlot]) -> Callable[[], Any]:
        """Plan to fill a tensor of the target."""
        target, (name,) = pair.slot.value, pair.tensor_names
        if isinstance(target, np.ndarray) and not is_fillable(target):
            raise TreeError(
                f"cannot restore into the array at {pair.where!r}: it is read-only, or PyTorch cannot address "
                "its elements; pass a copy() of it"
            )
        if isinstance(target, DTensor) and target._view is not None:
            raise LayoutError(
                f"tensor {name!r} is a view whose values are not in the memory of its source; restore into the source"
            )
        # The target keeps its own tensor: an optimizer, a tied layer or a graph may hold it, too.
        memory = self.modules.memory_of(target, name) if isinstance(target, torch.Tensor) else target
        self.used.add(name)
        self._fill(name, memory, pair.slot.mark)
        return lambda: memory

    def _of_new(self, pair: Pair[Any]) -> Callable[[], Any]:
        """Plan a value for which the target holds no tensors: take its plain values, and allocate its tensors."""
        scope, restore = pair.scope, None
        if scope.is_optimizer and (names := pair.tensor_names):
            restore = restorer_of(pair.node, scope.parameter, scope.optimizer, names[0])
            pair = pair if restore is None else replace(pair, node=own_parts(pair.node, scope.parameter))
        self.used.update(pair.names)
        infos = {name: self._checkpoint.info(name) for name in pair.tensor_names}
        # Before memory is taken: the shapes are claims of the manifest.
        self._checkpoint.validate_stored((name, Region.full(info.shape)) for name, info in infos.items())
        arrays = set(trees.array_names(pair.node))
        new: dict[str, torch.Tensor] = {}
        for name, info in infos.items():
            mark = None
            if name in arrays:
                new[name] = new_memory(name, info.shape, info.dtype)
            else:
                new[name], mark = self._layouts.allocate(name, info, scope)
            self._fill(name, new[name], mark)
        made, node = with_arrays(new, arrays), pair.node
        if restore is not None:
            return lambda: restore(trees.build(node, made.__getitem__))
        return lambda: trees.build(node, made.__getitem__)

    def _fill(self, name: str, memory: torch.Tensor | np.ndarray[Any, Any], mark: ShardMark | None) -> None:
        """Note memory to fill with a tensor, or with the part of the tensor that a mark describes."""
        leaf = Shards.of(memory, mark) if mark is not None and isinstance(memory, torch.Tensor) else memory
        self.leaves.append((name, as_leaf(leaf, name, self._kept)))


class MetaTensors:
    """The memory that a restore allocates for tensors on the meta device, which have a shape but no elements.

    After the reads, the tensors of modules get that memory and stay the same Python objects, so optimizers keep their
    parameters, and tied tensors stay tied. In a dict, new tensors take their place.
    """

    def __init__(self) -> None:
        # By id, with the tensor itself, so that no other tensor gets its id.
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_modules: list[torch.Tensor] = []
        self._parameters: list[tuple[str, torch.Tensor]] = []

    def memory_of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor itself, or new memory in its layout if it is on the meta device.

        Plain tensors are allocated on the host, DTensors on the devices of their mesh.
        """
        if not is_meta(tensor):
            return tensor
        if id(tensor) not in self._memory:
            shape, layout = tuple(tensor.shape), layout_of_tensor(tensor)
            new = (
                new_memory(name, shape, tensor.dtype)
                if layout is None
                else empty_beside(tensor, shape, tensor.dtype, layout)
            )
            self._memory[id(tensor)] = tensor, new
        return self._memory[id(tensor)][1]

    def note_object(self, slot: ObjectSlot, path: str) -> None:
        """Note the tensors of a module and the parameters of an optimizer that are on the meta device.

        Args:
            slot: An object of the target whose state was planned.
            path: Its path, for errors.

        Raises:
            DTypeError: A tensor of a module cannot get memory: it is not a part of the module's state, or there is a
                weak reference to it.
        """
        self._parameters.extend((path, parameter) for parameter in parameters_of(slot.value) if is_meta(parameter))
        if not isinstance(slot.value, nn.Module):
            return
        meta = {name: tensor for name, tensor in named_tensors(slot.value) if is_meta(tensor)}
        if not meta:
            return
        in_state = {id(tensor) for tensor in slot.state.value.values()}
        unsaved = [name for name, tensor in meta.items() if id(tensor) not in in_state]
        if unsaved:
            raise DTypeError(
                f"module at {path!r}: {capped(map(repr, unsaved))} on the meta device and not in the module's state, "
                "so the checkpoint does not have it; compute it on its device before the restore"
            )
        held = [name for name, tensor in meta.items() if weakref.getweakrefcount(tensor)]
        if held:
            raise DTypeError(
                f"module at {path!r}: {capped(map(repr, held))} on the meta device with a weak reference to it, so it "
                "cannot get memory; call to_empty(device=…) on the module before the restore"
            )
        self._in_modules.extend(tensor for tensor in meta.values() if id(tensor) in self._memory)

    def validate_parameters(self) -> None:
        """Check that the parameters of optimizers get memory, once the whole target is planned.

        Raises:
            DTypeError: A parameter gets no memory; the optimizer would move its state to the meta device, too.
        """
        given = {id(tensor) for tensor in self._in_modules}
        for path, parameter in self._parameters:
            if id(parameter) not in given:
                raise DTypeError(
                    f"optimizer at {path!r}: a parameter of shape {tuple(parameter.shape)} is on the meta device; "
                    "restore its module together with the optimizer, or before"
                )

    def give_memory(self) -> None:
        """Give the tensors of modules their allocated memory."""
        for tensor in {id(tensor): tensor for tensor in self._in_modules}.values():
            _give_memory(tensor, self._memory[id(tensor)][1])


def _give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a parameter or buffer memory; it stays the same object, of the same class, with the same attributes."""
    new = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory.detach()
    if type(new) is not type(tensor):
        new.__class__ = type(tensor)
    new.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in new.__dict__})
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]  # torch leaves it untyped
