"""Operators on lists of tensors, as optimizers use them: one plan and one call on each device for a whole list.

What stands at one index of the lists lies as the first list's tensor does; nothing else has to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, signature_of, tensors_in
from dtckpt.dtensor.operators.operands import replicated_layout, to_layouts, unshare, write_into
from dtckpt.dtensor.operators.plans import finish_write, results_without_devices, run_on_meta
from dtckpt.dtensor.operators.registry import PLANNERS, builder_of
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import pointwise
from dtckpt.dtensor.operators.strategy import Choice, choose_layouts
from dtckpt.dtensor.operators.tensor_spec import global_stride, intern_spec, wrap_components
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import Layout

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Row:
    """What stands at one index of the lists: where among all tensors of the call, and what is to become of it."""

    places: tuple[int, ...]
    choice: Choice
    shape: tuple[int, ...]


class ForeachPlan:
    """Bring the tensors of each index together, call the operator once on each device, write back what had to move."""

    route = "rule"
    func: Operator
    calls = 0

    def __init__(self, call: Call) -> None:
        signature = signature_of(call.func)
        self.func = call.func
        self._is_in_place = bool(signature.written)
        self._mesh = call.tensors[0].device_mesh
        self._columns = tuple(_rows(call, is_in_place=self._is_in_place))
        wanted: list[Layout | None] = [
            None if tensor.layout.is_fully_replicated() else replicated_layout(self._mesh, tensor.ndim)
            for tensor in call.tensors
        ]
        for column in self._columns:
            for place, layout in zip(column.places, column.choice.operands, strict=True):
                wanted[place] = layout
        self._wanted = tuple(wanted)
        self._moves = any(layout is not None for layout in wanted)
        numbers = iter(range(len(wanted)))
        places = {name: [next(numbers) for _ in tensors_in([call[name]])] for name in _given_names(call)}
        # Gradients are written to if they are unscaled first.
        is_scaled = "grad_scale" not in call or call["grad_scale"] is not None
        names = [name for name in signature.written if is_scaled or name != "grads"]
        self._written = tuple(place for name in names for place in places.get(name, ()))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        for place in self._written:
            unshare(tensors[place])
        moved = to_layouts(tensors, self._wanted) if self._moves else tensors
        parts = [tensor.components for tensor in moved]
        made = []
        for number in range(len(parts[0])):
            local_args, local_kwargs = replace_tensors(args, kwargs, [part[number] for part in parts])
            made.append(self.func(*local_args, **local_kwargs))
        if not self._is_in_place:
            return self._wrapped(made, args, kwargs, tensors)
        for place in self._written:
            if moved[place] is not tensors[place]:
                write_into(moved[place], tensors[place])
            finish_write(tensors[place])
        return None

    def _wrapped(
        self, made: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]
    ) -> list[DTensor]:
        if not made:
            layouts = [column.choice.results[0] for column in self._columns]
            return list(results_without_devices(self.func, args, kwargs, tensors, layouts))
        results = []
        for number, column in enumerate(self._columns):
            components = [one[number] for one in made]
            stride = global_stride(components[0], column.shape)
            results.append(
                wrap_components(
                    components, intern_spec(column.choice.results[0], column.shape, stride, components[0].dtype)
                )
            )
        return results


def _given_names(call: Call) -> tuple[str, ...]:
    """Return the names of arguments in the order in which they were passed."""
    return (*signature_of(call.func).names[: len(call.args)], *call.kwargs)


def _rows(call: Call, *, is_in_place: bool) -> list[_Row]:
    """Return what stands at each index of those arguments that are lists of tensors."""
    place = 0
    lists: list[list[int]] = []
    for name in _given_names(call):
        count = len(list(tensors_in([call[name]])))
        if isinstance(call[name], list | tuple) and count:
            lists.append(list(range(place, place + count)))
        place += count
    found = []
    for places in zip(*lists, strict=True):
        tensors = [call.tensors[one] for one in places]
        rule = _rule_of(call, tensors)
        if rule is None or (is_in_place and rule.shape(0) != tuple(tensors[0].shape)):
            run_on_meta(call.func, call.args, call.kwargs, call.tensors)  # which says what is wrong
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise RuntimeError(f"{call.func}: tensors of shapes {shapes} stand at one index, and cannot be broadcast")
        choice = _choose_layouts(rule.exact_for(call, tensors), tensors, is_in_place=is_in_place)
        found.append(_Row(tuple(places), choice, rule.shape(0)))
    return found


def _choose_layouts(rule: Rule, tensors: Sequence[DTensor], *, is_in_place: bool) -> Choice:
    layouts = [tensor._layout for tensor in tensors]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    found = choose_layouts(rule, layouts, sizes, max(sizes), is_in_place=is_in_place)
    if found is not None:
        return found
    whole = [replicated_layout(layouts[0].mesh, tensor.ndim) for tensor in tensors]
    wanted = [None if layout == have else layout for layout, have in zip(whole, layouts, strict=True)]
    return Choice(tuple(wanted), (replicated_layout(layouts[0].mesh, len(rule.shape(0))),))


def _rule_of(call: Call, tensors: Sequence[DTensor]) -> Rule | None:
    """Return the rule of the operator on single tensors, else that of any operator on elements."""
    found = None
    single = _single_tensor_operator(call.func)
    builder = None if single is None else builder_of(single)
    if builder is not None:
        found = builder(Call(single, tuple(tensors), {}))
    if found is None or found.local is not None or len(found.operands) != len(tensors):
        found = pointwise([tuple(tensor.shape) for tensor in tensors])
    return found


def _single_tensor_operator(func: Operator) -> Operator | None:
    """Return the operator on single tensors that does what one does with lists."""
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
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        is_by_index = base.startswith("_foreach_") and base not in _NOT_POINTWISE
        is_step = base.startswith(("_fused_ada", "_fused_sgd"))
        if name.startswith("aten::") and "out" not in overload and (is_by_index or (is_step and base.endswith("_"))):
            PLANNERS[getattr(getattr(_aten, base), overload or "default")] = ForeachPlan


_register()
