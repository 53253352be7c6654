"""Redistribute DTensors: bring them into other layouts. Differentiable.

`dtckpt.redistribution.execute` moves components and knows no DTensors. This module adds the checks of arguments,
conversions of dtype, and gradients.

Gradients follow the values: the gradient of a sharded tensor is sharded in the same way, and the gradient of a
replicated tensor is replicated. The gradient of a Partial tensor is replicated: each term adds to the tensor, so the
gradient of each term is the tensor's whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.comm.host_memory import detached_clone
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.derived_layouts import gradient_layout
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import DtckptError, LayoutTypeError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import validate_reductions
from dtckpt.redistribution.execute import (
    RedistributionPlan,
    count_local_call,
    plan_redistribution,
    redistribute_components,
    report_error,
    resolve_match,
)


@dataclass(frozen=True, slots=True)
class _Request:
    """How to redistribute some tensors.

    Args:
        plans: One per tensor.
        layouts: The requested layouts. The layouts of the plans may be on equal meshes that know other names.
        backward_dtype: The dtype to convert gradients to before they are moved back; default each tensor's own.
        is_async: Whether to return while the last exchange is in progress.
    """

    plans: tuple[RedistributionPlan, ...]
    layouts: tuple[Layout, ...]
    backward_dtype: torch.dtype | None = None
    is_async: bool = False


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _Request, *tensors: DTensor) -> tuple[DTensor, ...]:
        # Else torch would make zeros for unused results, and these would have to be moved.
        ctx.set_materialize_grads(False)
        ctx.sources = [(tensor.layout, tensor.dtype) for tensor in tensors]
        ctx.backward_dtype = request.backward_dtype
        results = _redistribute_values(request, tensors)
        fixed = [result for result, tensor in zip(results, tensors, strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        # Unused results have no gradient; the gradients of the others go back together.
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        sources = [gradient for gradient in gradients if gradient is not None]
        layouts = tuple(gradient_layout(ctx.sources[number][0]) for number in used)
        plans = tuple(
            plan_redistribution(gradient.layout, layout, gradient.shape, ctx.backward_dtype or ctx.sources[number][1])
            for number, gradient, layout in zip(used, sources, layouts, strict=True)
        )
        results: list[torch.Tensor | None] = [None] * len(gradients)
        for number, moved in zip(used, _apply(_Request(plans, layouts), sources), strict=True):
            dtype = ctx.sources[number][1]
            results[number] = moved if moved.dtype == dtype else moved.to(dtype)
        return None, *results


def _apply(request: _Request, tensors: Sequence[DTensor]) -> tuple[DTensor, ...]:
    results: tuple[DTensor, ...] = _Redistribute.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        request, *tensors
    )
    return results


def _redistribute_values(request: _Request, tensors: Sequence[DTensor]) -> tuple[DTensor, ...]:
    """Return tensors in other layouts, without gradients."""
    sources = []
    for tensor, plan in zip(tensors, request.plans, strict=True):
        dtype, mesh, components = plan.change.dtype, tensor.device_mesh, tensor.components
        if dtype != tensor.dtype:
            components = tuple(part.to(dtype) for part in components)
        if mesh.device_type == "cuda" and tensor.is_cpu:  # by ``cpu()``; messages are exchanged between the GPUs
            names = mesh.local_devices()
            components = tuple(part.to(device_of(name)) for part, name in zip(components, names, strict=True))
        sources.append(dict(zip(mesh.local_device_ids(), components, strict=True)))
    running = redistribute_components(request.plans, sources, is_async=request.is_async)
    results = []
    for plan, layout, outputs, source in zip(request.plans, request.layouts, running.components, sources, strict=True):
        # An output that is an old component is copied: a write to the result must not reach the source.
        old = set(map(id, source.values()))
        ordered = [
            detached_clone(outputs[device]) if id(outputs[device]) in old else outputs[device]
            for device in layout.mesh.local_device_ids()
        ]
        results.append(DTensor(ordered, layout, plan.change.shape, plan.change.dtype))
        if request.is_async:
            # The first use of any of the results completes them all.
            results[-1]._pending, results[-1]._is_async = running, True
    return tuple(results)


def redistribute(
    tensor: DTensor,
    layout: Layout,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    is_async: bool = False,
    is_counted: bool = False,
) -> DTensor:
    """Return the tensor in another layout, on the same mesh or on another. Differentiable.

    Collective: Over the clients of both meshes, unless the layouts are equal or every client holds the whole tensor.

    Args:
        tensor: The tensor.
        layout: Its new layout; a MATCH spec keeps the present one.
        forward_dtype: Convert to this dtype before moving.
        backward_dtype: Convert the gradient to this dtype before moving it back; it returns to the tensor's dtype.
        is_async: Return while the last exchange is in progress; the first use of the result waits for it.
        is_counted: Count the call also if it sends nothing, because a caller of this library chose the layout; see
            `dtckpt.redistribution.call_history`.

    Raises:
        LayoutTypeError: ``tensor`` is no DTensor, or ``layout`` no Layout.
        LayoutError: The ranks differ.
    """
    try:
        target, plan = _plan(tensor, layout, forward_dtype, backward_dtype)
    except DtckptError as error:
        # The others may find no error, and would wait for this client's messages. With this report they raise the
        # error.
        report_error(error, meshes_of([tensor, layout]), is_numbered=is_counted)
        raise
    if is_counted and (plan is None or plan.is_local):
        count_local_call([(tensor.layout, target, tensor.shape, tensor.dtype)])
    if plan is None:
        return _without_moving(tensor, target, forward_dtype)
    (result,) = _run(_Request((plan,), (target,), backward_dtype, is_async), (tensor,))
    return result


def redistribute_all(
    tensors: Sequence[DTensor],
    layouts: Sequence[Layout],
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    is_async: bool = False,
    is_counted: bool = False,
) -> list[DTensor]:
    """Return tensors in other layouts. Differentiable. Boxes that go from one client to another share messages.

    Collective: As `redistribute`, with the same tensors in the same order. Arguments and errors: as there.
    """
    try:
        targets_and_plans = [
            _plan(tensor, layout, forward_dtype, backward_dtype)
            for tensor, layout in zip(tensors, layouts, strict=True)
        ]
    except DtckptError as error:
        report_error(error, meshes_of([*tensors, *layouts]), is_numbered=is_counted)
        raise
    if is_counted and tensors and all(plan is None or plan.is_local for _, plan in targets_and_plans):
        count_local_call(
            [
                (tensor.layout, target, tensor.shape, tensor.dtype)
                for tensor, (target, _) in zip(tensors, targets_and_plans, strict=True)
            ]
        )
    results = [
        _without_moving(tensor, target, forward_dtype)
        for tensor, (target, _) in zip(tensors, targets_and_plans, strict=True)
    ]
    moving = [(number, target, plan) for number, (target, plan) in enumerate(targets_and_plans) if plan is not None]
    if moving:
        numbers, targets, plans = zip(*moving, strict=True)
        request = _Request(plans, targets, backward_dtype, is_async)
        for number, moved in zip(numbers, _run(request, [tensors[number] for number in numbers]), strict=True):
            results[number] = moved
    return results


def _plan(
    tensor: DTensor, layout: Layout, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
) -> tuple[Layout, RedistributionPlan | None]:
    """Return the target layout, MATCH specs resolved, and the plan; None if nothing moves."""
    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"redistribute needs a DTensor; got {type(tensor).__name__}")
    if not isinstance(layout, Layout):
        raise LayoutTypeError(f"redistribute needs a Layout; got {type(layout).__name__}")
    for name, one in (("forward_dtype", forward_dtype), ("backward_dtype", backward_dtype)):
        if not isinstance(one, torch.dtype | None):
            raise LayoutTypeError(f"redistribute: got {name} {one!r}, expected a torch.dtype")
    target, dtype = resolve_match(layout, tensor.layout), forward_dtype or tensor.dtype
    validate_reductions(target.partial, dtype)
    # With a backward dtype, a tensor that stays passes through autograd too, which converts its gradient.
    is_done = target == tensor.layout and dtype == tensor.dtype and backward_dtype in (None, tensor.dtype)
    if is_done or tensor.is_meta:
        return target, None
    return target, plan_redistribution(tensor.layout, target, tensor.shape, dtype)


def count_unchanged(tensor: DTensor) -> None:
    """Count a public call that leaves a tensor as it is; see `dtckpt.redistribution.call_history`."""
    if tensor._layout.mesh.num_clients > 1:
        count_local_call([(tensor._layout, tensor._layout, tensor.shape, tensor.dtype)])


def _without_moving(tensor: DTensor, layout: Layout, dtype: torch.dtype | None) -> DTensor:
    """Return the result if no element moves: the tensor itself, or a meta tensor in the layout."""
    return redistribute_meta(tensor, layout, dtype or tensor.dtype) if tensor.is_meta else tensor


def _run(request: _Request, tensors: Sequence[DTensor]) -> tuple[DTensor, ...]:
    # ``apply`` takes time also where it records nothing.
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _apply(request, tensors) if needs_grad else _redistribute_values(request, tensors)


def meshes_of(values: Iterable[object]) -> list[Mesh]:
    """Return the meshes of the DTensors and Layouts among some values."""
    meshes = (value.layout.mesh if isinstance(value, DTensor) else getattr(value, "mesh", None) for value in values)
    return [mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.device_ids]


# --- the meta device: tensors without values, so nothing is sent -------------------------------


def redistribute_meta(tensor: DTensor, layout: Layout, dtype: torch.dtype) -> DTensor:
    """Return a meta tensor in another layout, on the same mesh or another, and in another dtype. Differentiable."""
    result: DTensor = _RedistributeMeta.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        tensor, layout, dtype
    )
    return result


class _RedistributeMeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, layout: Layout, dtype: torch.dtype) -> DTensor:
        ctx.source, ctx.dtype = gradient_layout(tensor.layout), tensor.dtype
        regions = [layout.region(device, tensor.shape) for device in layout.mesh.local_device_ids()]
        components = [torch.empty(region.shape, dtype=dtype, device="meta") for region in regions]
        return DTensor(components, layout, tensor.shape, dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        return redistribute_meta(gradient, ctx.source, ctx.dtype), None, None
