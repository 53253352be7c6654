"""The script for a machine with a GPU runs every test that wants one, and ends in time where there is none."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu_versions

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
WHEELS = ROOT / "benchmarks" / "gpu_wheels.txt"
MARKS = re.compile(r"mark\.cuda|needs_gpu|CLIENTS_WITH_GPUS|MESH_MAKERS")


def run(folder, **variables):
    return subprocess.run(
        ["bash", SCRIPT, folder, folder / "wheels"],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_it_runs_all_files_with_tests_for_gpus():
    """Without the helpers that the others import."""
    files = set(ROOT.glob("tests/**/test_*.py")) - {Path(__file__)}
    marked = {str(path.relative_to(ROOT)) for path in files if MARKS.search(path.read_text())}
    assert set(re.findall(r"tests/\S+\.py", SCRIPT.read_text())) == marked


def closure(names):
    """Return installed distributions and their installed requirements."""
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
    needed = closure([*dependencies, *gpu_versions.TOOLS, "grpcio-status"]) - closure(["torch", "numpy"])
    carried = {Requirement(line).name for line in WHEELS.read_text().splitlines() if not line.startswith("#")}
    assert needed <= set(map(canonicalize_name, carried))


def test_the_wheels_are_pinned():
    names = re.findall(r"^[\w-]+(?:==.+)?$", WHEELS.read_text(), re.MULTILINE)
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in names if "==" not in name and name.lower() not in pinned] == []


@pytest.mark.parametrize("num_by_nvml", [1, -1])
def test_a_number_of_gpus_that_nvml_does_not_tell_is_refused(monkeypatch, capsys, num_by_nvml):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: num_by_nvml)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    monkeypatch.setattr(gpu_versions, "_driver", lambda: "580.1")
    if num_by_nvml < 0:
        with pytest.raises(SystemExit, match=r"^NVML does not tell the number of GPUs: "):
            gpu_versions._print_gpus()
    else:
        gpu_versions._print_gpus()
        told = capsys.readouterr().out
        assert f"GPUs: 1, by NVML {num_by_nvml}\nGPU 0: a GPU, 8 GiB" in told


@pytest.mark.processes
def test_steps_for_which_no_time_is_left_are_said_to_be_skipped(tmp_path):
    ended = run(tmp_path, BUDGET_S="4")
    assert ended.returncode == 1, ended.stderr
    assert (tmp_path / "summary.txt").read_text() == "skipped, the time is up: versions\n"
