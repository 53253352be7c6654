"""Dispatch of operators on DTensors: find the plan of a call by its key, or make one, and run it.

::

    torch.add(a, b)  ->  DTensor.__torch_dispatch__  ->  dispatch
                                                           |  key: operator, specs of DTensors, other arguments
                                              known key    |    new key
                                   +-----------------------+------------------------+
                                   |                                                | 1. composite, unless it declines
                                   v                                                | 2. rule, if there is one that fits
                               plan.run  <------------------- _PLANS[key] = plan <--+ 3. replication

The first run of a kind of call chooses layouts, which is slow; all later runs cost a look-up. So a plan may depend only
on the key. For a float the key has the type, and whether the float is zero or not finite. So a learning rate that
changes at every step makes no new plans, and rules must not read the number.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators import plans, rules
from dtckpt.dtensor.operators.call import (
    Call,
    Operator,
    UnknownResultError,
    functional_of,
    raise_versions,
    replace_tensors,
    signature_of,
    tensors_in,
)
from dtckpt.dtensor.operators.mesh_groups import run_groups, split_by_mesh
from dtckpt.dtensor.operators.operands import common_mesh, to_replicated
from dtckpt.dtensor.operators.pending_passes import exact_rule
from dtckpt.dtensor.operators.plain_tensors import to_dtensors
from dtckpt.dtensor.operators.plans import LazyBitsPlan
from dtckpt.dtensor.operators.registry import BY_INDEX, COMPOSITES, PLANNERS, builder_of
from dtckpt.dtensor.operators.strategy import choose_layouts
from dtckpt.dtensor.tensor import DTensor, spec_of
from dtckpt.errors import ClientFailedError, DtckptError, OperatorError, capped
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import execute

assert rules  # noqa: S101  (importing them fills the table)

_LOG = logging.getLogger("dtckpt.dtensor.operators")

_BOUND = 1 << 14
"""Largest number of plans; then all are forgotten."""

_ZERO = object()
_INFINITE = object()
"""Marks in keys, after the type of a float: it is zero, or not finite."""

_PLANS: dict[tuple[Any, ...], plans.Plan] = {}

COUNTS: Counter[tuple[Operator, str]] = Counter()
"""First calls by operator and route; `counts` adds the calls that reused a plan, which the plans count themselves."""


def dispatch(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator, at least one of whose arguments is a DTensor.

    Collective: Over the mesh's clients, unless operands and results keep their layouts.

    Args:
        func: The operator.
        args: Positional arguments.
        kwargs: Arguments by name.

    Raises:
        MeshMismatchError: DTensors are on different meshes; in lists, the DTensors at one index.
        LayoutError: An operator would change the shape of a tensor it writes to.
        ReplicaMismatchError: A plain tensor beside DTensors differs between clients.
        OperatorError: ``make_fx`` records operators.
    """
    if torch_private.is_recording():
        raise OperatorError(
            f"operator {func}: got a DTensor while make_fx records operators, as for torch.func.linearize, expected "
            "plain tensors: the graph would keep components as constants; torch.func.jvp takes DTensors"
        )
    if signature_of(func).is_view and _is_of_other_mode(args[0]):
        # A view has the version counter of its source. Tensors that are made in inference mode have none.
        with torch.inference_mode(mode=not torch.is_inference_mode_enabled()), torch.no_grad():
            return dispatch(func, args, kwargs)
    key: list[Any] = [id(func)]  # Operators live as long as the process, and an int hashes faster.
    tensors: list[DTensor] = []
    is_plain = _add_to_key(args, key, tensors)
    for name, value in kwargs.items():
        key.append(name)
        is_plain |= _add_to_key((value,), key, tensors)
    if is_plain:
        return _run_with_plain_tensors(func, args, kwargs)
    plan_key = tuple(key)
    plan = _PLANS.get(plan_key)
    try:
        if plan is None:
            return _plan_and_run(plan_key, func, args, kwargs, tensors)
        plan.calls += 1
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("operator %s runs by %s, as before, on %s", func, plan.route, _Texts(tensors))
        return plan.run(args, kwargs, tensors)
    except Exception as error:
        report_failure(error, f"operator {func}", tensors[0].device_mesh)
        raise


