"""Results of benchmarks: the tables that a program prints, as values that are kept as JSON for docs/benchmarks.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

VARIABLE = "DTCKPT_RESULTS"
"""Names the file that tables are added to, beside being printed; `benchmarks.run` sets it."""


@dataclass(frozen=True)
class Figures:
    """A table of a benchmark, as text.

    Args:
        title: The workload and the machine.
        columns: Names of the columns; the first has the names of the rows.
        rows: Cells, by row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @staticmethod
    def of(table: Table) -> Figures:
        """Return the cells of a table."""
        columns = [str(column.header) for column in table.columns]
        return Figures(
            str(table.title or ""), columns, list(zip(*(column._cells for column in table.columns), strict=True))
        )

    def numbers(self, column: str) -> list[float | None]:
        """Return the figures of a column."""
        at = self.columns.index(column)
        return [first_number(cells[at]) for cells in self.rows]

    def number(self, row: str, column: str) -> float | None:
        """Return a figure, of the row whose first or second cell is, or begins with, a text; None if there is none."""
        if column not in self.columns:
            return None
        fitting = [cells for cells in self.rows if any(cell.strip().startswith(row) for cell in cells[:2])]
        exact = [cells for cells in fitting if row in cells[:2]] or fitting
        return first_number(exact[0][self.columns.index(column)]) if exact else None


@dataclass(frozen=True)
class Result:
    """The tables that one run of a program printed.

    Args:
        command: How it was called.
        date: The day.
        machine: The processor, its cores, and the memory.
        tables: Its tables.
    """

    command: str
    date: str
    machine: str
    tables: Sequence[Figures]

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Result:
        """Read one."""
        facts = json.loads(text)
        return Result(**facts | {"tables": [Figures(**each) for each in facts["tables"]]})


def first_number(text: str) -> float | None:
    """Return the number that a cell begins with, such as 0.55 of "0.55 s"."""
    try:
        return float(text.split(maxsplit=1)[0].replace(",", "").removesuffix("%"))
    except (IndexError, ValueError):
        return None


def show(*tables: Table, width: int = 120) -> None:
    """Print tables, and keep them if `benchmarks.run` asks for it."""
    for table in tables:
        Console(width=width).print(table)
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a") as file:
            for table in tables:
                print(json.dumps(asdict(Figures.of(table)), ensure_ascii=False), file=file)


def shown(path: Path) -> Iterator[Figures]:
    """Yield the tables that a program has kept."""
    if path.exists():
        for line in path.read_text().splitlines():
            facts: dict[str, Any] = json.loads(line)
            yield Figures(**facts)
