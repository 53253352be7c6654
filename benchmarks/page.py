"""Write docs/benchmarks.md and its charts from the results of benchmarks: ``python -m benchmarks.page``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.charts import Mark, marks_chart, times_chart
from benchmarks.results import Figures, Result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = "pictures"


@dataclass(frozen=True)
class Bar:
    """The bound that a figure should keep.

    Args:
        text: Name of the measurement.
        result: Name of the result.
        column: The column of the figure.
        wanted: The figure that is wanted.
        row: Beginning of the row's first or second cell; "": the worst of all rows counts.
        at_most: Whether less is better.
        table: Number of the table in the result.
    """

    text: str
    result: str
    column: str
    wanted: float
    row: str = ""
    at_most: bool = False
    table: int = 0

    def measured(self, results: Mapping[str, Result]) -> float | None:
        """Return the figure; None if there is none."""
        if self.result not in results:
            return None
        figures = results[self.result].tables[self.table]
        if self.row:
            return figures.number(self.row, self.column)
        found = [number for number in figures.numbers(self.column) if number is not None]
        return (max if self.at_most else min)(found, default=None)

    def share(self, figure: float) -> float:
        """Return the figure divided by the bound, or the bound by the figure if less is better: 1 and more meets it."""
        return self.wanted / max(figure, 1e-9) if self.at_most else figure / self.wanted


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        heading: Its heading.
        what: The measurement, in a sentence or two.
        results: Names of its results.
        series: Columns with times that stand side by side in the chart of the first result.
        unit: Their unit.
    """

    heading: str
    what: str
    results: Sequence[str]
    series: Sequence[str] = ()
    unit: str = "s"


_WRITTEN = tomllib.loads((ROOT / "benchmarks" / "page.toml").read_text())
SECTIONS = tuple(Section(**each) for each in _WRITTEN["sections"])
BARS = tuple(Bar(**each) for each in _WRITTEN["bars"])


def results_of(folder: Path) -> dict[str, Result]:
    """Return the results of a folder, by name."""
    return {path.stem: Result.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))}


def page_of(folder: Path) -> str:
    """Return the page that shows the results of a folder."""
    return "\n".join(_lines(results_of(folder))).rstrip() + "\n"


def charts_of(folder: Path) -> dict[str, str]:
    """Return the charts of the page as SVG, by the names of their files."""
    results = results_of(folder)
    marks = [Mark(bar.text, bar.share(figure), _figures(bar, figure)) for bar, figure in _measured(results)]
    charts = {"bars.svg": marks_chart(marks)}
    for section in SECTIONS:
        if section.series and section.results[0] in results:
            charts[_chart_name(section)] = _times(section, results[section.results[0]].tables[0])
    return charts


def _measured(results: Mapping[str, Result]) -> Iterator[tuple[Bar, float]]:
    for bar in BARS:
        figure = bar.measured(results)
        if figure is not None:
            yield bar, figure


def _figures(bar: Bar, figure: float) -> str:
    return f"{figure:g}, wanted {'at most ' if bar.at_most else ''}{bar.wanted:g}"


def _chart_name(section: Section) -> str:
    return f"{section.results[0]}.svg"


def _times(section: Section, figures: Figures) -> str:
    rows = [cells[0] for cells in figures.rows]
    names = [name for name in section.series if name in figures.columns]
    series = [(re.sub(r" \(?s\)?$", "", name), figures.numbers(name)) for name in names]
    return times_chart(figures.title or section.heading, rows, series, section.unit)


def _lines(results: Mapping[str, Result]) -> Iterator[str]:
    days: dict[str, set[str]] = {}
    for result in results.values():
        days.setdefault(result.machine, set()).add(result.date)
    machines = [f"{machine} ({', '.join(sorted(days[machine]))})" for machine in sorted(days)]
    yield _WRITTEN["introduction"]
    yield f"Machine: {'; '.join(machines)}."
    measured = [*_measured(results)]
    met = sum(bar.share(figure) >= 1 for bar, figure in measured)
    yield f"\n## Bars\n\n{met} of {len(measured)} are met.\n"
    yield f"![How far each bar is met]({PICTURES}/bars.svg)\n"
    yield "| | measured | wanted | |\n| --- | --- | --- | --- |"
    for bar, figure in measured:
        wanted = f"{'at most ' if bar.at_most else ''}{bar.wanted:g}"
        yield f"| {bar.text} | {figure:g} | {wanted} | {'met' if bar.share(figure) >= 1 else '**missed**'} |"
    for section in SECTIONS:
        found = [results[name] for name in section.results if name in results]
        if found:
            yield from _section(section, found)


def _section(section: Section, results: Sequence[Result]) -> Iterator[str]:
    yield f"\n## {section.heading}\n\n{section.what}\n"
    if section.series:
        yield f"![{section.heading}: times side by side]({PICTURES}/{_chart_name(section)})\n"
    for result in results:
        yield f"`{result.command}`, {result.date}\n"
        for figures in result.tables:
            if figures.title:
                yield f"**{figures.title}**\n"
            yield "| " + " | ".join(figures.columns) + " |"
            yield "| " + " | ".join("---" for _ in figures.columns) + " |"
            for cells in figures.rows:
                yield "| " + " | ".join(cells) + " |"
            yield ""


def write_page(folder: Path, page: Path) -> None:
    """Write the page of a folder's results, and its charts beside it."""
    pictures = page.parent / PICTURES
    pictures.mkdir(exist_ok=True)
    for name, svg in charts_of(folder).items():
        (pictures / name).write_text(svg)
    page.write_text(page_of(folder))


if __name__ == "__main__":
    write_page(RESULTS, PAGE)
