"""Specs: layout, global shape, strides and dtype of a DTensor in one shared object.

Equal specs are the same object, so the look-up of a plan by its key compares identities, which is fast. Equal layouts
of specs are also the same object, because each object would need separate plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.dtensor.derived_layouts import shared_layout
from dtckpt.layout.layout import Layout

_BOUND = 1 << 16


class Spec:
    """A DTensor without its values. Make one by `intern_spec`: equal specs must be the same object."""

    __slots__ = ("dtype", "layout", "shape", "stride")

    def __init__(self, layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layout = layout
        self.shape = shape
        self.stride = stride
        self.dtype = dtype


_SPECS: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], Spec] = {}


def intern_spec(layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """Return the one spec of these properties. Its layout is `shared_layout` of the given one."""
    layout = shared_layout(layout)
    key = id(layout), shape, stride, dtype
    known = _SPECS.get(key)
    if known is None:
        if len(_SPECS) >= _BOUND:
            _SPECS.clear()
        # The spec keeps its layout alive, so no other layout gets its id while the spec is in the table.
        known = _SPECS[key] = Spec(layout, shape, stride, dtype)
    return known


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def global_stride(component: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for a global shape, with the dims in memory in the order that a component has them.

    An expanded dim, of stride 0, stays expanded.
    """
    if component.is_contiguous() or component.numel() == 0 or component.layout is not torch.strided:
        return contiguous_stride(shape)
    steps = component.stride()
    order = sorted(range(len(shape)), key=lambda dim: (-steps[dim], dim))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        if steps[dim] or component.shape[dim] == 1:
            strides[dim] = step
            step *= max(shape[dim], 1)
    return tuple(strides)
