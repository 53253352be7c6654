"""`CommDebugMode`: count the communications of a part of a program, by kind and by module."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dtckpt.comm import observers
from dtckpt.comm.torch_private import TorchDispatchMode, tree_leaves
from dtckpt.dtensor.debug.module_tracker import GLOBAL, ModuleTracker
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement

TRIVIAL_OPERATORS = frozenset(
    {
        "aten.detach.default",
        "aten.t.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.transpose.int",
    }
)
"""Operators that only noise level 3 shows."""

_NOT_COUNTED = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""Operators in the namespace of PyTorch's functional collectives that communicate nothing."""

_FORWARD, _BACKWARD, _RECOMPUTED = "forward", "backward", "activation checkpointing"


@dataclass(frozen=True, slots=True)
class _OperatorRun:
    """An operator that ran; shapes, placements and mesh describe its DTensor arguments."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    placements: tuple[tuple[Placement, ...], ...] = ()
    mesh: Mesh | None = None

    def is_shown(self, noise_level: int) -> bool:
        if noise_level > 2:
            return True
        return noise_level > 0 and self.name not in TRIVIAL_OPERATORS and (noise_level > 1 or bool(self.shapes))


@dataclass(slots=True)
class _Activity:
    """The communications and operators of one module."""

    communications: dict[str, Counter[str]] = field(
        default_factory=lambda: {phase: Counter() for phase in (_FORWARD, _BACKWARD)}
    )
    operations: dict[str, Counter[_OperatorRun]] = field(
        default_factory=lambda: {phase: Counter() for phase in (_FORWARD, _BACKWARD, _RECOMPUTED)}
    )
    nbytes: Counter[str] = field(default_factory=Counter)


class CommDebugMode:
    """Counts this client's communications, and the operators that ran, while it is active.

    The counts include the communications of DTensors, and PyTorch's functional collectives under PyTorch's names.

    Communications of a module count for this module and for all modules around it. A new entry into the mode clears the
    counts, but an entry into an active mode changes nothing. Several modes may be active at once, and each counts all
    communications.

    >>> with CommDebugMode() as mode:
    ...     _ = torch.nn.Linear(2, 2)(torch.ones(1, 2))
    >>> mode.get_total_counts()
    0
    """

    def __init__(self) -> None:
        self._tracker = ModuleTracker()
        self._activities: dict[str, _Activity] = {GLOBAL: _Activity()}
        self._active = ExitStack()
        self._depth = 0

    def __enter__(self) -> CommDebugMode:
        self._depth += 1
        if self._depth == 1:
            self._activities = {GLOBAL: _Activity()}
            with ExitStack() as stack:
                stack.enter_context(self._tracker.tracking())
                stack.enter_context(observers.observed_by(self._count))
                stack.enter_context(_OperatorMode(self._note, self._count))
                self._active = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._active.close()

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    # --- counting -------------------------------------------------------------------------------------------------

    def _count(self, communication: observers.Communication) -> None:
        position = self._tracker.position()
        for name in (position.module, *position.parents):
            activity = self._activities.setdefault(name, _Activity())
            activity.communications[_BACKWARD if position.is_backward else _FORWARD][communication.kind] += 1
            activity.nbytes[communication.kind] += communication.nbytes

    def _note(self, operation: _OperatorRun) -> None:
        position = self._tracker.position()
        phase = _RECOMPUTED if position.is_recomputing else _BACKWARD if position.is_backward else _FORWARD
        self._activities.setdefault(position.module, _Activity()).operations[phase][operation] += 1

    # --- reports --------------------------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """Return the number of communications."""
        return sum(self.get_comm_counts().values())

    def get_comm_counts(self) -> Counter[str]:
        """Return the number of communications by kind, 0 of others; see `dtckpt.comm.observers.Communication`."""
        counts: Counter[str] = Counter()
        for phase in self._activities[GLOBAL].communications.values():
            counts.update(phase)
        return counts

    def get_comm_nbytes(self) -> dict[str, int]:
        """Return the bytes that this client received, by kind of communication."""
        return dict(self._activities[GLOBAL].nbytes)

    def get_module_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the communications by module, by ``forward`` or ``backward``, and by kind."""
        return {
            name: {phase: dict(counts) for phase, counts in activity.communications.items()}
            for name, activity in self._activities.items()
            if name == GLOBAL or any(activity.communications.values())
        }

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parameters of the modules that ran, by module and name."""
        return {name: dict(facts.parameters) for name, facts in self._tracker.facts.items() if facts.parameters}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of the parameters that are DTensors, by ``module.parameter``."""
        return {
            f"{module}.{name}": placements
            for module, facts in self._tracker.facts.items()
            for name, placements in facts.placements.items()
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of each module's communications and operators, indented as modules are nested.

        Args:
            noise_level: 0 shows communications; 1 also types and parameters of modules, and operators on DTensors;
                2 other operators too; 3 also `TRIVIAL_OPERATORS`.
        """
        return "".join(f"{line}\n" for line in self._lines(GLOBAL, 0, noise_level))

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write each module's communications and operators to a JSON file; ``noise_level`` as for the table."""
        text = json.dumps(self._as_json(GLOBAL, noise_level), indent=4)
        Path(file_name).write_text(text, encoding="utf-8")

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write `generate_comm_debug_tracing_table` to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level), encoding="utf-8")

    def _lines(self, name: str, depth: int, noise_level: int) -> Iterator[str]:
        facts, activity, indent = self._tracker.facts[name], self._activities.get(name, _Activity()), "  " * depth
        yield f"{indent}{name}"
        if noise_level > 0 and name != GLOBAL:
            yield f"{indent}  *module type: {facts.type_name}"
            if facts.parameters:
                yield f"{indent}  *Parameter List"
            for key, parameter in facts.parameters.items():
                yield f"{indent}    *{key}: {facts.placements.get(key) or tuple(parameter.shape)}"
        for phase, operations in activity.operations.items():
            shown = _shown(operations, noise_level)
            communications: Mapping[str, int] = activity.communications.get(phase, {})
            if not communications and not shown:
                continue
            yield f"{indent}  {phase.upper()}{' PASS' if phase != _RECOMPUTED else ''}"
            yield from (f"{indent}    *{kind}: {count}" for kind, count in communications.items())
            for operation, count in shown.items():
                yield f"{indent}    **{operation.name}{f' x{count}' if count > 1 else ''}"
                if operation.shapes:
                    yield f"{indent}      shape: {list(operation.shapes)}"
                    yield f"{indent}      sharding: {list(operation.placements)}"
                    yield f"{indent}      device mesh: {operation.mesh!r}"
        for child in facts.children:
            yield from self._lines(child, depth + 1, noise_level)

    def _as_json(self, name: str, noise_level: int) -> dict[str, Any]:
        facts, activity = self._tracker.facts[name], self._activities.get(name, _Activity())
        is_detailed = noise_level > 0
        operations = {phase: _json_operations(counts, noise_level) for phase, counts in activity.operations.items()}
        return {
            "fqn": name,
            "module_type": facts.type_name if is_detailed else "",
            "parameters": [[key, str(value)] for key, value in facts.placements.items()] if is_detailed else [],
            "children": [self._as_json(child, noise_level) for child in facts.children],
            "collectives_forward": list(map(list, activity.communications[_FORWARD].items())),
            "collectives_backward": list(map(list, activity.communications[_BACKWARD].items())),
            "operations_forward": operations[_FORWARD],
            "operations_backward": operations[_BACKWARD],
            "operations_checkpointing": operations[_RECOMPUTED],
        }


