"""Operators one of whose gradients is zero, which PyTorch makes of the shape alone, as a plain tensor.

Those of tensors without elements that are joined or repeated are left so: every call would cost some microseconds more.
"""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Operator, replace_tensors, tensors_in
from dtckpt.dtensor.operators.plain_tensors import gradient_to_dtensor
from dtckpt.dtensor.operators.pre_autograd import before_autograd
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@before_autograd(
    _aten.copysign.Tensor,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.nextafter.default,
    _aten.normal.Tensor_Tensor,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.sgn.default,
)
def _with_gradients_adopted(operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Bring plain gradients to the mesh of the tensor that they are the gradient of."""
    given = map(_adopting, tensors_in((*args, *kwargs.values())))
    local_args, local_kwargs = replace_tensors(args, kwargs, list(given))
    return operator.redispatch(keys, *local_args, **local_kwargs)


def _adopting(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which any gradient that is passed back is a DTensor, if the tensor is one."""
    if not (isinstance(tensor, DTensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    mesh = tensor.device_mesh
    alias = tensor.view_as(tensor)
    alias.register_hook(lambda gradient: gradient_to_dtensor(gradient, mesh))  # type: ignore[no-untyped-call]  # as torch left it
    return alias
