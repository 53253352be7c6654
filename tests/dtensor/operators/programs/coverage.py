"""Which operators of the catalogue random programs reach: each row of the grammar runs, and the runtime counts."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from dtckpt.dtensor.debug import clear_operator_statistics, operator_statistics
from dtckpt.dtensor.operators.catalogue import entries

from .draw import Drawer
from .grammar import FAMILIES, Row
from .program import Program
from .runner import execute, namespace
from .search import mesh_of
from .variables import Unfit

MAX_SEEDS = 150
AXES = {"x": 2}
LEFT_OUT = Path(__file__).with_name("left_out.toml")


def program_of(row: Row) -> Program | None:
    """Return a program that is about one row and runs on plain tensors, with its gradients; None if there is none."""
    for seed in range(MAX_SEEDS):
        drawer = Drawer(seed)
        drawer.axes, drawer.is_exact, drawer.gradient_share = AXES, row.numbers != "close", 1.0
        try:
            drawer.input_for(row)
        except Unfit:
            continue
        if drawer.statement(row):
            drawer.take_gradients()
            return drawer.result()
    return None


@cache
def reached() -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the operators, without their overloads, that the rows reach, and the rows of which no program runs.

    Operators that PyTorch decomposes before the runtime counts them are reached by name.
    """
    clear_operator_statistics()
    dead = []
    for rows in FAMILIES.values():
        for row in rows:
            program = program_of(row)
            if program is None:
                dead.append(row.template)
            else:
                _run(program)
    ran = {name.removeprefix("aten.").partition(".")[0] for name in operator_statistics()}
    functional = {name if name.startswith("__") else name.removesuffix("_") for name in ran}
    named = {name for rows in FAMILIES.values() for row in rows for name in re.findall(r"\.(\w+)", row.template)}
    return frozenset(functional | named), tuple(dead)


def _run(program: Program) -> None:
    mesh = mesh_of(program.axes)
    variables = namespace() | {each.name: each.distributed(mesh) for each in program.inputs}
    for statement in program.statements:
        execute(statement.source, variables)


def catalogue_names() -> set[str]:
    return {entry.name.partition(".")[0] for entry in entries()}


def left_out() -> dict[str, str]:
    """Return the reason for each operator that no random program has."""
    groups = tomllib.loads(LEFT_OUT.read_text())
    return {name: group["reason"] for group in groups.values() for name in group["operators"].split()}
