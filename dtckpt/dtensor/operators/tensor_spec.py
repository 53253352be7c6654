"""Specs: layout, global shape, strides and dtype of a DTensor as one value that is made once, so that looking up what
to do for a call compares identities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.dtensor.tensor import KEYS, DTensor
from dtckpt.layout.layout import Layout

_BOUND = 1 << 16


class Spec:
    """What a DTensor is, values apart. There is one object per layout object, shape, strides and dtype."""

    __slots__ = ("dtype", "layout", "shape", "stride")

    def __init__(self, layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layout = layout
        self.shape = shape
        self.stride = stride
        self.dtype = dtype


_SPECS: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], Spec] = {}


def intern_spec(layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """Return the spec; layouts are told apart by identity, since equal meshes may be seen from different clients."""
    key = id(layout), shape, stride, dtype
    found = _SPECS.get(key)
    if found is None:
        if len(_SPECS) >= _BOUND:
            _SPECS.clear()
        # A spec holds its layout, so that no other layout gets its identity while it is known.
        found = _SPECS[key] = Spec(layout, shape, stride, dtype)
    return found


def spec_of(tensor: DTensor) -> Spec:
    """Return a tensor's spec."""
    known: Spec | None = tensor._spec
    if known is None or known.layout is not tensor._layout:
        known = tensor._spec = intern_spec(tensor._layout, tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return known


def wrap_components(components: Sequence[torch.Tensor], described: Spec, device: torch.device | None = None) -> DTensor:
    """Return the DTensor of components that a spec describes."""
    made: DTensor = torch.Tensor._make_wrapper_subclass(
        DTensor,
        described.shape,
        strides=described.stride,
        dtype=described.dtype,
        device=components[0].device if components else device or torch.device("cpu"),
        _extra_dispatch_keys=KEYS,
    )
    made._components = tuple(components)
    made._layout = described.layout
    made._spec = described
    return made


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def global_stride(component: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for a global shape, dims in memory in the order of a component's; expanded dims stay so."""
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
