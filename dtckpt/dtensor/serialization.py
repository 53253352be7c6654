"""DTensors that are copied and pickled: what `torch.save` writes, and `torch.load` takes with ``weights_only=True``."""

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
    """Return what `pickle` and `copy.copy` rebuild a tensor from. Hooks and gradient are left out, as PyTorch does."""
    warn_if_has_hooks(tensor)
    facts = tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return rebuild, (type(tensor), tensor.components, *facts, _attributes(tensor))


def rebuild(  # noqa: PLR0917  (pickle passes positions)
    kind: type[DTensor],
    components: tuple[torch.Tensor, ...],
    layout: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> DTensor:
    """Return the tensor that `reduce` took apart; a leaf."""
    tensor = DTensor.__new__(kind, components, layout, shape, dtype)
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)
    return tensor


def deepcopy(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """Return a copy with memory of its own, gradient included; memory that components share is shared again.

    Raises:
        OperatorError: The tensor was computed.
    """
    if not tensor.is_leaf:
        raise OperatorError("copy.deepcopy copies leaves only; got a DTensor that was computed; detach or clone it")
    if id(tensor) not in memo:
        components = tuple(copy.deepcopy(component.detach(), memo) for component in tensor.components)
        facts = tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        made = rebuild(type(tensor), components, *facts, copy.deepcopy(_attributes(tensor), memo))
        if tensor.grad is not None:
            made.grad = copy.deepcopy(tensor.grad, memo)
        memo[id(tensor)] = made
    known: DTensor = memo[id(tensor)]
    return known


def _attributes(tensor: DTensor) -> dict[str, Any]:
    """Return what the program, or ``nn.Parameter``, has noted on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in DTensor.__annotations__}


SAFE_GLOBALS = (rebuild, layout_of_parts, mesh_of_bytes, Partial, Replicate, Shard, _StridedShard)
"""What files of tensors, layouts and meshes name, the classes of tensors apart; none of it runs what a file says."""
