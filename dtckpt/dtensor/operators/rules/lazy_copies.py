"""Operators that copy the views which PyTorch conjugates or negates lazily: ``resolve_conj``, ``unsafe_split``.

DTensors have no lazy bits: components of ``z.conj()`` are conjugated at once, and follow ``z`` (`view_tracking`). So
the way in which a tracked view was made says whether the plain view would have such a bit.
"""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.pre_autograd import before_autograd
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def _lazy_bits(tensor: DTensor) -> tuple[bool, bool]:
    """Return whether the plain view would be conjugated lazily, and whether it would be negated lazily."""
    view = tensor._view
    if view is None:
        return False, False
    is_conj, is_neg = _lazy_bits(view.source)
    if view.func is _aten._conj.default:
        return not is_conj, is_neg
    if view.func is _aten._neg_view.default:
        return is_conj, not is_neg
    # PyTorch takes the imaginary parts of what is conjugated lazily by a lazy negation.
    of_real = view.source._view
    if view.func is _aten.select.int and of_real is not None and of_real.func is _aten.view_as_real.default:
        call = Call(view.func, view.args, view.kwargs)
        return False, is_conj and call["index"] == 1
    return is_conj, is_neg


@before_autograd(_aten.resolve_conj.default, _aten.resolve_neg.default)
def _resolve(operator: Operator, keys: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy where PyTorch makes one, else the tensor itself."""
    del keys
    if not isinstance(tensor, DTensor):
        return tensor
    is_conj, is_neg = _lazy_bits(tensor)
    return tensor.clone() if (is_conj if operator is _aten.resolve_conj.default else is_neg) else tensor


@before_autograd(_aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default)
def _split(operator: Operator, keys: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Split a copy where PyTorch does; the parts of other tensors share their memory."""
    is_copied = isinstance(tensor, DTensor) and any(_lazy_bits(tensor))
    return operator.redispatch(keys, tensor.clone() if is_copied else tensor, *args, **kwargs)
