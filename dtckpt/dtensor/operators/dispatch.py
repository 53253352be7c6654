"""Operators on DTensors: find the plan of a call, or make it, and run it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from dtckpt.dtensor.operators import plans, rules
from dtckpt.dtensor.operators.call import Call, Operator, functional_of, replace_tensors, signature_of, tensors_in
from dtckpt.dtensor.operators.operands import to_replicated
from dtckpt.dtensor.operators.plain_tensors import to_dtensors
from dtckpt.dtensor.operators.registry import COMPOSITES, PLANNERS, builder_of
from dtckpt.dtensor.operators.rule_builders import UnknownShapeError
from dtckpt.dtensor.operators.strategy import choose_layouts
from dtckpt.dtensor.operators.tensor_spec import spec_of
from dtckpt.dtensor.tensor import DTensor, described
from dtckpt.errors import ClientFailedError, DtckptError, LayoutError, capped
from dtckpt.redistribution import execute

assert rules  # noqa: S101  (importing them fills the table)

_LOG = logging.getLogger("dtckpt.dtensor.operators")

_BOUND = 1 << 14

_ZERO = object()
_INFINITE = object()
"""In keys: the number before is zero, or is not finite, which is all that plans may know of one that is not whole."""

_PLANS: dict[tuple[Any, ...], plans.Plan] = {}

COUNTS: Counter[tuple[Operator, str]] = Counter()
"""Calls by operator and route; those for which there was a plan are added by `counts`."""


def dispatch(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator, at least one of whose arguments is a DTensor.

    Collective: Over the mesh's clients, unless operands and results stay as they lie.

    Raises:
        LayoutError: DTensors are on different meshes, or an operator would change the shape of what it writes to.
        ReplicaMismatchError: A plain tensor beside DTensors differs between clients.
    """
    key: list[Any] = [id(func)]  # operators live as long as the process
    tensors: list[DTensor] = []
    is_plain = _add_to_key(args, key, tensors)
    for name, value in kwargs.items():
        key.append(name)
        is_plain |= _add_to_key((value,), key, tensors)
    if is_plain:
        return _run_with_plain_tensors(func, args, kwargs)
    known = tuple(key)
    plan = _PLANS.get(known)
    try:
        if plan is None:
            return _plan_and_run(known, func, args, kwargs, tensors)
        plan.calls += 1
        return plan.run(args, kwargs, tensors)
    except Exception as error:
        _report_error(error, func, tensors)
        raise


def _report_error(error: Exception, func: Operator, tensors: Sequence[DTensor]) -> None:
    """Tell the other clients of an error that only this one may have, as for one index out of range, once.

    Blocks: As `redistribution.tell`.
    """
    # Errors of ours come of exchanges, so that all clients have them, or are told where they arise.
    if isinstance(error, DtckptError) or hasattr(error, "is_told"):
        return
    error.is_told = True  # type: ignore[attr-defined]  # by the innermost of the operators that this goes through
    failure = ClientFailedError(f"operator {func}: {type(error).__name__}: {error}")
    with suppress(DtckptError, RuntimeError):  # nobody is there to be told
        execute.tell(failure, [tensors[0].device_mesh])


def _add_to_key(values: Sequence[Any], key: list[Any], tensors: list[DTensor]) -> bool:
    """Add to the key what makes a difference to the plan, and collect the DTensors; tell whether one is plain."""
    is_plain = False
    for value in values:
        if isinstance(value, DTensor):
            if value._view is not None or value._pending is not None:
                _ = value.components  # which are there then
            key.append(value._spec or spec_of(value))
            tensors.append(value)
        elif isinstance(value, float | complex):
            key.append(type(value))
            if not value:
                key.append(_ZERO)
            elif value - value:
                key.append(_INFINITE)
        elif isinstance(value, list | tuple):
            key.append(len(value))
            is_plain |= _add_to_key(value, key, tensors)
        elif isinstance(value, torch.Tensor):
            is_plain = True
        else:
            key.append(value)
    return is_plain


