"""Lazy conjugation: kernels that conjugate or negate lazily, within ``__torch_dispatch__``.

``tensor.mH`` of a plain complex tensor only sets a bit, which PyTorch resolves before the next kernel. Within
``__torch_dispatch__`` it does not: a kernel that is made of others, as that of ``linalg_pinv``, would compute with the
wrong values. So components, which never have such bits, are computed with under `torch_private.resolve_lazy_bits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators.call import tensors_in
from dtckpt.dtensor.operators.plans import Plan
from dtckpt.dtensor.tensor import DTensor


class LazyBitsPlan:
    """Run another plan, which has complex operands, so that its kernels see conjugate and negative bits."""

    calls = 0

    def __init__(self, plan: Plan) -> None:
        self.func, self.route = plan.func, plan.route
        self._plan = plan

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        with torch_private.resolve_lazy_bits():
            result = self._plan.run(args, kwargs, tensors)
            for tensor in tensors_in([result]):
                # Without this, the bits of a result would be lost in calls that have no complex operand.
                if isinstance(tensor, DTensor) and any(each.is_conj() or each.is_neg() for each in tensor._components):
                    tensor._components = tuple(each.resolve_conj().resolve_neg() for each in tensor._components)
        return result
