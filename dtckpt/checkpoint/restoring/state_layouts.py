"""`StateLayouts`: the layouts of tensors that a restore's target does not have yet, such as a fresh optimizer's state.

State of a parameter is laid out as the parameter. If the parameter is not known, as in a plain dict, it is looked for
among the target's tensors: by its key, which is a part of the name of its state, or else by its shape.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from dtckpt.checkpoint.reading.checkpoint import new_memory
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.new_tensors import empty_beside, kept_layout, layout_of_tensor
from dtckpt.checkpoint.restoring.object_states import Scope
from dtckpt.checkpoint.restoring.wrapper_prefixes import unwrapped
from dtckpt.errors import LayoutError, capped
from dtckpt.layout.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A tensor of the target, and its layout: None for a plain one."""

    tensor: torch.Tensor
    layout: Layout | None


_Choices = dict[Layout | None, _Place]
"""By layout, a place in the target that has it."""


class StateLayouts:
    """Allocates tensors of a checkpoint in the layout of the target's tensors that they belong to.

    Args:
        tensors: The tensors of the target, each with its key.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._places: list[_Place] = []
        self._by_key: dict[str, list[_Place]] = defaultdict(list)
        self._by_shape: dict[tuple[int, ...], list[_Place]] = defaultdict(list)
        for key, tensor in tensors:
            if is_lazy(tensor) or tensor.is_nested:
                continue  # it has no shape, and is refused where the target is planned
            place = _Place(tensor, layout_of_tensor(tensor))
            self._places.append(place)
            self._by_key[unwrapped(key)].append(place)
            self._by_shape[tuple(tensor.shape)].append(place)

    def allocate(self, name: str, info: TensorInfo, scope: Scope) -> torch.Tensor:
        """Allocate a tensor; a plain one on the host where neither a parameter nor the checkpoint says more.

        Args:
            name: The tensor's name in the checkpoint.
            info: The facts about it.
            scope: The state that it is a part of.

        Raises:
            LayoutError: Several layouts are possible.
        """
        # A number that was on no mesh, as an optimizer counts steps, stays so.
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
            near = [_Place(scope.parameter, layout_of_tensor(scope.parameter))]
            alike = [place for place in near if tuple(place.tensor.shape) == info.shape]
        else:
            near = self._places
            alike = [place for place in self._named_in(name) if tuple(place.tensor.shape) == info.shape]
            if not alike and (info.layout is not None or scope.is_optimizer):
                alike = self._by_shape.get(info.shape, [])
        return _of_places(alike, info) or _on_meshes(near, info)

    def _named_in(self, name: str) -> Sequence[_Place]:
        """Return the tensors with the longest key that is a part of a name, between ``/`` and ``.``."""
        parts = re.split(r"[./]", name)
        for size in range(len(parts), 0, -1):
            for start in range(len(parts) - size + 1):
                if found := self._by_key.get(unwrapped(".".join(parts[start : start + size]))):
                    return found
        return []


def _of_places(places: Iterable[_Place], info: TensorInfo) -> _Choices:
    """Return the layouts of places; of several, those that the tensor was saved in, if there are such."""
    found = {place.layout: place for place in places}
    kept = {layout: place for layout, place in found.items() if _is_kept(layout, info)}
    return kept if len(found) > 1 and kept else found


def _is_kept(layout: Layout | None, info: TensorInfo) -> bool:
    """Whether a tensor was saved in the same sharding specs, as far as the mesh has their axes."""
    if layout is None or info.layout is None:
        return layout is info.layout
    return layout == kept_layout(info, layout.mesh)


def _on_meshes(near: Iterable[_Place], info: TensorInfo) -> _Choices:
    """Return the saved sharding specs on the meshes of places; of several, on those with the axes of the saved one."""
    if info.layout is None:
        return {}
    axes = info.layout.mesh.dim_names
    meshes = {place.layout.mesh: place for place in near if place.layout is not None}
    same = {mesh: place for mesh, place in meshes.items() if mesh.dim_names == axes}
    return {kept_layout(info, mesh): place for mesh, place in (same or meshes).items()}
