"""Foreach operators and fused optimizer steps: ``_foreach_add_``, ``_foreach_norm``, ``_fused_adamw_``.

One plan serves all lists of a call, and each device runs the operator once. The tensors at one index of the lists get
layouts that fit each other, by the rule of the operator on single tensors; those at different indices may differ::

    _foreach_add_([p0, p1], [g0, g1])        row 0 = (p0, g0)    by the rule of add
                                             row 1 = (p1, g1)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators.call import (
    Call,
    Operator,
    raise_versions,
    replace_tensors,
    run_on_meta,
    signature_of,
    tensors_in,
)
from dtckpt.dtensor.operators.composite_helpers import reduce_pending, reduce_pending_all
from dtckpt.dtensor.operators.mesh_groups import run_groups, split_by_index
from dtckpt.dtensor.operators.operands import replicated_layout, to_layouts, to_replicated, unshare, write_into
from dtckpt.dtensor.operators.pending_passes import exact_rule, result_dtypes
from dtckpt.dtensor.operators.plans import (
    Plan,
    finish_write,
    prepare_write,
    results_without_devices,
    strides_of_results,
)
from dtckpt.dtensor.operators.registry import BY_INDEX, PLANNERS, builder_of, composite
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import pointwise
from dtckpt.dtensor.operators.strategy import Choice, choose_layouts
from dtckpt.dtensor.tensor import DTensor, wrap_components
from dtckpt.dtensor.tensor_spec import intern_spec
from dtckpt.layout.layout import UNSHARDED, Layout

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Row:
    """The tensors at one index of all lists.

    Args:
        positions: Their positions among all tensors of the call.
        choice: Layouts of these operands, and of the result.
        shape: Global shape of the result.
    """

    positions: tuple[int, ...]
    choice: Choice
    shape: tuple[int, ...]


class ForeachPlan(Plan):
    """Redistribute the tensors row by row; run the operator once per device; write moved tensors back."""

    route = "rule"
    func: Operator
    calls = 0

    def __init__(self, call: Call) -> None:
        signature = signature_of(call.func)
        self.func = call.func
        self._is_in_place = bool(signature.written)
        self._mesh = call.tensors[0].device_mesh
        self._rows = tuple(_rows(call, is_in_place=self._is_in_place))
        self._strides = [] if self._is_in_place else strides_of_results(call, [row.shape for row in self._rows])
        # Tensors outside the lists, as steps and learning rates, are replicated.
        targets: list[Layout | None] = [
            None if tensor.layout.is_fully_replicated() else replicated_layout(self._mesh, tensor.ndim)
            for tensor in call.tensors
        ]
        for row in self._rows:
            for position, layout in zip(row.positions, row.choice.operands, strict=True):
                targets[position] = layout
        self._targets = tuple(targets)
        self._moves = any(layout is not None for layout in targets)
        numbers = iter(range(len(targets)))
        positions = {name: [next(numbers) for _ in tensors_in([call[name]])] for name in _given_names(call)}
        # A fused step writes to gradients only to unscale them.
        is_scaled = "grad_scale" not in call or call["grad_scale"] is not None
        names = [name for name in signature.written if is_scaled or name != "grads"]
        self._written = tuple(position for name in names for position in positions.get(name, ()))

    @override
    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        # Moved copies, and views with separate memory, would not see each other's writes.
        has_copies = self._moves or any(tensor._view is not None for tensor in tensors)
        if has_copies and len(self._rows) > 1 and self._are_written_twice(tensors):
            run_groups(self.func, split_by_index(args, kwargs), DTensor._dispatch)
            return None
        for position in self._written:
            prepare_write(tensors[position], self.func, tensors)
        moved = to_layouts(tensors, self._targets) if self._moves else tensors
        components = [tensor.components for tensor in moved]
        outputs, error = [], None
        for device in range(len(components[0])):
            local_args, local_kwargs = replace_tensors(args, kwargs, [of_tensor[device] for of_tensor in components])
            try:
                outputs.append(self.func(*local_args, **local_kwargs))
            except RuntimeError as failure:
                # In place, it has written to the tensors before the failing tensor, so all devices must do that.
                if not self._is_in_place:
                    raise
                error = failure
        if not self._is_in_place:
            return self._wrap(outputs, args, kwargs, tensors)
        for position in self._written:
            if moved[position] is not tensors[position]:
                write_into(moved[position], tensors[position])
            finish_write(tensors[position])
        if error is None:
            raise_versions(self.func, [tensors[position] for position in self._written])
            return None
        before = {position for row in self._rows[: self._failing_row(args, kwargs)] for position in row.positions}
        raise_versions(self.func, [tensors[position] for position in self._written if position in before])
        raise error

    def _failing_row(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the first row that PyTorch refuses; the number of rows if only the values tell."""
        for group in split_by_index(args, kwargs):
            tensors = tensors_in((*group.args, *group.kwargs.values()))
            ones = [torch.ones(1, dtype=tensor.dtype) for tensor in tensors]
            try:
                plain_args, plain_kwargs = replace_tensors(group.args, group.kwargs, ones)
                self.func(*plain_args, **plain_kwargs)
            except RuntimeError:
                return group.indices[0]
        return len(self._rows)

    def _are_written_twice(self, tensors: Sequence[DTensor]) -> bool:
        """Whether a tensor that is written to shares values with another tensor of the call, or is another one."""
        memories = [id(tensor if tensor._writes is None else tensor._writes) for tensor in tensors]
        counts = Counter(memories)
        return any(counts[memories[position]] > 1 for position in self._written)

    def _wrap(
        self, outputs: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]
    ) -> list[DTensor]:
        if not outputs:
            layouts = [row.choice.results[0] for row in self._rows]
            return list(results_without_devices(self.func, args, kwargs, tensors, layouts))
        results = []
        for number, (row, stride) in enumerate(zip(self._rows, self._strides, strict=True)):
            components = [output[number] for output in outputs]
            spec = intern_spec(row.choice.results[0], row.shape, stride, components[0].dtype)
            results.append(wrap_components(components, spec))
        return results


