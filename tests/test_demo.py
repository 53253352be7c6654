"""The demo, which is the first thing that a new user runs, keeps working."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.example_cases import run_loop

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.share(1, of="jobs of torchrun")
@pytest.mark.processes
def test_demo_shows_what_it_claims(tmp_path: Path) -> None:
    output = tmp_path / "demo-output"
    command = [sys.executable, "-m", "examples.demo", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all losses are equal" in result.stdout
    assert (output / "layouts.svg").stat().st_size > 0


def test_its_training_goes_on_with_fewer_clients(pool, tmp_path: Path) -> None:
    """What the demo starts by torchrun, in each run of the tests."""
    checkpoints, losses = tmp_path / "run", tmp_path / "losses"
    files = ["--checkpoints", str(checkpoints), "--losses", str(losses), "--steps", "4"]
    pool.values(run_loop, "train_bytes_lm", [*files, "--save-every", "2"], clients=4)
    whole = [json.loads(line)["loss"] for line in losses.read_text().splitlines()]
    fewer = ["--mesh", "data=2", "--matrix-spec", "unsharded,data", "--vector-spec", "data"]
    pool.values(run_loop, "train_bytes_lm", [*files, *fewer, "--resume", str(checkpoints / "step_2")], clients=2)
    resumed = [json.loads(line)["loss"] for line in losses.read_text().splitlines()]
    assert len(whole) == 4
    assert resumed == pytest.approx(whole[2:], rel=1e-4)