def _shown(operations: Mapping[_OperatorRun, int], noise_level: int) -> dict[_OperatorRun, int]:
    return {operation: count for operation, count in operations.items() if operation.is_shown(noise_level)}


def _json_operations(operations: Mapping[_OperatorRun, int], noise_level: int) -> list[dict[str, Any]]:
    return [
        {
            "name": operation.name,
            "count": count,
            "input_shape": list(map(list, operation.shapes)),
            "input_sharding": list(map(str, operation.placements)),
            "device_mesh": repr(operation.mesh) if operation.mesh else "",
        }
        for operation, count in _shown(operations, noise_level).items()
    ]


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes each operator that runs: operators on DTensors, and the operators on plain tensors that they call."""

    def __init__(self, note: Callable[[_OperatorRun], None], count: Callable[[observers.Communication], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._note, self._count = note, count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the operator, leave it to DTensors if they are among the arguments, else run it; count collectives."""
        tensors = [arg for arg in tree_leaves(args) if isinstance(arg, DTensor)]
        self._note(
            _OperatorRun(
                str(func),
                tuple(tuple(tensor.shape) for tensor in tensors),
                tuple(tensor.placements for tensor in tensors),
                tensors[0].device_mesh if tensors else None,
            )
        )
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname not in _NOT_COUNTED:
            nbytes = sum(tensor.nbytes for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
            self._count(observers.Communication(func._opname.rstrip("_"), nbytes, ()))
        return result