def _run_with_plain_tensors(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator with plain tensors beside DTensors: they count as held by every device."""
    found = list(tensors_in((*args, *kwargs.values())))
    mesh = _common_mesh(func, [one for one in found if isinstance(one, DTensor)])
    adopted = to_dtensors(found, mesh)
    made = dispatch(func, *replace_tensors(args, kwargs, adopted))
    written = list(tensors_in([Call(func, tuple(args), kwargs)[name] for name in signature_of(func).written]))
    for plain, ours in zip(found, adopted, strict=True):
        if not isinstance(plain, DTensor) and any(plain is one for one in written) and ours.components:
            plain.resize_(ours.shape).copy_(to_replicated([ours])[0].components[0])
    return made


def _common_mesh(func: Operator, tensors: Sequence[DTensor]) -> Any:
    meshes = {tensor.device_mesh: None for tensor in tensors}
    if len(meshes) > 1:
        layouts = dict.fromkeys(described(tensor.layout) for tensor in tensors)
        error = LayoutError(
            f"operator {func}: got DTensors on different meshes ({capped(layouts)}), expected one mesh; redistribute "
            "moves a DTensor to another mesh"
        )
        for mesh in {mesh.clients: mesh for mesh in meshes}.values():
            if execute.tell(error, [mesh]):
                break
        raise error
    return next(iter(meshes))


def _plan_and_run(
    key: tuple[Any, ...], func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]
) -> Any:
    """Run a call for which there is no plan yet."""
    _common_mesh(func, tensors)
    call = Call(func, tuple(args), kwargs)
    function = COMPOSITES.get(func) or _decomposition_of(func)
    plan: plans.Plan | None = None
    if function is not None and func not in PLANNERS:
        plan = plans.CompositePlan(func, function)
        made = plan.run(args, kwargs, tensors)
        if made is NotImplemented:
            plan = None
    if plan is None:
        plan = plan_of(call)
        made = plan.run(args, kwargs, tensors)
    COUNTS[func, plan.route] += 1
    if plan.route == "replication" and COUNTS[func, plan.route] == 1:
        _LOG.info("operator %s has no rule for such operands: every device computes all of it", func)
    if len(_PLANS) >= _BOUND:
        clear_plans()
    _PLANS[key] = plan
    return made


def _decomposition_of(func: Operator) -> Any:
    """Return what makes others of an operator that comes undone only in inference mode, unless it has a rule."""
    key = "CompositeImplicitAutograd"
    is_made = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return func.decompose if is_made and builder_of(func) is None else None


def plan_of(call: Call) -> plans.Plan:
    """Return what to do for a call that no composite does."""
    func = call.func
    if func in PLANNERS:
        planned: plans.Plan = PLANNERS[func](call)
        return planned
    signature = signature_of(func)
    functional = functional_of(func) if signature.written else None
    if torch.Tag.inplace_view in func.tags and functional is not None:
        return plans.InplaceViewPlan(call, functional)
    is_in_place = bool(signature.written) and signature.written[0] == signature.names[0]
    # What is written to ``out`` must reach it, wherever the rule would have it.
    builder = None if signature.written and not is_in_place else builder_of(func)
    if builder is None and functional is not None and is_in_place:
        builder = builder_of(functional)
    found = None
    with suppress(UnknownShapeError):
        found = builder(call) if builder is not None else None
    if found is not None:
        found = found.exact_for(call, call.tensors)
        sizes = [tensor.numel() * tensor.element_size() for tensor in call.tensors]
        shapes = (found.shape(number) for number in range(len(found.results)))
        made = sum(torch.Size(shape).numel() for shape in shapes) * max(t.element_size() for t in call.tensors)
        choice = choose_layouts(found, plans.layouts_of(call.tensors), sizes, made, is_fixed=is_in_place)
        if choice is not None and not _changes_shape(call, found, is_in_place):
            return plans.RulePlan(call, found, choice)
    if functional is not None:
        return plans.WriteResultPlan(call, functional)
    return plans.ReplicationPlan(call)


def _changes_shape(call: Call, found: Any, is_in_place: bool) -> bool:
    """Whether an operator in place has a result of another shape than its operand's."""
    return is_in_place and found.shape(0) != tuple(call.tensors[0].shape)


def counts() -> Counter[tuple[Operator, str]]:
    """Return how often each operator ran by each route."""
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
    """Forget how often operators ran by which route."""
    counts()
    COUNTS.clear()


def clear() -> None:
    """Forget all plans and counts."""
    clear_plans()
    clear_counts()


DTensor._dispatch = staticmethod(dispatch)
