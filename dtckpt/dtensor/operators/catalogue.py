"""The generator of docs/operators.md: ``python -m dtckpt.dtensor.operators.catalogue > docs/operators.md``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators import dispatch
from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.operators.registry import COMPOSITES, PLANNERS, RULES, builder_of

_IMPLICIT = "CompositeImplicitAutograd"
_HEAD = f"""# Operators on DTensors

`python -m dtckpt.dtensor.operators.catalogue > docs/operators.md` writes this page, here from PyTorch \
{torch.__version__.split("+")[0]}.

Every operator of PyTorch works on DTensors, in one of three ways:

* *Rule*: each device runs the operator on its components. *Module* has the rule, in
  `dtckpt/dtensor/operators/rules/`.
* *Decomposition*: other operators, which have rules, do its work.
* *Replication*: each device runs the operator on all of every operand.

A rule or a decomposition may decline arguments that it does not fit; then the operands are replicated.
`dtckpt.dtensor.debug.operator_statistics()` counts which way a program's operators took. In-place and `out` variants
take the way of the operator listed here. Operators that PyTorch itself decomposes, as `matmul`, are not listed; those
that it decomposes them to are. A pending sum passes through an operator that is linear in it, even if another operand
is not finite: see `departures.md`.
"""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """How an operator runs.

    Args:
        route: ``rule``, ``decomposition`` or ``replication``.
        name: The operator, with its overload.
        module: Name of the module that has the rule or the decomposition; empty for replication.
        summary: First line of the docstring of the rule or decomposition, or of its module.
    """

    route: str
    name: str
    module: str
    summary: str


def entries() -> Iterator[Entry]:
    """Yield an entry for every operator of ATen that writes to no argument and that DTensors get to see."""
    for name in torch_private.operator_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(torch.ops.aten, packet):
            continue
        func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if func is None or func._schema.is_mutable or not _takes_tensors(func):
            continue
        entry = _entry(func)
        if entry is not None:
            yield entry


def _takes_tensors(func: Operator) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _entry(func: Operator) -> Entry | None:
    """Return an operator's entry; None if PyTorch decomposes it before DTensors see it."""
    name = str(func).removeprefix("aten.")
    planner = PLANNERS.get(func) or RULES.get(func)
    if planner is not None:
        return Entry("rule", name, _module(planner), _summary(planner))
    if func in COMPOSITES:
        return Entry("decomposition", name, _module(COMPOSITES[func]), _summary(COMPOSITES[func]))
    if torch_private.has_kernel(func.name(), _IMPLICIT):
        return None
    if builder_of(func) is not None:
        return Entry(
            "rule", name, "any", "PyTorch tags it as pointwise: all dims may be split, operands are broadcast."
        )
    return Entry("replication", name, "", "")


def _module(function: Callable[..., Any]) -> str:
    return str(function.__module__).rpartition(".")[2]


def _summary(function: Callable[..., Any]) -> str:
    """Return the first line of a function's docstring, or else of its module's docstring."""
    text = function.__doc__ or sys.modules[function.__module__].__doc__ or ""
    return text.strip().partition("\n")[0]


def catalogue() -> str:
    """Return the catalogue as Markdown: a table by route, with a line for every operator."""
    all_entries = sorted(set(entries()))
    lines = [_HEAD]
    for route in ("rule", "decomposition", "replication"):
        of_route = [entry for entry in all_entries if entry.route == route]
        lines += [f"## By {route}: {len(of_route)} operators, overloads counted", ""]
        overloads: dict[tuple[str, ...], list[str]] = {}
        for entry in of_route:
            name, _, overload = entry.name.partition(".")
            details = () if route == "replication" else (entry.module, entry.summary.replace("|", "\\|"))
            overloads.setdefault((name, *details), []).append(overload)
        head = ["operator", "overloads", *([] if route == "replication" else ["module", "how"])]
        lines += [_row(head), _row(["---"] * len(head))]
        lines += [_row([f"`{name}`", ", ".join(of_name), *details]) for (name, *details), of_name in overloads.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    assert dispatch  # noqa: S101  (importing it fills the table)
    sys.stdout.write(catalogue())