def _given_names(call: Call) -> tuple[str, ...]:
    """Return the names of arguments in the order in which they were passed."""
    return (*signature_of(call.func).names[: len(call.args)], *call.kwargs)


def _rows(call: Call, *, is_in_place: bool) -> list[_Row]:
    """Return the rows of the arguments that are lists of tensors."""
    position = 0
    lists: list[list[int]] = []
    for name in _given_names(call):
        count = len(list(tensors_in([call[name]])))
        if isinstance(call[name], list | tuple) and count:
            lists.append(list(range(position, position + count)))
        position += count
    rows: list[_Row] = []
    is_pending = any(tensor._layout.has_partial for tensor in call.tensors)
    dtypes = result_dtypes(call) if is_pending else None
    for positions in zip(*lists, strict=True):
        tensors = [call.tensors[one] for one in positions]
        rule = _rule_of(call, tensors)
        if rule is None or (is_in_place and rule.shape(0) != tuple(tensors[0].shape)):
            run_on_meta(call.func, call.args, call.kwargs, call.tensors)  # PyTorch's own error, if it has one
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise RuntimeError(f"{call.func}: tensors of shapes {shapes} stand at one index, and cannot be broadcast")
        exact = exact_rule(rule, call, tensors, dtypes and [dtypes[len(rows)]])
        choice = _choose_layouts(exact, tensors, is_in_place=is_in_place)
        rows.append(_Row(tuple(positions), choice, rule.shape(0)))
    return rows


def _choose_layouts(rule: Rule, tensors: Sequence[DTensor], *, is_in_place: bool) -> Choice:
    """Return the cheapest layouts for a row; replicate all if no choice keeps the first one's layout in place."""
    layouts = [tensor._layout for tensor in tensors]
    nbytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    choice = choose_layouts(rule, layouts, nbytes, max(nbytes), is_in_place=is_in_place)
    if choice is not None:
        return choice
    replicated = [replicated_layout(layouts[0].mesh, tensor.ndim) for tensor in tensors]
    targets = [None if target == layout else target for target, layout in zip(replicated, layouts, strict=True)]
    return Choice(tuple(targets), (replicated_layout(layouts[0].mesh, len(rule.shape(0))),))


def _rule_of(call: Call, tensors: Sequence[DTensor]) -> Rule | None:
    """Return the rule of the operator on single tensors, or else the rule of a pointwise operator."""
    rule = None
    single = _single_tensor_operator(call.func)
    builder = None if single is None else builder_of(single)
    if builder is not None:
        rule = builder(Call(single, tuple(tensors), {}))
    if rule is None or rule.local is not None or len(rule.operands) != len(tensors):
        rule = pointwise([tuple(tensor.shape) for tensor in tensors])
    return rule


