"""Copy and pickle DTensors; `torch.load` reads them with ``weights_only=True``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import OperatorError
from dtckpt.layout.layout import Layout, layout_of_parts
from dtckpt.layout.mesh import mesh_of_bytes
from dtckpt.layout.placement import Partial, Replicate, Shard, _StridedShard


def reduce(tensor: DTensor) -> tuple[Any, ...]:
    """Return a function and its arguments for `pickle` and `copy.copy`; as in PyTorch, without hooks and gradient."""
    warn_if_has_hooks(tensor)
    state = tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return rebuild, (type(tensor), tensor.components, *state, _attributes(tensor))


def rebuild(  # noqa: PLR0917  (pickle passes positions)
    kind: type[DTensor],
    components: tuple[torch.Tensor, ...],
    layout: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> DTensor:
    """Return a tensor, a leaf, from the arguments that `reduce` returned."""
    tensor = DTensor.__new__(kind, components, layout, shape, dtype)
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)
    return tensor


def deepcopy(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """Return a deep copy, gradient included. Copies of components that share memory share it again.

    Raises:
        OperatorError: The tensor was computed.
    """
    if not tensor.is_leaf:
        raise OperatorError("copy.deepcopy copies leaves only; got a DTensor that was computed; detach or clone it")
    if id(tensor) not in memo:
        components = tuple(copy.deepcopy(component.detach(), memo) for component in tensor.components)
        state = tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        duplicate = rebuild(type(tensor), components, *state, copy.deepcopy(_attributes(tensor), memo))
        if tensor.grad is not None:
            duplicate.grad = copy.deepcopy(tensor.grad, memo)
        memo[id(tensor)] = duplicate
    result: DTensor = memo[id(tensor)]
    return result


def _attributes(tensor: DTensor) -> dict[str, Any]:
    """Return the attributes that the program, or ``nn.Parameter``, has set on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in DTensor.__annotations__}


SAFE_GLOBALS = (rebuild, layout_of_parts, mesh_of_bytes, Partial, Replicate, Shard, _StridedShard)
"""Names that files of tensors, layouts and meshes refer to, beside the tensor classes; all are safe to load."""
