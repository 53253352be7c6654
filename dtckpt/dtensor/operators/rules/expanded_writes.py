"""Writes to expanded tensors, of whose elements several are one in memory: ``fill_``, ``masked_fill_``, index writes.

PyTorch writes to the memory element by element, with a deprecation warning for some of these operators, and refuses
all others. So every device does the same to the whole, and keeps its component.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtckpt.dtensor.operators import view_tracking
from dtckpt.dtensor.operators.call import Operator, replace_tensors, tensors_in
from dtckpt.dtensor.operators.operands import to_replicated, write_into
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def _write_of(func: Operator) -> Callable[..., Any]:
    """Return the composite of an operator that writes to its first argument; it declines one that is not expanded."""

    def write(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        memory = view_tracking.without_repeats(tensor)
        if memory is tensor:
            return NotImplemented
        view_tracking.validate_write(tensor, func, list(tensors_in(args)))
        # Bound: each device holds all of the memory meanwhile.
        (whole,) = to_replicated([memory], is_copied=True)
        others = to_replicated(list(tensors_in((*args, *kwargs.values()))))
        for number, component in enumerate(whole.components):
            local = replace_tensors(args, kwargs, [other.components[number] for other in others])
            func(component.expand(tensor.shape), *local[0], **local[1])
        write_into(whole, memory)
        if tensor._view is not None:
            view_tracking.write_through(tensor)
        view_tracking.count_write(tensor)
        return tensor

    write.__doc__ = "To an expanded tensor: every device writes to the whole, as PyTorch does to shared memory."
    return write


for _operator in (
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
):
    composite(_operator)(_write_of(_operator))