def _single_tensor_operator(func: Operator) -> Operator | None:
    """Return the operator on single tensors for one on lists: ``add`` for ``_foreach_add_``; None if there is none."""
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    if not name.startswith("_foreach_"):
        return None
    packet = getattr(_aten, name.removeprefix("_foreach_").removesuffix("_"), None)
    for other in ({"List": "Tensor", "ScalarList": "Scalar"}.get(overload, overload), "default"):
        if packet is not None and other in packet.overloads():
            return getattr(packet, other)
    return None


_NOT_POINTWISE = {"_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"}


def _register() -> None:
    for name in torch_private.operator_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        is_step = base.startswith(("_fused_ada", "_fused_sgd")) and base.endswith("_")
        if not name.startswith("aten::") or "out" in overload or not (base.startswith("_foreach_") or is_step):
            continue
        operator = getattr(getattr(_aten, base), overload or "default")
        BY_INDEX.add(operator)
        if base not in _NOT_POINTWISE:
            PLANNERS[operator] = ForeachPlan


_register()


# --- reductions of lists ---------------------------------------------------------------------------------------------


BY_INDEX.add(_aten._amp_foreach_non_finite_check_and_unscale_.default)


@composite(_aten._foreach_max.default)
def _foreach_max(tensors: Sequence[Any]) -> list[Any]:
    """One maximum per tensor."""
    return [tensor.max() for tensor in tensors]


@composite(_aten._foreach_norm.Scalar)
def _foreach_norm(tensors: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """Devices compute norms of components; one exchange for all tensors split by the same axes completes them."""
    order = float(ord)
    if order == 0 or order < 0:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    reduced = reduce_pending_all(tensors)
    mesh = reduced[0].device_mesh
    if any(not tensor.is_floating_point() for tensor in reduced):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    by_axes: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, tensor in enumerate(reduced):
        by_axes[tuple(axis for axes in tensor._layout.split_axes for axis in axes)].append(number)
    result: list[Any] = [None] * len(reduced)
    for axes, numbers in by_axes.items():
        terms = []
        for parts in zip(*(reduced[number].components for number in numbers), strict=True):
            norms = _norms(parts, order, dtype)
            # As float64, powers do not overflow where the norm itself fits a float32.
            terms.append(norms if math.isinf(order) else norms**order)
        layout = Layout([UNSHARDED], mesh, dict.fromkeys(axes, "max" if math.isinf(order) else "sum"))
        pending = DTensor(terms, layout, (len(numbers),), torch.float64)
        (total,) = to_layouts([pending], [replicated_layout(mesh, 1)])
        scalars = [one if math.isinf(order) else one ** (1 / order) for one in total.components]
        for position, number in enumerate(numbers):
            result_dtype = dtype or reduced[number].dtype
            components = [one[position].to(result_dtype) for one in scalars]
            device = reduced[number].device  # of a client outside the mesh, whose norms have no components
            result[number] = DTensor(components, replicated_layout(mesh, 0), (), result_dtype, device=device)
    return result


def _norms(components: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the norms of components as a vector of float64; an empty component has norm zero."""
    nonempty = [component for component in components if component.numel()]
    norms = iter(torch_private.foreach_norm(nonempty, order, dtype) if nonempty else ())
    zero = torch.zeros((), dtype=torch.float64, device=components[0].device)
    return torch.stack([next(norms).to(torch.float64) if component.numel() else zero for component in components])


@composite(_aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(gradients: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """An infinity or NaN that one device finds in its components reaches all clients: the flags wait for a maximum."""
    for tensor in gradients:
        unshare(tensor)
    reduced = reduce_pending_all(gradients)
    mesh = found_inf.device_mesh
    (scale,) = to_replicated([inv_scale])
    flags = []
    for device, local_scale in enumerate(scale.components):
        flags.append(torch.zeros(found_inf.shape, dtype=found_inf.dtype, device=local_scale.device))
        components = [tensor.components[device] for tensor in reduced]
        _aten._amp_foreach_non_finite_check_and_unscale_.default(components, flags[-1], local_scale)
    pending = Layout([UNSHARDED] * found_inf.ndim, mesh, dict.fromkeys(mesh.dim_names, "max"))
    flag = DTensor(flags, pending, found_inf.shape, found_inf.dtype, device=found_inf.device)
    found_inf.copy_(torch.maximum(found_inf, reduce_pending(flag)))
    for tensor, unscaled in zip(gradients, reduced, strict=True):
        if unscaled is not tensor:
            write_into(unscaled, tensor)
        finish_write(tensor)
