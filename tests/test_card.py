"""The script for a machine with a card runs every test that wants one, and ends in time where there is none."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import card_versions

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "card.sh"
WHEELS = ROOT / "benchmarks" / "card_wheels.txt"
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


def closure(names):
    """Return distributions and all that they require, of those that are installed."""
    found, left = set(), list(names)
    while left:
        if (name := canonicalize_name(left.pop())) not in found:
            found.add(name)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                left += [
                    requirement.name
                    for requirement in map(Requirement, importlib.metadata.requires(name) or [])
                    if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
                ]
    return found


def test_the_wheels_and_pytorch_are_all_that_dtckpt_and_its_tests_need():
    dependencies = [Requirement(line).name for line in importlib.metadata.requires("dtckpt") if "extra ==" not in line]
    needed = closure([*dependencies, *card_versions.TOOLS, "grpcio-status"]) - closure(["torch", "numpy"])
    carried = {Requirement(line).name for line in WHEELS.read_text().splitlines() if not line.startswith("#")}
    assert needed <= set(map(canonicalize_name, carried))


def test_the_wheels_are_pinned():
    names = re.findall(r"^[\w-]+(?:==.+)?$", WHEELS.read_text(), re.MULTILINE)
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in names if "==" not in name and name.lower() not in pinned] == []


@pytest.mark.processes
def test_steps_for_which_no_time_is_left_are_said_to_be_skipped(tmp_path):
    ended = run(tmp_path, BUDGET_S="4")
    assert ended.returncode == 1, ended.stderr
    assert (tmp_path / "summary.txt").read_text() == "skipped, the time is up: versions\n"