def _is_of_other_mode(value: Any) -> bool:
    """Whether a value is a tensor that was made in inference mode while that is off, or outside while it is on."""
    return isinstance(value, torch.Tensor) and value.is_inference() != torch.is_inference_mode_enabled()


class _Texts:
    """Shapes and placements of DTensors, as text that is made only if it is shown."""

    def __init__(self, tensors: Sequence[DTensor]) -> None:
        self._tensors = tensors

    def __str__(self) -> str:
        return capped(f"{tuple(tensor.shape)} {_text_of(tensor._layout)}" for tensor in self._tensors)


def _text_of(layout: Layout | None) -> str:
    return "as it is" if layout is None else f"[{', '.join(map(str, layout.placements))}]"


def report_failure(error: Exception, what: str, mesh: Mesh) -> None:
    """Report an error to the other clients, which may not have it, such as an index out of range on one client alone.

    Without the report they would wait in their next exchange until a timeout.

    Blocks: As `redistribution.execute.report_error`.

    Args:
        error: The error; ignored if it is an error of this library, or was reported before.
        what: Name of the failed call, for the message.
        mesh: The mesh whose clients get the report.
    """
    # All clients raise errors of this library, or report them where they raise them.
    if isinstance(error, DtckptError) or hasattr(error, "is_told"):
        return
    error.is_told = True  # type: ignore[attr-defined]  # The operators that called this one must not report it again.
    failure = ClientFailedError(f"{what}: {type(error).__name__}: {error}")
    with suppress(DtckptError, RuntimeError):  # The other clients may be gone: the error itself matters more.
        execute.report_error(failure, [mesh])


def _add_to_key(values: Sequence[Any], key: list[Any], tensors: list[DTensor]) -> bool:
    """Add to the key all inputs of a plan, and collect the DTensors; return whether there is a plain tensor."""
    is_plain = False
    for value in values:
        if isinstance(value, DTensor):
            if value._view is not None or value._pending is not None:
                _ = value.components  # Refreshes a tracked view, and finishes a pending redistribution.
            key.append(value._spec or spec_of(value))
            tensors.append(value)
        elif isinstance(value, float | complex):
            key.append(type(value))
            if not value:
                key.append(_ZERO)
            # Infinity less itself is NaN, as is NaN less itself, and NaN counts as true; of any finite number it is
            # zero.
            elif value - value:
                key.append(_INFINITE)
        elif isinstance(value, list | tuple):
            # The length keeps ([a], b) and ([a, b]) apart.
            key.append(len(value))
            is_plain |= _add_to_key(value, key, tensors)
        elif isinstance(value, torch.Tensor):
            is_plain = True
        else:
            key.append(value)
    return is_plain


