"""`StateLayouts`: the layouts of tensors that a restore's target does not have yet, such as a fresh optimizer's state.

State of a parameter has the layout of the parameter. For a plain dict the parameter is unknown. Then the restore looks
for it among the target's tensors: by its key, which is a part of the name of its state, or else by its shape. If
tensors of that shape have different layouts, the parameter's number decides::

    parameters, by the shapes of their state    0: (6,)  1: (6,)  2: (9, 6)  3: (6,)
    tensors of the target, in order             norm.weight (6,)  norm.bias (6,)  up.weight (9, 6)  down.bias (6,)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.nn.parameter import is_lazy

from dtckpt.checkpoint.leaves import new_memory
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.layout_choice import kept_layout
from dtckpt.checkpoint.restoring.new_tensors import empty_beside, layout_of_tensor
from dtckpt.checkpoint.restoring.pairs import Scope
from dtckpt.checkpoint.restoring.wrapper_prefixes import unwrapped
from dtckpt.checkpoint.shards import ShardMark
from dtckpt.errors import LayoutError, capped
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A tensor of the target, and its layout: None for a plain one."""

    tensor: torch.Tensor
    layout: Layout | None


_Choices = dict[Layout | None, _Place]
"""By layout, a place in the target that has it."""
_Shape = tuple[int, ...]
_NUMBERED = re.compile(r"(.*)/(\d+)/[^/]+")
"""The name of a tensor of a parameter's state in ``Optimizer.state_dict()``: with the number of the parameter."""


class StateLayouts:
    """Allocates tensors of a checkpoint in the layout of the target's tensors that they belong to.

    Args:
        tensors: The tensors of the target, each with its key.
        shard_marks: The marks of its parameters, by their ids; see `dtckpt.checkpoint.shards`.
        saved: The tensors of the checkpoint, by name.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        shard_marks: Mapping[int, ShardMark],
        saved: Mapping[str, TensorInfo],
    ) -> None:
        self._tensors = tensors
        self._shard_marks = shard_marks
        self._saved = saved

    @cached_property
    def _places(self) -> list[tuple[str, _Place]]:
        # Made at first use, because most restores allocate no tensors. Tensors without a shape are refused elsewhere.
        named = ((key, tensor) for key, tensor in self._tensors if not (is_lazy(tensor) or tensor.is_nested))
        return [(unwrapped(key), _Place(tensor, layout_of_tensor(tensor))) for key, tensor in named]

    @cached_property
    def _by_key(self) -> Mapping[str, Sequence[_Place]]:
        places: dict[str, list[_Place]] = defaultdict(list)
        for key, place in self._places:
            places[key].append(place)
        return places

    @cached_property
    def _by_shape(self) -> Mapping[tuple[int, ...], _Choices]:
        # Few layouts, of which each has many tensors.
        choices: dict[tuple[int, ...], _Choices] = defaultdict(dict)
        for _, place in self._places:
            choices[tuple(place.tensor.shape)].setdefault(place.layout, place)
        return choices

    @cached_property
    def _on_meshes(self) -> Mapping[Mesh, _Place]:
        return {place.layout.mesh: place for _, place in self._places if place.layout is not None}

    def allocate(self, name: str, info: TensorInfo, scope: Scope) -> tuple[torch.Tensor, ShardMark | None]:
        """Allocate a tensor; of the state of a marked parameter, this client's part. Return it, and its mark.

        The tensor is a plain tensor on the host if neither a parameter nor the checkpoint gives a layout.

        Args:
            name: The tensor's name in the checkpoint.
            info: The facts about it.
            scope: The state that it is a part of.

        Raises:
            LayoutError: Several layouts are possible.
        """
        if (parameter := scope.parameter) is not None:
            mark = self._shard_marks.get(id(parameter))
            shape = None if mark is None else mark.shape_of_part(info.shape, parameter, name)
            if shape is not None:
                return self._allocate(name, replace(info, shape=shape), scope), mark
        return self._allocate(name, info, scope), None

    def _allocate(self, name: str, info: TensorInfo, scope: Scope) -> torch.Tensor:
        # A number that was on no mesh, such as an optimizer's count of steps, stays plain.
        choices = {} if info.layout is None and not info.shape else self._choices(name, info, scope)
        if len(choices) > 1:
            raise LayoutError(
                f"tensor {name!r} is not in the target yet, and could lie there as {capped(map(str, choices))}; "
                "restore the optimizer itself, or state by names of parameters (torch.distributed.checkpoint)"
            )
        for layout, place in choices.items():
            if layout is not None:
                return empty_beside(place.tensor, info.shape, info.dtype, layout)
        return new_memory(name, info.shape, info.dtype)

    def _choices(self, name: str, info: TensorInfo, scope: Scope) -> _Choices:
        """Return the layouts that a tensor may take."""
        if scope.parameter is not None:
            own = _Place(scope.parameter, layout_of_tensor(scope.parameter))
            if tuple(own.tensor.shape) == info.shape:
                return {own.layout: own}
            return _saved_specs(info, {} if own.layout is None else {own.layout.mesh: own})
        named = (place for place in self._named_in(name) if tuple(place.tensor.shape) == info.shape)
        choices = {place.layout: place for place in named}
        if not choices and (info.layout is not None or scope.is_optimizer):
            choices = self._by_shape.get(info.shape, {})
        if len(choices) > 1:
            choices = {layout: place for layout, place in choices.items() if _is_kept(layout, info)} or choices
        if len(choices) > 1 and scope.is_numbered:
            choices = self._numbered(name, info.shape) or choices
        return choices or _saved_specs(info, self._on_meshes)

    def _numbered(self, name: str, shape: _Shape) -> _Choices:
        """Return the layouts of the tensors that may be the parameter, by its number; none if no tensor can be."""
        match = _NUMBERED.fullmatch(name)
        span = self._spans.get(match[1], {}).get(int(match[2])) if match else None
        places = [] if span is None else [place for _, place in self._places[span[0] : span[1] + 1]]
        return {place.layout: place for place in places if tuple(place.tensor.shape) == shape}

    @cached_property
    def _spans(self) -> Mapping[str, Mapping[int, tuple[int, int]]]:
        """By name of an optimizer's state and number of a parameter: the first and last tensor that may be it."""
        shapes = [tuple(place.tensor.shape) for _, place in self._places]
        saved: dict[str, dict[int, set[_Shape]]] = defaultdict(lambda: defaultdict(set))
        for name, info in self._saved.items():
            if match := _NUMBERED.fullmatch(name):
                saved[match[1]][int(match[2])].add(info.shape)
        # A parameter without state of the parameter's shape stays unknown.
        known = {state: {number: own & {*shapes} for number, own in all_.items()} for state, all_ in saved.items()}
        numbers = {state: sorted(number for number, own in all_.items() if own) for state, all_ in known.items()}
        return {
            state: dict(zip(each, spans_in_order([known[state][number] for number in each], shapes), strict=False))
            for state, each in numbers.items()
        }

    def _named_in(self, name: str) -> Sequence[_Place]:
        """Return the tensors with the longest key that is a part of a name, between ``/`` and ``.``."""
        parts = re.split(r"[./]", name)
        for size in range(len(parts), 0, -1):
            for start in range(len(parts) - size + 1):
                if found := self._by_key.get(unwrapped(".".join(parts[start : start + size]))):
                    return found
        return []


