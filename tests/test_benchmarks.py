"""docs/benchmarks.md and its charts follow from the stored results; programs keep the tables that they print."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import page
from benchmarks.charts import Mark, marks_chart, times_chart
from benchmarks.results import VARIABLE, Figures, Result, first_number, shown
from benchmarks.run import PROGRAMS, Program, run

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_and_its_charts_are_those_of_the_results():
    assert page.page_of(page.RESULTS) == page.PAGE.read_text()
    for name, svg in page.charts_of(page.RESULTS).items():
        assert (page.PAGE.parent / page.PICTURES / name).read_text() == svg
        ElementTree.fromstring(svg)


def test_every_bar_has_a_figure_and_every_program_a_place():
    results = page.results_of(page.RESULTS)
    for bar in page.BARS:
        assert bar.measured(results) is not None, bar
    shown_results = [name for section in page.SECTIONS for name in section.results]
    assert sorted(shown_results) == sorted(program.name for program in PROGRAMS)


@pytest.mark.parametrize(
    ("figure", "at_most", "share"), [(2.0, False, 2.0), (0.5, False, 0.5), (0.5, True, 2.0), (2.0, True, 0.5)]
)
def test_shares_above_one_are_better(figure, at_most, share):
    assert page.Bar("", "", "", 1.0, at_most=at_most).share(figure) == pytest.approx(share)


def test_figures_are_found_by_row_and_the_worst_of_all_counts():
    figures = Figures(
        "t", ["work", "kind", "ratio"], [["save, fsync", "a", "2.5 x"], ["save", "b", "1.5"], ["load", "c", ""]]
    )
    assert figures.number("save", "ratio") == 1.5
    assert figures.number("c", "ratio") is None
    assert figures.number("nothing", "ratio") is None
    result = Result("c", "2026-01-01", "m", [figures])
    assert Result.from_json(result.to_json()) == result
    assert page.Bar("", "r", "ratio", 1.0).measured({"r": result}) == 1.5
    assert page.Bar("", "r", "ratio", 1.0, at_most=True).measured({"r": result}) == 2.5
    assert page.Bar("", "other", "ratio", 1.0).measured({"r": result}) is None
    assert [first_number(text) for text in ("1,000 us", "45%", "", "n/a", "0.5")] == [1000.0, 45.0, None, None, 0.5]


def test_charts_say_whether_bars_are_met_and_who_took_how_long():
    svg = marks_chart([Mark("a", 2.0, "2, wanted 1"), Mark("b", 0.1, "0.1, wanted 1")])
    assert svg.count("#0072b2") == 1
    assert svg.count("#d55e00") == 1
    svg = times_chart("t", ["save"], [("ours", [0.5]), ("theirs", [None])], "s")
    assert "ours: 0.5 s" in svg
    assert "theirs:" not in svg


def test_a_program_keeps_its_tables(tmp_path):
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "benchmarks.limits", "--mib", "1", "--rounds", "1"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: str(kept)}, check=True, timeout=100)
    (figures,) = shown(kept)
    assert figures.columns == ["limit", "s", "GB/s"]
    assert figures.number("loopback", "GB/s") >= 0  # rounded


def test_a_program_that_fails_keeps_the_former_results(tmp_path):
    former = tmp_path / "gone.json"
    former.write_text("former")
    assert not run(Program("gone", "no_such_module"), tmp_path, is_quick=False)
    assert former.read_text() == "former"
    assert run(Program("gone", "limits", "--mib 2", "--mib 1 --rounds 1"), tmp_path, is_quick=True)
    assert Result.from_json(former.read_text()).command == "python -m benchmarks.limits --mib 2 --mib 1 --rounds 1"