def _run_with_plain_tensors(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator with plain tensors beside DTensors: they count as replicated."""
    if func in BY_INDEX and (groups := split_by_mesh(args, kwargs)):
        return run_groups(func, groups, dispatch)
    tensors = list(tensors_in((*args, *kwargs.values())))
    mesh = common_mesh(f"operator {func}", [tensor for tensor in tensors if isinstance(tensor, DTensor)])
    call, signature = Call(func, tuple(args), kwargs), signature_of(func)
    written = list(tensors_in([call[name] for name in signature.written]))
    # The operator only writes to an ``out`` argument, unless that is an operand too.
    is_out = bool(written) and signature.written[0] != signature.names[0]
    operands = list(tensors_in([call[name] for name in signature.names if name not in signature.written]))
    unread = [one for one in written if is_out and not any(one is operand for operand in operands)]
    if func is torch.ops.aten.is_same_size.default:
        unread = tensors
    dtensors = to_dtensors(tensors, mesh, unread)
    result = dispatch(func, *replace_tensors(args, kwargs, dtensors))
    raise_versions(func, [one for one in written if not isinstance(one, DTensor)])
    for tensor, dtensor in zip(tensors, dtensors, strict=True):
        if not isinstance(tensor, DTensor) and any(tensor is one for one in written) and dtensor.components:
            tensor.resize_(dtensor.shape).copy_(to_replicated([dtensor])[0].components[0])
    return result


def _plan_and_run(
    key: tuple[Any, ...], func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]
) -> Any:
    """Make a plan for a call that has none, run it, and keep it: a plan that fails is not kept."""
    if func in BY_INDEX and (groups := split_by_mesh(args, kwargs)):
        return run_groups(func, groups, dispatch)
    common_mesh(f"operator {func}", tensors)
    call = Call(func, tuple(args), kwargs)
    function = COMPOSITES.get(func) or _decomposition_of(func)
    plan: plans.Plan | None = None
    if function is not None and func not in PLANNERS:
        plan = plans.CompositePlan(func, function)
        result = plan.run(args, kwargs, tensors)
        if result is NotImplemented:
            plan = None
    if plan is None:
        plan = plan_of(call)
        if any(tensor.is_complex() for tensor in tensors):
            plan = LazyBitsPlan(plan)
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("operator %s will run by %s on %s", func, plan.route, _Texts(tensors))
        result = plan.run(args, kwargs, tensors)
    COUNTS[func, plan.route] += 1
    if plan.route == "replication" and COUNTS[func, plan.route] == 1:
        _LOG.info("operator %s has no rule for such operands: every device computes all of it", func)
    # Programs without repeated shapes would fill the memory with plans.
    if len(_PLANS) >= _BOUND:
        clear_plans()
    _PLANS[key] = plan
    return result


def _decomposition_of(func: Operator) -> Any:
    """Return PyTorch's own decomposition of an operator; None if it has none, or has a rule here.

    Outside inference mode autograd decomposes such operators, and they do not come here.
    """
    return func.decompose if _has_decomposition(func) and builder_of(func) is None else None


@cache  # bounded by the number of operators
def _has_decomposition(func: Operator) -> bool:
    has_kernel: bool = torch_private.has_kernel(func.name(), "CompositeImplicitAutograd")
    return has_kernel


def plan_of(call: Call) -> plans.Plan:
    """Return the plan of a call that no composite accepts: by a planner, a rule, or replication."""
    func = call.func
    if func in PLANNERS:
        planned: plans.Plan = PLANNERS[func](call)
        return planned
    signature = signature_of(func)
    functional = functional_of(func) if signature.written else None
    if signature.is_inplace_view and functional is not None:
        return plans.InplaceViewPlan(call, functional)
    is_in_place = bool(signature.written) and signature.written[0] == signature.names[0]
    # A rule chooses the layout of its result; an ``out`` tensor has one. `WriteResultPlan` moves the result there.
    builder = None if signature.written and not is_in_place else builder_of(func)
    if builder is None and functional is not None and is_in_place:
        builder = builder_of(functional)
    rule = None
    with suppress(UnknownResultError):
        rule = builder(call) if builder is not None else None
    if rule is not None:
        rule = exact_rule(rule, call)
        nbytes = [tensor.numel() * tensor.element_size() for tensor in call.tensors]
        shapes = (rule.shape(number) for number in range(len(rule.results)))
        # The dtypes of results are not known here: take the dtype of the widest operand.
        result_nbytes = sum(torch.Size(shape).numel() for shape in shapes) * max(t.element_size() for t in call.tensors)
        layouts = [tensor._layout for tensor in call.tensors]
        choice = choose_layouts(rule, layouts, nbytes, result_nbytes, is_in_place=is_in_place)
        if choice is not None and _LOG.isEnabledFor(logging.DEBUG):
            moves, results = map(_text_of, choice.operands), map(_text_of, choice.results)
            _LOG.debug("operator %s: chose operands %s, results %s", func, capped(moves), capped(results))
        if choice is not None and not (is_in_place and rule.shape(0) != tuple(call.tensors[0].shape)):
            return plans.RulePlan(call, rule, choice)
    if functional is not None:
        return plans.WriteResultPlan(call, functional)
    return plans.ReplicationPlan(call)


def counts() -> Counter[tuple[Operator, str]]:
    """Return how often each operator ran by each route, since `clear_counts`."""
    for plan in _PLANS.values():
        if plan.calls:
            COUNTS[plan.func, plan.route] += plan.calls
            plan.calls = 0
    return COUNTS


def clear_plans() -> None:
    """Forget all plans."""
    counts()
    _PLANS.clear()


def clear_counts() -> None:
    """Set all counts to zero."""
    counts()
    COUNTS.clear()


def clear() -> None:
    """Forget all plans and counts."""
    clear_plans()
    clear_counts()


DTensor._dispatch = staticmethod(dispatch)
