"""`register_sharding`: define how an operator may be sharded, by a function of the program.

The function returns rows. A row has placements of the arguments along one mesh axis, and the resulting placements of
the results. For each axis of the mesh the strategy takes the cheapest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators import dispatch, registry
from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, run_on_meta, signature_of, tensors_in
from dtckpt.dtensor.operators.plans import Plan, ReplicationPlan, RulePlan, finish_write, prepare_write
from dtckpt.dtensor.operators.rule import Factors, Rule
from dtckpt.dtensor.operators.strategy import Choice, has_no_empty_piece, move_cost
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, OperatorError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Partial, Placement, Replicate, Shard, _StridedShard, placement_of

Row = tuple[list[Placement | None], list[Placement | None]]
"""Placements of the results, and of the arguments, along one mesh axis; None for a value that is no tensor."""

_BOUND = 64


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """Describes a tensor among the arguments of a sharding function.

    Args:
        shape: Global shape.
        dtype: Dtype of the tensor.
        mesh: Its mesh.
        placements: Its placements, one per mesh axis.
    """

    shape: torch.Size
    dtype: torch.dtype
    mesh: Mesh
    placements: tuple[Placement, ...]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def device_mesh(self) -> Mesh:
        """The mesh, under the name that PyTorch uses too."""
        return self.mesh

    @property
    def tensor_meta(self) -> OperandSpec:
        """This object, which has ``shape`` and ``dtype``, as in PyTorch."""
        return self


Function = Callable[..., Sequence[Row]]


def register_sharding(op: Operator | list[Operator]) -> Callable[[Function], Function]:
    """Return a decorator for a function that defines how operators may be sharded. The function replaces their rules.

    The function takes the arguments of the operator, with an `OperandSpec` in place of each tensor. The result is
    pairs: the placements of the results and the placements of the arguments, along one mesh axis. Each axis of a mesh
    may use any pair. The placements of arguments are in the order of the call, arguments by name last; None, or
    nothing, stands for a value that is no tensor. When the operator runs on a device's pieces of the arguments, the
    result must be that device's piece of the results.

    Each axis takes the cheapest pair that fits. If no pair fits, all tensors are replicated. A pair fits if each shard
    has elements, and tensors that the operator writes to keep their layouts.

    Args:
        op: An operator (``torch.ops.….default``), also a custom one, or several.

    Raises:
        OperatorError: ``op`` is no operator.
        LayoutError: In a call: the pairs do not fit the operator.
    """
    operators = op if isinstance(op, list | tuple) else [op]
    for one in operators:
        if not isinstance(one, torch_private.OpOverload):
            raise OperatorError(f"register_sharding: got {one!r}, expected one such as torch.ops.aten.add.Tensor")

    def register(function: Function) -> Function:
        for one in operators:
            registry.PLANNERS[one] = partial(RegisteredPlan, function=function)
        # Earlier plans would still run the operators by their old rules.
        dispatch.clear_plans()
        return function

    return register


class RegisteredPlan(Plan):
    """Runs an operator as its sharding function defines.

    The function may depend on the values of floats. The keys of the common cache lack these values, so this plan has a
    separate cache, by the floats among the arguments.
    """

    route = "rule"
    calls = 0

    def __init__(self, call: Call, function: Function) -> None:
        self.func = call.func
        self._function = function
        self._plans: dict[tuple[float | complex, ...], Plan] = {}

    @override
    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        floats = tuple(_floats_in((*args, *kwargs.values())))
        plan = self._plans.get(floats)
        if plan is None:
            # A float that changes at every step, as a learning rate does, would make a plan for each.
            if len(self._plans) >= _BOUND:
                self._plans.clear()
            plan = self._plans[floats] = _plan(Call(self.func, tuple(args), kwargs), self._function)
            self.route = plan.route
        return plan.run(args, kwargs, tensors)


def _floats_in(values: Sequence[Any]) -> list[float | complex]:
    floats: list[float | complex] = []
    for value in values:
        if isinstance(value, list | tuple):
            floats += _floats_in(value)
        elif isinstance(value, float | complex):
            floats.append(value)
    return floats


def _plan(call: Call, function: Function) -> Plan:
    tensors = call.tensors
    specs = [OperandSpec(one.shape, one.dtype, one.device_mesh, one.placements) for one in tensors]
    args, kwargs = replace_tensors(call.args, call.kwargs, specs)
    signature = signature_of(call.func)
    output = run_on_meta(call.func, call.args, call.kwargs, tensors)
    results = list(tensors_in([output]))
    ranks = [one.ndim for one in results], [one.ndim for one in tensors]
    rows = [_row(call, pair, ranks) for pair in function(*args, **kwargs)]
    written = [number for number, one in enumerate(tensors) if _is_among(one, call, signature.written)]
    # Last: of equal costs `min` takes the first row, so a row of the program comes before replication.
    rows.append(([Replicate()] * len(results), [Replicate()] * len(tensors)))
    choice = _UnplacedCall(tensors, results, written).choice(rows)
    if choice is None:
        return ReplicationPlan(call)
    factors = Factors()
    dims = tuple(factors.dims(tuple(one.shape)) for one in results)
    return _RowPlan(call, Rule(factors.sizes, (), dims), choice)


class _RowPlan(RulePlan):
    """As `RulePlan`, for any written arguments. Checks that each result has the shape of its device's piece."""

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        for tensor in self._written(args, kwargs):
            prepare_write(tensor, self.func, tensors)
        return super()._run(args, kwargs, tensors)

    def _written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DTensor]:
        call = Call(self.func, tuple(args), kwargs)
        return list(tensors_in([call[name] for name in signature_of(self.func).written]))

    def _after_writing(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        targets = [finish_write(tensor) for tensor in self._written(args, kwargs)]
        returned = len(self._results)
        return tuple(targets[:returned]) if returned > 1 else targets[0] if returned else None

    def _wrap(self, number: int, components: Sequence[torch.Tensor], start: int = 0) -> DTensor:
        layout, shape = self._results[number], self._shapes[number]
        # No other code checks the row. A wrong row would give a DTensor whose pieces do not fit.
        for device, component in zip(layout.mesh.local_device_ids(), components, strict=True):
            expected = layout.region(device, shape).shape
            if tuple(component.shape) != tuple(expected):
                raise LayoutError(
                    f"operator {self.func}: result {number} has shape {tuple(component.shape)} on device {device}, "
                    f"expected {tuple(expected)}, its piece of {shape} in {list(layout.placements)}; register another "
                    "sharding"
                )
        return super()._wrap(number, components, start)


def _is_among(tensor: DTensor, call: Call, names: Sequence[str]) -> bool:
    return any(tensor is one for one in tensors_in([call[name] for name in names]))


def _row(call: Call, pair: Any, ranks: tuple[list[int], list[int]]) -> tuple[list[Placement], list[Placement]]:
    """Return a checked pair: without None, and with dims counted from the front."""
    sides = [[placement_of(one) for one in side if one is not None] for side in pair]
    wrong = [one for side in sides for one in side if not isinstance(one, Placement)]
    if wrong:
        raise LayoutError(f"sharding of {call.func}: got {wrong[0]!r}, expected a placement or None")
    outputs, inputs = sides
    if (len(outputs), len(inputs)) != (len(ranks[0]), len(ranks[1])):
        raise LayoutError(
            f"sharding of {call.func}: got placements for {len(outputs)} results and {len(inputs)} tensors, expected "
            f"{len(ranks[0])} and {len(ranks[1])}"
        )
    counted = [[_counted(call, *one) for one in zip(*both, strict=True)] for both in zip(sides, ranks, strict=True)]
    return counted[0], counted[1]


def _counted(call: Call, placement: Placement, rank: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if not -rank <= placement.dim < rank:
        raise LayoutError(f"sharding of {call.func}: got {placement!r} for a tensor of {rank} dims")
    return Shard(placement.dim % rank)


@dataclass(frozen=True, slots=True)
class _UnplacedCall:
    """An operator call for which to choose layouts.

    Args:
        tensors: The arguments that are tensors.
        results: The results, as meta tensors.
        written: Numbers of the tensors that the operator writes to.
    """

    tensors: Sequence[DTensor]
    results: Sequence[torch.Tensor]
    written: Sequence[int]

    def choice(self, rows: Sequence[tuple[list[Placement], list[Placement]]]) -> Choice | None:
        """Return the cheapest layouts, chosen axis by axis; None if no layouts leave written tensors where they are."""
        mesh = self.tensors[0].device_mesh
        chosen: list[tuple[list[Placement], list[Placement]]] = []
        for axis in range(mesh.ndim):
            fitting = [row for row in rows if self._fits(row, chosen, mesh)]
            if not fitting:
                return None
            # Axis by axis: a search of all combinations would take rows to the power of axes.
            chosen.append(min(fitting, key=lambda row: self._cost(row, axis, mesh.size(axis))))
        operands = [
            Layout.from_placements(mesh, [row[1][number] for row in chosen], tensor.ndim)
            for number, tensor in enumerate(self.tensors)
        ]
        results = [
            Layout.from_placements(mesh, [row[0][number] for row in chosen], result.ndim)
            for number, result in enumerate(self.results)
        ]
        if any(operands[number] != self.tensors[number].layout for number in self.written):
            return None
        moved = [
            None if layout == tensor.layout else layout for layout, tensor in zip(operands, self.tensors, strict=True)
        ]
        return Choice(tuple(moved), tuple(results))

    def _fits(self, row: Any, chosen: Sequence[Any], mesh: Mesh) -> bool:
        """Whether every shard has elements, and written tensors (which are the results then) keep their placements."""
        outputs, inputs = row
        axis = len(chosen)
        for number in self.written:
            present = self.tensors[number].placements[axis]
            if inputs[number] != present or any(output != present for output in outputs):
                return False
        for side, shaped in ((0, self.results), (1, self.tensors)):
            for number, tensor in enumerate(shaped):
                new = row[side][number]
                if isinstance(new, Shard):
                    # Axes chosen so far that split the same dim: only together they may leave a shard without elements.
                    before = [mesh.size(other) for other, one in enumerate(chosen) if one[side][number] == new]
                    if not has_no_empty_piece(tensor.shape[new.dim], (*before, mesh.size(axis))):
                        return False
        return True

    def _cost(self, row: Any, axis: int, size: int) -> float:
        """Return the cost of redistributing the tensors, and of the reductions that are then pending in the results."""
        outputs, inputs = row
        moves = [
            (_shard_or_op(tensor.placements[axis]), _shard_or_op(placement), tensor)
            for tensor, placement in zip(self.tensors, inputs, strict=True)
        ]
        due = [
            (_shard_or_op(one), None, result)
            for one, result in zip(outputs, self.results, strict=True)
            if one.is_partial()
        ]
        return sum(
            move_cost(source, target, size, tensor.numel() * tensor.element_size())
            for source, target, tensor in (*moves, *due)
        )


def _shard_or_op(placement: Placement) -> int | str | None:
    """Return the dim of a shard, the op of a term, and None for a replica, as `move_cost` takes them."""
    if isinstance(placement, Partial):
        return placement.reduce_op
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None
