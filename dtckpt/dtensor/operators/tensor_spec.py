"""Specs: layout, global shape, strides and dtype of a DTensor in one shared object.

Equal specs are the same object, so the look-up of a plan by its key compares identities, which is fast. Their layouts
are the same object as well, however many equal ones a program makes: each would need plans of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.derived_layouts import shared_layout
from dtckpt.dtensor.tensor import KEYS, DTensor
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


def spec_of(tensor: DTensor) -> Spec:
    """Return a tensor's spec."""
    known: Spec | None = tensor._spec
    if known is None:
        known = tensor._spec = intern_spec(tensor._layout, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        tensor._layout = known.layout
    return known


def wrap_components(
    components: Sequence[torch.Tensor], described: Spec, device: torch.device | None = None, *, offset: int = 0
) -> DTensor:
    """Return the DTensor that has these components and this spec.

    Args:
        components: One tensor per local device.
        described: The spec.
        device: Device type of a DTensor without components.
        offset: Storage offset of the global tensor. It is no part of the spec: plans do not depend on it.
    """
    tensor: DTensor = torch_private.make_wrapper(
        DTensor,
        described.shape,
        strides=described.stride,
        storage_offset=offset,
        dtype=described.dtype,
        device=components[0].device if components else device or torch.device("cpu"),
        _extra_dispatch_keys=KEYS,
    )
    tensor._components = tuple(components)
    tensor._layout = described.layout
    tensor._spec = described
    return tensor


def with_stride(tensor: DTensor, stride: tuple[int, ...]) -> DTensor:
    """Return a tensor that nobody else has yet with these strides; its components stay as they are."""
    if tensor.stride() == stride:
        return tensor
    result = wrap_components(
        tensor._components, intern_spec(tensor._layout, tuple(tensor.shape), stride, tensor.dtype), tensor.device
    )
    result._pending, result._is_async = tensor._pending, tensor._is_async
    result._view, result._writes = tensor._view, tensor._writes
    torch_private.set_storage(result, tensor)
    return result


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
