"""Processes that are forked while saves are in flight: none uses checkpoints, none hangs, the saves commit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.shares import SEED, amount

import dtckpt
from dtckpt import errors
from dtckpt.comm import fork_guard

from . import fork_cases

NUM_CHILDREN = amount(9, 204)
RIGHTS = {"close", "shutdown", "sum"}


@pytest.mark.processes
def test_children_that_are_forked_during_saves(tmp_path):
    call = f"fork_during_saves({str(tmp_path)!r}, {SEED}, {NUM_CHILDREN})"
    script = f"from checkpoint.saving import fork_cases; fork_cases.{call}"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    children = [line.split() for line in ended.stdout.splitlines()]
    assert len(children) == NUM_CHILDREN
    for name, code, said, seconds in children:
        assert (code, said) == ("7", "done" if name in RIGHTS else "ForkedProcessError"), (name, code, said)
        assert float(seconds) < 10, (name, seconds)
    with dtckpt.CheckpointManager(tmp_path / "run") as manager:
        newest = manager.latest_step()
        assert newest > 2
        assert manager.restore().step == newest


@pytest.mark.share(1, of="jobs of torchrun")
@pytest.mark.processes
def test_children_of_clients_that_meet_others(tmp_path):
    """PyTorch alone hangs when a process exits that was forked from one with a process group of Gloo."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, "-m", "checkpoint.saving.fork_cases", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert dtckpt.CheckpointManager(tmp_path).all_steps() == list(range(fork_cases.STEPS))


def test_a_child_of_a_process_that_has_not_used_checkpoints_may(monkeypatch):
    monkeypatch.setattr(fork_guard, "_is_used", False)
    fork_guard._note_fork()
    assert not fork_guard.is_forked()
    fork_guard.claim_process()
    monkeypatch.setattr(fork_guard, "_parent", 0)
    fork_guard._note_fork()
    assert fork_guard.is_forked()
    with pytest.raises(errors.ForkedProcessError, match=f"forked from process {os.getppid()}, .* with .*'spawn'"):
        dtckpt.save_async("nowhere", {})
    monkeypatch.undo()  # before the fixtures that use checkpoints to clean up
