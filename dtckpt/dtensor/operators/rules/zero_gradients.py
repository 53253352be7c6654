"""Operators whose gradient of zeros PyTorch makes from the shape alone, as a plain tensor: ``sgn``, ``copysign``.

A hook on the operand makes a DTensor of it. ``cat`` makes such gradients for empty tensors, and ``repeat`` for a repeat
count of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Operator, replace_tensors, tensors_in
from dtckpt.dtensor.operators.plain_tensors import gradient_to_dtensor
from dtckpt.dtensor.operators.pre_autograd import before_autograd
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten
_KINDS = "Scalar", "Tensor"


@before_autograd(
    _aten.copysign.Tensor,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.nextafter.default,
    _aten.normal.Tensor_Tensor,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.sgn.default,
)
def _with_dtensor_gradients(operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn plain gradients into DTensors on the mesh of the operand."""
    hooked = map(_hooked, tensors_in((*args, *kwargs.values())))
    new_args, new_kwargs = replace_tensors(args, kwargs, list(hooked))
    return operator.redispatch(keys, *new_args, **new_kwargs)


@before_autograd(
    *(getattr(getattr(_aten, f"{name}_"), kind) for name in ("eq", "ge", "gt", "le", "lt", "ne") for kind in _KINDS),
    _aten.copysign_.Scalar,
    _aten.copysign_.Tensor,
    _aten.nextafter_.default,
    _aten.sgn_.default,
)
def _in_place(operator: Operator, keys: Any, tensor: torch.Tensor, *others: Any) -> Any:
    """As `_with_dtensor_gradients`; the written tensor has no alias, so a hook of its node turns its gradient."""
    if isinstance(tensor, DTensor) and tensor.grad_fn is not None and torch.is_grad_enabled():
        mesh = tensor.device_mesh
        tensor.grad_fn.register_prehook(
            lambda gradients: tuple(each if each is None else gradient_to_dtensor(each, mesh) for each in gradients)
        )
    return operator.redispatch(keys, tensor, *map(_hooked, others))


@before_autograd(_aten.cat.default)
def _cat(operator: Operator, keys: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """As `_with_dtensor_gradients`, where there are tensors of shape (0,), which may be joined to any others."""
    if any(not len(tensor) for tensor in tensors if tensor.ndim == 1):
        tensors = list(map(_hooked, tensors))
    return operator.redispatch(keys, tensors, dim)


@before_autograd(_aten.repeat.default)
def _repeat(operator: Operator, keys: Any, tensor: torch.Tensor, repeats: Sequence[int]) -> Any:
    """As `_with_dtensor_gradients`, where the result has no elements."""
    return operator.redispatch(keys, tensor if all(repeats) else _hooked(tensor), repeats)


def _hooked(tensor: Any) -> Any:
    """Return an alias of a DTensor with a hook that makes its gradient a DTensor; anything else as it is."""
    if not (isinstance(tensor, DTensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    mesh = tensor.device_mesh
    alias = tensor.view_as(tensor)
    alias.register_hook(lambda gradient: gradient_to_dtensor(gradient, mesh))  # type: ignore[no-untyped-call]  # as torch left it
    return alias
