"""The statements of random programs: templates of ``grammar.toml``, and statements from the catalogue."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dtckpt.dtensor.operators import dispatch
from dtckpt.dtensor.operators.catalogue import entries

assert dispatch  # importing it fills the catalogue

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
STEPS, EXACT = (frozenset(_TABLES.pop(name).split()) for name in ("steps", "exact"))
"""Names of pointwise operators with steps, and of exact pointwise operators."""
COPIES = _TABLES.pop("copies").split()
"""The operation on a part of a tensor."""
KINDS = dict.fromkeys(["gcd", "lcm"], "i") | dict.fromkeys(["imag", "real"], "c")
"""Kinds of dtypes of some pointwise operators; others take any."""
_BINARY = "add", "sub", "mul", "maximum", "minimum", "clamp_max", "clamp_min"
FOREACH_OPERANDS = {
    **{name: [", [{same}]", ", {num}"] for name in _BINARY},
    "addcdiv": [", [{same}], [{same2}.abs() + 1]"],
    "addcmul": [", [{same}], [{same2}]"],
    "div": [", {n}", ", [{same}.abs() + 1]"],
    "lerp": [", [{same}], 0.5"],
    "pow": [", 2"],
    "copy": [", [{same}]"],
}
"""Operands of operators on lists, after the list of the tensor."""


@dataclass(frozen=True)
class Row:
    """A template and the tensors that it is for.

    Args:
        template: An expression whose value a new variable gets, or a statement.
        kinds: Kinds of dtypes of ``x``: ``f``, ``c``, ``i``, ``b``.
        ranks: Ranks of ``x``.
        numbers: ``exact`` or ``close`` if only programs of such numbers have it.
        writes: Whether the template is a statement that makes no new variable.
    """

    template: str
    kinds: str
    ranks: str = "01234"
    numbers: str = ""
    writes: bool = False

    @property
    def statement(self) -> str:
        return self.template if self.writes or "{new}" in self.template else f"{{new}} = {self.template}"


def written_rows() -> dict[str, list[Row]]:
    """Return the rows of the file, by family."""
    return {
        family: [Row(line, **more) for templates, more in map(_split, groups) for line in templates]
        for family, groups in _TABLES.items()
    }


def _split(group: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    return group["templates"].splitlines(), {name: each for name, each in group.items() if name != "templates"}


def numbers_of(name: str) -> str:
    return "exact" if name in STEPS else "" if name in EXACT else "close"


def pointwise_rows() -> Iterator[Row]:
    """Yield a row, and one in place if there is such a variant, for each pointwise operator of the catalogue."""
    for entry in sorted(set(entries())):
        name, _, overload = entry.name.partition(".")
        # Of zeros that sums of terms make, the signs may differ: docs/departures.md.
        if entry.module not in {"any", "pointwise"} or name.endswith("_backward") or name in {"clamp", "signbit"}:
            continue
        arguments = _arguments(getattr(getattr(torch.ops.aten, name), overload)._schema.arguments)
        if arguments is None:
            continue
        kinds = KINDS.get(name, "ib" if "bitwise" in name or "shift" in name else "fffcib")
        yield Row(f"torch.ops.aten.{name}.{overload}({arguments})", kinds, numbers=numbers_of(name))
        in_place = getattr(torch.ops.aten, f"{name}_", None)
        if arguments.startswith("{x}") and in_place is not None and overload in in_place.overloads():
            template = f"torch.ops.aten.{name}_.{overload}({arguments})"
            yield Row(template, kinds, numbers=numbers_of(name), writes=True)


_SCALARS = {"number": "{num}", "float": "{num}", "int": "{n}", "bool": "{keep}"}


def _arguments(arguments: Iterable[torch.Argument]) -> str | None:
    """Return templates of the arguments that have no default; None if there is one of another type."""
    made, operands = [], iter(["{x}", "{like}", "{like2}"])
    for argument in arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            break
        if kind == "Tensor":
            word = "{mask}" if argument.name in {"mask", "condition"} else next(operands, "{same}")
        elif kind in _SCALARS:
            word = _SCALARS[kind]
        else:
            return None
        made.append(f"{argument.name}={word}" if argument.kwarg_only else word)
    return ", ".join(made) if "{x}" in made else None


def foreach_rows() -> Iterator[Row]:
    """Yield rows of the operators on lists: with lists, with numbers, in place."""
    names = {entry.name.partition(".")[0] for entry in entries() if entry.module == "foreach"}
    for name in sorted(names):
        short = name.removeprefix("_foreach_")
        for operands in FOREACH_OPERANDS.get(short, [""]):
            if hasattr(torch, name):
                yield Row(f"torch.{name}([{{x}}]{operands})[0]", "f", numbers=numbers_of(short))
            if hasattr(torch, f"{name}_"):
                yield Row(f"torch.{name}_([{{x}}]{operands})", "f", numbers=numbers_of(short), writes=True)


SHARES = {
    "pointwise": 6, "any pointwise": 5, "reductions": 6, "products": 5, "views": 16, "indexing": 7, "writes": 14,
    "changes of shape": 5, "gradients": 4, "neural": 3, "plain operands": 2, "foreach": 1,
}  # fmt: skip
"""How often each family is drawn."""
FAMILIES = written_rows() | {"any pointwise": [*pointwise_rows()], "foreach": [*foreach_rows()]}
