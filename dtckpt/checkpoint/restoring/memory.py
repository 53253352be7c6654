"""`Memory`: the memory that a restore fills, and the values that are made of it.

A tensor of the target is filled in place. What the target lacks, as the state of a fresh optimizer, gets new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.leaves import Leaf, as_leaf, is_fillable, new_memory, with_arrays
from dtckpt.checkpoint.low_bit_state import own_parts, restorer_of
from dtckpt.checkpoint.open import Checkpoint
from dtckpt.checkpoint.restoring.meta_tensors import MetaTensors
from dtckpt.checkpoint.restoring.pairs import Pair
from dtckpt.checkpoint.restoring.state_layouts import StateLayouts
from dtckpt.checkpoint.restoring.target import ObjectSlot, TensorSlot
from dtckpt.checkpoint.shards import ShardMark, Shards
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.torch_interop import KeptLayouts
from dtckpt.errors import LayoutError, TreeError
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region


def plan_memory(
    checkpoint: Checkpoint, layouts: StateLayouts, taken: Iterable[Pair[Any]], objects: Iterable[Pair[ObjectSlot]]
) -> Memory:
    """Plan which memory is filled with which tensors of a checkpoint; allocate what the target lacks.

    Args:
        checkpoint: The checkpoint.
        layouts: Allocates the tensors that the target lacks.
        taken: The pairs whose saved tensors and values are taken.
        objects: The pairs of objects whose state is restored.

    Raises:
        TreeError: A part of the target cannot be filled.
        DTypeError: The elements of a tensor are not dense memory, or a tensor on the meta device cannot get memory.
        LayoutError: The layout of a tensor that the target lacks is not known.
    """
    memory = Memory(checkpoint, layouts)
    for pair in taken:
        memory.add(pair)
    for each in objects:
        memory.modules.note_object(each.slot, each.where)
    memory.modules.validate_parameters()
    return memory


class Memory:
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
        # By id of a pair, with the pair itself, so that no other one gets its id.
        self._values: dict[int, tuple[Pair[Any], Callable[[], Any]]] = {}

    def value_of(self, pair: Pair[Any]) -> Any:
        """Return the value that a place gets; call this when the memory is filled."""
        return self._values[id(pair)][1]()

    def give_to_modules(self) -> None:
        """Give the tensors of modules that have no memory theirs."""
        self.modules.give_memory()

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
        """Note memory that is to be filled with a tensor, or with the part of it that a mark says."""
        leaf = Shards.of(memory, mark) if mark is not None and isinstance(memory, torch.Tensor) else memory
        self.leaves.append((name, as_leaf(leaf, name, self._kept)))
