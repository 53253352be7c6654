"""A publisher job runs the registry, where there is no coordinator: both sides are given its address."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.certificates import Authority
from support.client_calls import wait_until
from support.client_processes import Pool

import dtckpt
from dtckpt import Subscriber, errors
from dtckpt.checkpoint.live import feed_client as feed_client_module
from dtckpt.checkpoint.live import own_registry
from dtckpt.coordination.api import Member
from dtckpt.coordination.connect import set_coordination
from dtckpt.coordination.single_client import SingleClientCoordination

from . import live_cases, situation_cases
from .jobs_here import blank, has_step

pytestmark = pytest.mark.processes
WAIT_S = 120.0

PUBLISHER = """
import sys, torch, dtckpt
def weights(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 6, generator=generator) for name in ("a", "b", "c")}
address, folder, *steps = sys.argv[1:]
with dtckpt.Publisher("policy", registry=address, folder=folder, address="127.0.0.1", timeout_s=5.0) as policy:
    for step in map(int, steps):
        policy.publish(weights(step), step=step, wait=True)
        print("published", step, flush=True)
        sys.stdin.readline()
print("closed", flush=True)
"""


@pytest.fixture
def address():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """This process is a job without a coordinator."""
    for name in [name for name in os.environ if name.startswith(("DTCKPT_", "MASTER_", "PET_"))]:
        monkeypatch.delenv(name)
    coordination = SingleClientCoordination(Member("engine", 0, 1, 7))
    set_coordination(coordination)
    yield coordination
    feed_client_module.end_feed_client(coordination)
    set_coordination(None)


class PublisherProcess:
    def __init__(self, address, folder, *steps):
        env = os.environ | {"DTCKPT_JOB": "trainer", "DTCKPT_HEARTBEAT_TIMEOUT_S": "3"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, address, str(folder), *map(str, steps)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip

    def line(self):
        return self.process.stdout.readline().strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """Kill it, and return its standard error."""
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def publish(address, tmp_path):
    started = []

    def start(*steps):
        started.append(PublisherProcess(address, tmp_path / "memory", *steps))
        return started[-1]

    yield start
    for each in started:
        each.end()


def is_free(address):
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
        return True


def await_free(address):
    deadline = time.monotonic() + WAIT_S
    while not is_free(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_readers_come_first_and_come_back(address, publish):
    """A reader waits for a publisher, outlives it when it is killed, and reads from the next publisher at the same
    address."""
    target = blank()
    with Subscriber("policy", target, registry=address, timeout_s=5.0) as subscriber:
        start = time.monotonic()
        with pytest.raises(
            errors.VersionTimeoutError, match=r"no lease within 0\.2 s: no publisher has begun.*" + address
        ):
            subscriber.fetch(timeout_s=0.2)
        assert subscriber.update(timeout_s=0) is None
        assert time.monotonic() - start < WAIT_S
        first = publish(1)
        assert subscriber.update(timeout_s=WAIT_S).step == 1  # begun before the registry
        assert has_step(target, 1)
        assert first.line() == "published 1"
        location = f"live://{address}/policy"
        assert dtckpt.restore(location, blank())["a"].equal(target["a"])
        with dtckpt.open_checkpoint(f"{location}@1") as checkpoint:
            assert str(checkpoint.path) == f"{location}@1"
            assert torch.equal(checkpoint.read("a"), target["a"])
        first.process.send_signal(signal.SIGKILL)
        await_free(address)  # its registry has ended, too
        start = time.monotonic()
        with pytest.raises(errors.VersionTimeoutError, match="or it has ended"):
            subscriber.fetch(timeout_s=0.2)
        assert time.monotonic() - start < WAIT_S
        assert has_step(target, 1)
        second = publish(2, 3)
        assert subscriber.update(timeout_s=WAIT_S).step == 2
        assert second.line() == "published 2"
        second.go_on()
        assert second.line() == "published 3"
        assert subscriber.update(timeout_s=WAIT_S).step == 3
        second.go_on()
        assert second.line() == "closed"
        assert second.process.wait(WAIT_S) == 0
    await_free(address)


def test_an_address_that_is_taken(address, monkeypatch, tmp_path):
    monkeypatch.setattr(own_registry, "FREE_S", 0.2)
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        expected = f"the registry cannot listen at {address}: Address already in use; is another publisher"
        with pytest.raises(errors.ConfigError, match=expected):
            dtckpt.Publisher("policy", registry=address, folder=tmp_path, address="127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "a/b:5", "127.0.0.1:70000", ""])
def test_addresses_that_are_none(address, tmp_path):
    with pytest.raises(errors.ConfigError, match="expected host:port, with a port from 1 to 65535"):
        dtckpt.Publisher("policy", registry=address, folder=tmp_path)
    with pytest.raises(errors.ConfigError, match="expected host:port, with a port from 1 to 65535"):
        Subscriber("policy", blank(), registry=address)


@pytest.mark.slow
def test_clients_of_a_job_without_a_coordinator(address, tmp_path):
    """All of them are told what client 0 finds, and no client waits for clients that end sooner."""
    target = {name: torch.zeros(shape) for name, shape in live_cases.SHAPES.items()}
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        Pool() as publishers,
        ThreadPoolExecutor(1) as thread,
    ):
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        published = thread.submit(
            publishers.values, situation_cases.publish_at_own_registry, tmp_path, taken, address, clients=2, group=True
        )
        wait_until(lambda: (tmp_path / "published").exists() or published.done(), 180)
        dtckpt.restore(f"live://{address}/policy", target)
        live_cases.note(tmp_path, "done")
        refused = [("ConfigError", [True, False]), ("ConfigError", [False, True])]
        assert published.result() == [[*refused, "published"]] * 2
    assert all(target[name].equal(value) for name, value in live_cases.values(3).items())
    await_free(address)


def test_a_registry_that_dies_alone_and_feeds_of_one_job(address, tmp_path, monkeypatch):
    """It is started again, and knows the feeds again. Two feeds of a job share it, until the last one ends."""
    monkeypatch.setattr(own_registry, "RESTART_S", 0.1)
    monkeypatch.setenv("DTCKPT_HEARTBEAT_TIMEOUT_S", "2")
    options = {"registry": address, "folder": tmp_path, "address": "127.0.0.1", "timeout_s": 10.0}
    with dtckpt.Publisher("policy", **options) as policy:
        with dtckpt.Publisher("critic", **options) as critic:
            policy.publish({"w": torch.ones(3)}, step=1, wait=True)
            critic.publish({"w": torch.ones(4)}, step=1, wait=True)
            process = own_registry._processes[address]._process
            process.kill()
            deadline = time.monotonic() + WAIT_S
            while own_registry._processes[address]._process is process:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            policy.publish({"w": torch.full((3,), 2.0)}, step=2, wait=True)
        assert not is_free(address)
        tree = dtckpt.restore(f"live://{address}/policy")
        assert tree["w"].tolist() == [2.0] * 3
    assert is_free(address)
    assert not own_registry._processes


def test_a_registry_by_tls(address, monkeypatch, tmp_path):
    """Its options are the variables of `dtckpt-coordinator serve`, also with tokens."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    monkeypatch.setenv("DTCKPT_COORDINATOR_SERVE_TLS_CERT", str(ours.cert))
    monkeypatch.setenv("DTCKPT_COORDINATOR_SERVE_TLS_KEY", str(ours.key))
    monkeypatch.setenv("DTCKPT_COORDINATOR_SERVE_TOKENS", "engine engine-token-0123456789")
    monkeypatch.setenv("DTCKPT_COORDINATOR_TOKEN", "engine-token-0123456789")
    monkeypatch.setenv("DTCKPT_COORDINATOR_CA", str(ours.ca))
    with dtckpt.Publisher("policy", registry=address, folder=tmp_path, address="127.0.0.1") as policy:
        policy.publish({"w": torch.ones(3)}, step=1, wait=True)
        reader = SingleClientCoordination(Member("engine", 0, 1, 8, attempt=1))
        set_coordination(reader)
        monkeypatch.setenv("DTCKPT_COORDINATOR_CA", str(theirs.ca))
        with pytest.raises(errors.CoordinatorPermissionError, match="is not to be trusted, as DTCKPT_COORDINATOR_CA"):
            dtckpt.restore(f"live://{address}/policy")


def test_plaintext_away_from_this_host_is_refused(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(own_registry, "_is_loopback", lambda _: False)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    with pytest.raises(errors.ConfigError, match=r"did not start; exit code 2.*SERVE_TLS_KEY, or .*SERVE_INSECURE=1"):
        dtckpt.Publisher("policy", registry=address, folder=tmp_path, address="127.0.0.1")
    assert "expected --tls-cert and --tls-key" in capfd.readouterr().err
