"""The catalogue of operators: ``python -m dtckpt.dtensor.operators.catalogue > docs/operators.md``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.dtensor.operators import dispatch
from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.operators.registry import COMPOSITES, PLANNERS, RULES, builder_of

_IMPLICIT = "CompositeImplicitAutograd"
_HEAD = f"""# Operators on DTensors

Made by `python -m dtckpt.dtensor.operators.catalogue > docs/operators.md`, of {torch.__version__.split("+")[0]}.

Every operator of PyTorch works on DTensors. *Rule*: each device works on its pieces. *Decomposition*: other operators
do it. *Replication*: each device works on the whole of all operands. A rule or a decomposition may decline arguments
that it does not fit; then operands are replicated. `dtckpt.dtensor.debug.operator_statistics()` says what a program's
operators did. Variants in place and with `out` follow the operator here. What PyTorch itself makes of other operators,
as `matmul`, is not listed: those others are. Terms of a sum go on waiting through what is linear in it, also where a
tensor that it is multiplied by is not finite: see `departures.md`.
"""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """How an operator runs.

    Args:
        route: ``rule``, ``decomposition`` or ``replication``.
        family: The module where that is said.
        name: The operator.
        summary: What is said of it.
    """

    route: str
    family: str
    name: str
    summary: str


def entries() -> Iterator[Entry]:
    """Yield an entry for every functional operator of ATen that reaches DTensors."""
    for name in torch._C._dispatch_get_all_op_names():
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
    """Return an operator's entry; None if PyTorch makes others of it before it comes here."""
    name = str(func).removeprefix("aten.")
    said = PLANNERS.get(func) or RULES.get(func)
    if said is not None:
        return Entry("rule", _family(said), name, _summary(said))
    if func in COMPOSITES:
        return Entry("decomposition", _family(COMPOSITES[func]), name, _summary(COMPOSITES[func]))
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _IMPLICIT):
        return None
    if builder_of(func) is not None:
        return Entry("rule", "table", name, "Element by element, operands broadcast.")
    return Entry("replication", "", name, "")


def _family(said: Callable[..., Any]) -> str:
    return str(said.__module__).rpartition(".")[2]


def _summary(said: Callable[..., Any]) -> str:
    """Return the first line of a function's docstring, else that of its module."""
    text = said.__doc__ or sys.modules[said.__module__].__doc__ or ""
    return text.strip().partition("\n")[0]


def catalogue() -> str:
    """Return the catalogue as Markdown."""
    every = sorted(set(entries()))
    lines = [_HEAD]
    for route in ("rule", "decomposition", "replication"):
        mine = [entry for entry in every if entry.route == route]
        lines += [f"## By {route}: {len(mine)} operators", ""]
        if route == "replication":
            lines += [", ".join(f"`{entry.name}`" for entry in mine), ""]
            continue
        groups: dict[tuple[str, str], list[str]] = {}
        for entry in mine:
            groups.setdefault((entry.family, entry.summary), []).append(entry.name)
        lines += ["| family | operators | how |", "|---|---|---|"]
        lines += [
            f"| {family} | {', '.join(f'`{name}`' for name in names)} | {summary.replace('|', chr(92) + '|')} |"
            for (family, summary), names in groups.items()
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    assert dispatch  # noqa: S101  (importing it fills the table)
    sys.stdout.write(catalogue())
