"""Pending values: which reductions may stay pending through a call, given its dtypes and numbers.

A rule's `Passes` hold for exact numbers. But dtypes round, wrap around and overflow. So a reduction may pass a call
only if devices may compute terms in the operands' dtypes, and reduce them in the results' dtypes::

    reduction           from and to                                            may pass
    any                 one dtype, and the operator only moves elements        yes
    any but ``avg``     one dtype of integers                                  yes: they wrap around in the end, too
    ``max``, ``min``    dtypes between which a conversion keeps the order      yes: it may round
    ``sum`` and others  floats to a dtype that has all of their values         yes
    ``sum`` and others  floats to a dtype that rounds them                     no: terms cancel, roundings do not
    ``sum`` and others  floats to integers                                     no: 0.5 + 0.5 would become 0
    ``sum`` and others  integers to another dtype                              no: their sum wraps around before

`exact_rule` is the one place that decides; rules declare passes and do not look at dtypes, unless their operator rounds
integers itself, as ``avg_pool2d`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from dtckpt.dtensor.operators.call import Call, UnknownResultError, signature_of, tensors_in
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError
from dtckpt.layout.placement import BITWISE_OPS, REDUCE_OPS
from dtckpt.redistribution.exchange import validate_reduction
from dtckpt.redistribution.exchange_plan import reduction_kind


def exact_rule(
    rule: Rule, call: Call, tensors: Sequence[DTensor] | None = None, dtypes: Sequence[torch.dtype] | None = None
) -> Rule:
    """Return a rule without the passes, and without the contractions, that would change the values of a call.

    Args:
        rule: The rule.
        call: The call.
        tensors: The rule's operands; by default the call's tensors.
        dtypes: Dtypes of the rule's results; default: the dtypes that the operator gives on meta tensors.
    """
    # A term that is added once is zero elsewhere. Zero times infinity is NaN, and so is a sum of unlike infinities.
    if rule.counted_once and not call.keeps_zeros:
        return replace(rule, contracted={}, passes={})
    operands = call.tensors if tensors is None else tensors
    pending = [frozenset(tensor._layout.partial.values()) for tensor in operands]
    if not rule.passes or not any(pending):
        return rule
    is_move = rule.passes.keys() >= set(REDUCE_OPS)
    dtypes = result_dtypes(call) if dtypes is None else dtypes
    # Terms of a finite sum may be zero, or cancel each other; times infinity they are NaN, and the sum is not.
    if dtypes is None or not (is_move or call.keeps_zeros):
        return replace(rule, passes={})

    def passes(reduce_op: str, operand: int) -> bool:
        source = operands[operand].dtype
        if operand in rule.shape_only_operands:
            return True
        if reduce_op in pending[operand]:
            return all(_commutes(reduce_op, source, dtype, is_move) for dtype in dtypes)
        # The operand becomes pending. All terms of an average are its value: their sum may be beyond the dtype.
        return reduce_op != "avg" and (reduce_op not in BITWISE_OPS or not _is_inexact(source))

    exact = {
        reduce_op: tuple(group for group in groups if all(passes(reduce_op, operand) for operand in group))
        for reduce_op, groups in rule.passes.items()
    }
    # An average of integers is rounded: a sum that is pending within it must be reduced before.
    if not exact.get("avg") and any(
        "avg" in ops and not _is_inexact(operands[n].dtype) for n, ops in enumerate(pending)
    ):
        exact.pop("sum", None)
    return replace(rule, passes=exact)


def result_dtypes(call: Call) -> list[torch.dtype] | None:
    """Return the dtypes of a call's results; None if the kernel for meta tensors is missing, or refuses the call."""
    if written := signature_of(call.func).written:
        return [tensor.dtype for tensor in tensors_in([call[name] for name in written])]
    try:
        return [result.dtype for result in call.meta_results]
    except (UnknownResultError, RuntimeError):  # If PyTorch really refuses the call, it also refuses components.
        return None


@cache  # bounded by the numbers of reductions and dtypes
def can_reduce(reduce_op: str, dtype: torch.dtype) -> bool:
    """Whether terms of a dtype can be reduced."""
    try:
        validate_reduction(reduction_kind(reduce_op), dtype, 2 if reduce_op == "avg" else 1)
    except LayoutError:
        return False
    return True


@cache  # bounded, as above
def _commutes(reduce_op: str, source: torch.dtype, target: torch.dtype, is_move: bool) -> bool:
    """Tell whether an operator's results on terms reduce to its result on the reduced value.

    Args:
        reduce_op: The reduction, with which the operator commutes but for dtypes.
        source: Dtype of a pending operand.
        target: Dtype of a result.
        is_move: Whether the operator only moves elements, or converts them.
    """
    if source == target:
        return is_move or reduce_op != "avg" or _is_inexact(source)  # An average of integers is rounded.
    if not can_reduce(reduce_op, target):
        return False
    if reduce_op in ("max", "min"):
        are_floats = source.is_floating_point and target.is_floating_point
        return are_floats or (can_reduce(reduce_op, source) and _has_all_of(target, source))
    if source.is_complex and not target.is_complex and reduce_op != "product":
        source = source.to_real()  # The real part of a sum is the sum of real parts.
    return _is_inexact(source) and _has_all_of(target, source)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _has_all_of(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether one dtype has all values of another, or, for integers as floats, rounds them in their order."""
    # PyTorch promotes no 8-bit floats; they have few digits, and but for one dtype a narrow range.
    if other.is_floating_point and other.itemsize == 1:
        return other != torch.float8_e8m0fnu or dtype not in (torch.float16, torch.complex32)
    return torch.promote_types(dtype, other) == dtype
