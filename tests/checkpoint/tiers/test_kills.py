"""A host of a job under torchrun is lost with its memory; the job goes on from the parts of the others."""

import os
import random
import shutil
import signal

import pytest
import torch
from elastic import elastic_training
from elastic.elastic_jobs import running
from support.client_calls import wait_until
from support.shares import IS_ALL, SEED

import dtckpt

pytestmark = pytest.mark.processes

CLIENTS = 4
KILLS = 3 if IS_ALL else 1
STEPS = 40 + 30 * KILLS
LOST_STEPS = 10
"""At most so many steps are done anew: a step is protected soon after it is saved, also on a busy machine."""


def spoil(root):
    """Make the root's checkpoints unreadable: a read of their elements would fail."""
    spoilt = 0
    for file in root.glob("step_*/**/*"):
        if file.is_file() and file.suffix not in (".json", ".pb") and file.stat().st_size:
            file.write_bytes(b"\xff" * file.stat().st_size)
            spoilt += 1
    assert spoilt


@pytest.mark.share(1, of="jobs of torchrun")
def test_hosts_that_are_lost(tmp_path):
    """Situations 1, 2 and 20: the root is not read, and the final state equals the state of an undisturbed run."""
    root, tier, log = tmp_path / "job", tmp_path / "tier", tmp_path / "log.txt"
    chance = random.Random(f"tiers {SEED}")
    options = "--nnodes=1", f"--nproc-per-node={CLIENTS}", f"--max-restarts={KILLS}"
    killed = []
    with running(tmp_path, [str(root), str(STEPS), str(log), str(tier)], *options) as job:
        for kill in range(KILLS):
            victim, at = chance.randrange(CLIENTS), 20 + 30 * kill + chance.randrange(10)
            last = job.wait_for(lambda done: (done.attempt, done.client) == (kill, victim) and done.step >= at)  # noqa: B023
            wait_until(lambda: list(root.glob("step_*")), within_s=60)  # a job without any would begin anew
            os.kill(last.pid, signal.SIGKILL)
            shutil.rmtree(tier / f"host{victim}", ignore_errors=True)
            if not kill:
                spoil(root)
            killed.append(last.step)
        assert job.agents[0].wait(60) == 0, job.output()

    restored = sorted(tuple(map(int, path.read_text().split())) for path in tmp_path.glob("restored_*"))
    assert len(restored) == CLIENTS * KILLS
    assert all(is_local for _, is_local in restored), job.output()
    steps = sorted({step for step, _ in restored})
    assert len(steps) == KILLS, "all clients of an attempt go on from the same step"
    assert all(step >= at - LOST_STEPS for step, at in zip(steps, killed, strict=True)), (steps, killed)

    elastic_training.train(tmp_path / "undisturbed", STEPS, tmp_path / "undisturbed.txt")
    expected, found = (dtckpt.restore(path / f"step_{STEPS - 1:08}") for path in (tmp_path / "undisturbed", root))
    assert found["step"] == expected["step"] == STEPS - 1
    assert torch.equal(found["weight"], expected["weight"])
    assert torch.equal(found["moment"], expected["moment"])
