"""The demo, which is the first thing that a new user runs, keeps working."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.processes
def test_demo_shows_what_it_claims(tmp_path: Path) -> None:
    output = tmp_path / "demo-output"
    command = [sys.executable, "-m", "examples.demo", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all losses are equal" in result.stdout
    assert (output / "layouts.svg").stat().st_size > 0
