"""Copy and pickle DTensors; `torch.load` reads them with ``weights_only=True``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import warn_if_has_hooks

from dtckpt.dtensor.operators import view_tracking
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import OperatorError
from dtckpt.layout.layout import Layout, layout_of_parts
from dtckpt.layout.mesh import mesh_of_bytes
from dtckpt.layout.placement import Partial, Replicate, Shard, _StridedShard


def reduce(tensor: DTensor) -> tuple[Any, ...]:
    """Return a function and its arguments for `pickle`; as in PyTorch, without hooks and gradient.

    Views whose components share memory with the source's components share it again where PyTorch's plain tensors do.
    Other views become separate tensors.
    """
    warn_if_has_hooks(tensor)
    # A view without memory of its source becomes a separate tensor, whose writes no other tensor counts.
    writes = None if tensor._view is not None else tensor._writes
    state = *_description(tensor), _attributes(tensor), *_place(tensor), writes
    return rebuild, (type(tensor), tensor.components, *state)


def rebuild(  # noqa: PLR0917  (pickle passes positions)
    kind: type[DTensor],
    components: tuple[torch.Tensor, ...],
    layout: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
    stride: tuple[int, ...] | None = None,
    offset: int | None = None,
    writes: view_tracking.WriteCounter | None = None,
) -> DTensor:
    """Return a tensor, a leaf, from the arguments that `reduce` returned; older pickles end before strides."""
    tensor = DTensor.__new__(kind, components, layout, shape, dtype, stride=stride, offset=offset)
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)
    tensor._writes = writes
    return tensor


def shallow_copy(tensor: DTensor) -> DTensor:
    """Return a tensor with the same memory, for `copy.copy`; as in PyTorch, without hooks and gradient."""
    warn_if_has_hooks(tensor)
    alias = view_tracking.alias_of(tensor)
    duplicate = rebuild(type(tensor), alias._components, *_description(tensor), _attributes(tensor), *_place(tensor))
    view_tracking.share_writes(duplicate, tensor)
    duplicate._view = alias._view
    return duplicate


def deepcopy(tensor: DTensor, memo: dict[Any, Any]) -> DTensor:
    """Return a deep copy, gradient included. Copies of tensors that share memory or values share them again.

    Raises:
        OperatorError: The tensor was computed.
    """
    if not tensor.is_leaf:
        raise OperatorError("copy.deepcopy copies leaves only; got a DTensor that was computed; detach or clone it")
    if id(tensor) not in memo:
        attributes = copy.deepcopy(_attributes(tensor), memo)
        if isinstance(tensor, nn.Parameter):
            # As of plain tensors: the copy of a parameter shares memory with no other copy.
            cloned: Any = tensor.detach().clone()
            components, place = cloned.components, _place(cloned)
        else:
            components = tuple(copy.deepcopy(component.detach(), memo) for component in tensor.components)
            place = _place(tensor)
        duplicate = rebuild(type(tensor), components, *_description(tensor), attributes, *place)
        if not isinstance(tensor, nn.Parameter):
            _share_again(tensor, duplicate, memo)
        if tensor.grad is not None:
            duplicate.grad = copy.deepcopy(tensor.grad, memo)
        memo[id(tensor)] = duplicate
    result: DTensor = memo[id(tensor)]
    return result


def _share_again(tensor: DTensor, duplicate: DTensor, memo: dict[Any, Any]) -> None:
    """Have the copy of a tensor share values with the copies of the tensors that share values with it."""
    if tensor._writes is None:
        return
    first = memo.setdefault(("values of", id(tensor._writes)), duplicate)
    if first is not duplicate:
        view_tracking.share_writes(duplicate, first)
    if tensor._view is not None:
        duplicate._view = tensor._view.on(copy.deepcopy(tensor._view.source, memo))


def _description(tensor: DTensor) -> tuple[Layout, tuple[int, ...], torch.dtype, bool]:
    return tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _place(tensor: DTensor) -> tuple[tuple[int, ...], int]:
    """Return strides and storage offset."""
    return tensor.stride(), int(tensor.storage_offset())


def _attributes(tensor: DTensor) -> dict[str, Any]:
    """Return the attributes that the program, or ``nn.Parameter``, has set on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in DTensor.__annotations__}


_COUNTER = view_tracking.WriteCounter
SAFE_GLOBALS = (rebuild, _COUNTER, layout_of_parts, mesh_of_bytes, Partial, Replicate, Shard, _StridedShard)
"""Names that files of tensors, layouts and meshes refer to, beside the tensor classes; all are safe to load."""
