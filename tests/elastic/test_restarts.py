"""Jobs whose clients are killed and that torchrun restarts end with the values of a run that nothing disturbed."""

import contextlib
import os
import random
import signal
import time

import pytest
import torch
from support.coordinators import server_process
from support.shares import IS_ALL, SEED

import dtckpt

from . import elastic_training
from .elastic_jobs import running

pytestmark = pytest.mark.processes

RESTART_S = 10.0
"""Longest time from a kill to the next step; on a busy machine, twice what the job took to start at first."""
KILLS, PARTS = (10, 2) if IS_ALL else (1, 1)
STEPS = 60 + 5 * KILLS
CLIENTS = 3 if IS_ALL else 2
SOON_LOST = {"DTCKPT_HEARTBEAT_TIMEOUT_S": "5"}
"""The survivors of a node are not told that it has gone, so they wait that long for its clients."""


def validate_values(folder, tmp_path):
    """Check that a job ended with the values of a run without a fault."""
    elastic_training.train(tmp_path / "undisturbed", STEPS, tmp_path / "undisturbed.txt")
    expected, found = (dtckpt.restore(path / f"step_{STEPS - 1:08}") for path in (tmp_path / "undisturbed", folder))
    assert found["step"] == expected["step"] == STEPS - 1
    assert torch.equal(found["weight"], expected["weight"])
    assert torch.equal(found["moment"], expected["moment"])


def kill_some(job, chance):
    """Kill a client at each of some steps; return how long it took after each kill until a step was done."""
    seconds: list[float] = []
    for at in sorted(chance.sample(range(1, STEPS - 1), KILLS)):
        victim = chance.randrange(CLIENTS)
        last = job.wait_for(lambda done: done.attempt == len(seconds) and done.client == victim and done.step >= at)  # noqa: B023
        killed_s = time.time()
        os.kill(last.pid, signal.SIGKILL)
        seconds.append(job.wait_for(lambda done: done.attempt == last.attempt + 1).time_s - killed_s)  # noqa: B023
    return seconds


@pytest.mark.share(1, of="jobs of torchrun")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("meeting", ["store", "coordinator"])
def test_killed_clients(tmp_path, meeting, part):
    folder, log = tmp_path / "job", tmp_path / "log.txt"
    chance = random.Random(f"{meeting} {part} {SEED}")
    options = "--nnodes=1", f"--nproc-per-node={CLIENTS}", f"--max-restarts={KILLS}"

    with contextlib.ExitStack() as stack:
        env = {}
        if meeting == "coordinator":
            server = stack.enter_context(server_process(heartbeat_timeout_s=60))
            env["DTCKPT_COORDINATOR"] = f"127.0.0.1:{server.port}"
        job = stack.enter_context(running(tmp_path, [str(folder), str(STEPS), str(log)], *options, env=env))
        seconds = kill_some(job, chance)
        assert job.agents[0].wait(60) == 0, job.output()
    print(f"{meeting}: seconds from {KILLS} kills to the next step: {[round(each, 1) for each in seconds]}")
    validate_values(folder, tmp_path)
    assert max(seconds) < max(RESTART_S, 2 * (job.done()[0].time_s - job.began_s)), seconds


@pytest.mark.skipif(not IS_ALL, reason="DTCKPT_TESTS=all runs it")
def test_nodes_that_count_differently_and_one_that_goes(tmp_path):
    """Torchrun's agents count only restarts that their own processes cause, and none when a node comes or goes."""
    folder, log = tmp_path / "job", tmp_path / "log.txt"
    options = "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3"
    with running(tmp_path, [str(folder), str(STEPS), str(log)], *options, nodes=2, env=SOON_LOST) as job:
        # One node may begin before the other comes, which is a restart, too.
        first = job.wait_for(lambda done: (done.num_clients, done.client) == (4, 3))
        os.kill(first.pid, signal.SIGKILL)
        job.wait_for(lambda done: (done.attempt, done.num_clients) == (first.attempt + 1, 4))
        job.kill_node(1)
        job.wait_for(lambda done: (done.attempt, done.num_clients) == (first.attempt + 2, 2))
        assert job.agents[0].wait(60) == 0, job.output()
    validate_values(folder, tmp_path)
