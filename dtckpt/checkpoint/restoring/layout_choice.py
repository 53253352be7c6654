"""Choose the layout of a restored tensor: by name, by a function, or the saved layout on another mesh."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement

LayoutOrPlacements = Layout | Sequence[Placement]
LayoutChoice = LayoutOrPlacements | Callable[[str, TensorInfo], LayoutOrPlacements]
Layouts = Mapping[str, LayoutChoice] | Callable[[str, TensorInfo], LayoutOrPlacements]
"""Layouts by tensor name or glob (first match wins), each a Layout or a function of (name, info); or one function.

A value may also be one placement per axis of the mesh instead of a Layout, of this library or PyTorch's.
"""


def choose_layout(
    name: str, info: TensorInfo, mesh: Mesh | None, layouts: Layouts | None, *, keep_plain: bool = False
) -> Layout | None:
    """Return the layout that a tensor is restored into; None for a plain tensor.

    Args:
        name: The tensor's name, after renaming.
        info: The facts about it.
        mesh: As for `dtckpt.restore`.
        layouts: As for `dtckpt.restore`.
        keep_plain: Whether a tensor that was on no mesh stays plain unless ``layouts`` match it.

    Raises:
        LayoutError: The chosen layout does not have the tensor's rank.
        LayoutTypeError: The choice is no Layout.
    """
    choice: Any = None
    if callable(layouts) and not isinstance(layouts, Mapping):
        choice = layouts
    elif layouts is not None:
        choice = layouts.get(name) or next(
            (chosen for pattern, chosen in layouts.items() if fnmatch.fnmatchcase(name, pattern)), None
        )
    if callable(choice):
        choice = choice(name, info)
    if choice is None:
        return None if mesh is None or (keep_plain and info.layout is None) else kept_layout(info, mesh)
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        if mesh is None:
            raise LayoutError(f"layout for tensor {name!r}: got placements, which need mesh=; or pass a Layout")
        try:
            return Layout.from_placements(mesh, choice, len(info.shape))
        except LayoutError as error:
            raise type(error)(f"layout for tensor {name!r}: {error.message}") from None
    if not isinstance(choice, Layout):
        raise LayoutTypeError(f"layout for tensor {name!r} must be a Layout or placements; got {type(choice).__name__}")
    if choice.rank != len(info.shape):
        raise LayoutError(
            f"layout for tensor {name!r} does not fit; got rank {choice.rank}, expected {len(info.shape)} dims"
        )
    return choice


def kept_layout(info: TensorInfo, mesh: Mesh) -> Layout:
    """Return the saved sharding specs on another mesh, without the axes that this mesh lacks."""
    specs: list[str | tuple[str, ...]] = []
    for spec in info.layout.sharding_specs if info.layout else [UNSHARDED] * len(info.shape):
        axes = [axis for axis in ((spec,) if isinstance(spec, str) else spec) if axis in mesh]
        specs.append(tuple(axes) if axes else UNSHARDED)
    return Layout(specs, mesh)
