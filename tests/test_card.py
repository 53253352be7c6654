"""The script for a machine with a card runs every test that wants one, and ends in time where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "card.sh"
MARKS = re.compile(r"mark\.cuda|needs_card|CLIENTS_WITH_CARDS|MESH_MAKERS")


def run(folder, **variables):
    return subprocess.run(
        ["bash", SCRIPT, folder, folder / "wheels"],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_runs_all_files_with_tests_for_cards():
    """But those of helpers that the others import."""
    files = set(ROOT.glob("tests/**/test_*.py")) - {Path(__file__)}
    marked = {str(path.relative_to(ROOT)) for path in files if MARKS.search(path.read_text())}
    assert set(re.findall(r"tests/\S+\.py", SCRIPT.read_text())) == marked


def test_the_wheels_are_pinned():
    names = re.findall(r"^[\w-]+(?:==.+)?$", (ROOT / "benchmarks" / "card_wheels.txt").read_text(), re.MULTILINE)
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in names if "==" not in name and name.lower() not in pinned] == []


@pytest.mark.processes
def test_steps_for_which_no_time_is_left_are_said_to_be_skipped(tmp_path):
    ended = run(tmp_path, BUDGET_S="4")
    assert ended.returncode == 1, ended.stderr
    assert (tmp_path / "summary.txt").read_text() == "skipped, the time is up: versions\n"
