"""Processes that end without closing what they opened, and processes that are forked from publishers."""

import os
import subprocess
import sys

import pytest
from support.client_calls import wait_until
from support.coordinators import server_in_thread

import dtckpt

from .jobs_here import FEED, Jobs, files, publish, weights

pytestmark = pytest.mark.processes

PUBLISHER = """
import os, sys, torch, dtckpt
folder, what = sys.argv[1:]
policy = dtckpt.Publisher("policy", folder=folder, address="127.0.0.1", timeout_s=5.0)
policy.publish({"w": torch.ones(30)}, step=1, wait=True)
if what == "fork":
    child = os.fork()
    if not child:
        with policy:
            sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("published", flush=True)
sys.stdin.readline()
if what == "raise":
    raise KeyError("mine")
"""
RELAY = """
import sys, torch, dtckpt
target = {name: torch.zeros(8, 6) for name in ("a", "b", "c")}
policy = dtckpt.Subscriber("policy", target, serve=True, folder=sys.argv[1], address="127.0.0.1")
policy.update(timeout_s=60)
print("served", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def port():
    with server_in_thread(heartbeat_timeout_s=10.0) as number:
        yield number


@pytest.fixture
def start(port):
    started = []

    def run(program, *arguments, **variables):
        env = os.environ | {"DTCKPT_COORDINATOR": f"127.0.0.1:{port}"} | variables
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *map(str, arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", ["return", "raise", "fork"])
def test_a_publisher_that_is_not_closed_leaves_nothing(start, port, tmp_path, what):
    process = start(PUBLISHER, tmp_path, what, DTCKPT_JOB="trainer")
    assert process.stdout.readline() == "published\n", process.communicate()[1]
    jobs = Jobs(port, tmp_path)
    try:
        with jobs.being("engine"):  # also after the end of a child, which has closed the publisher
            assert dtckpt.restore(f"live://{FEED}")["w"].tolist() == [1.0] * 30
        assert files(tmp_path)
        _, error = process.communicate("\n")
        assert (process.returncode, "mine" in error) == ((1, True) if what == "raise" else (0, False))
        assert not [path for path in files(tmp_path) if path.name != "job.json"]
        # And the coordinator has been told.
        wait_until(lambda: not jobs.feeds("engine").list()[0].num_publishers)
    finally:
        jobs.close()


def test_a_relay_that_is_not_closed_leaves_nothing(start, port, tmp_path):
    jobs = Jobs(port, tmp_path / "memory")
    try:
        publish(jobs.publisher(), 1)
        process = start(RELAY, tmp_path / "relay", DTCKPT_JOB="engine", DTCKPT_HOST="engine host")
        assert process.stdout.readline() == "served\n", process.communicate()[1]
        (data,) = [path for path in files(tmp_path / "relay") if path.suffix == ".data"]
        assert data.stat().st_size >= sum(value.nbytes for value in weights(1).values())
        process.communicate("\n")
        assert process.returncode == 0
        assert not [path for path in files(tmp_path / "relay") if path.suffix != ".lock" and path.name != "job.json"]
    finally:
        jobs.close()