def spans_in_order(wanted: Sequence[Collection[_Shape]], shapes: Sequence[_Shape]) -> list[tuple[int, int]]:
    """Return the first and the last position that each of a sequence of parameters can have among tensors, in order.

    The list is empty if the tensors do not have such parameters in this order.

    Args:
        wanted: The shapes that each parameter may have.
        shapes: The shapes of the tensors.
    """
    firsts = _first_positions(wanted, shapes)
    lasts = _first_positions(wanted[::-1], shapes[::-1])
    return [(first, len(shapes) - 1 - last) for first, last in zip(firsts, lasts[::-1], strict=True)]


def _first_positions(wanted: Sequence[Collection[_Shape]], shapes: Sequence[_Shape]) -> list[int]:
    positions: list[int] = []
    for own in wanted:
        start = positions[-1] + 1 if positions else 0
        found = next((position for position in range(start, len(shapes)) if shapes[position] in own), None)
        if found is None:
            return []
        positions.append(found)
    return positions


def _is_kept(layout: Layout | None, info: TensorInfo) -> bool:
    """Whether a tensor was saved in the same sharding specs, as far as the mesh has their axes."""
    if layout is None or info.layout is None:
        return layout is info.layout
    return layout == kept_layout(info, layout.mesh)


def _saved_specs(info: TensorInfo, meshes: Mapping[Mesh, _Place]) -> _Choices:
    """Return the saved sharding specs on the meshes that have the axes of the saved mesh, or on all if none has."""
    if info.layout is None:
        return {}
    axes = info.layout.mesh.dim_names
    same = {mesh: place for mesh, place in meshes.items() if mesh.dim_names == axes}
    return {kept_layout(info, mesh): place for mesh, place in (same or meshes).items()}
