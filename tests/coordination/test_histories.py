"""Real clients that train and save through faults of the network, the coordinator, the clients and their programs.

The first of these tests are the faults that were measured from outside; the rest are random histories, each day
others; ``DTCKPT_TESTS=all`` goes through fifty.
"""

import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.coordinators import ServerProcess
from support.shares import share

from .saving_clients import proxy
from .training_clients import HEARTBEAT_S, TIMEOUT_S, Trainers, Training

pytestmark = pytest.mark.processes

HISTORIES = share(range(50), 1, "histories of clients")
LONGEST_CUT_S = 3.0
QUICK_S = HEARTBEAT_S / 6 + 1.5
"""A heartbeat interval, and a round on a busy machine."""


class Surroundings:
    """The coordinator, and the network between it and client 1."""

    def __init__(self):
        self.server = ServerProcess(heartbeat_timeout_s=HEARTBEAT_S)
        self._threads = []

    def cut(self, network, seconds):
        network.cut()
        self._later(seconds, network.heal)

    def restart(self, delay_s, down_s):
        def kill_and_start():
            self.server.kill()
            time.sleep(down_s)
            self.server = ServerProcess(port=self.server.port, heartbeat_timeout_s=HEARTBEAT_S)

        self._later(delay_s, kill_and_start)

    def _later(self, seconds, happen):
        timer = threading.Timer(seconds, happen)
        self._threads.append(timer)
        timer.start()

    def close(self):
        for thread in self._threads:
            thread.join()
        self.server.kill()


@contextmanager
def surroundings():
    around = Surroundings()
    try:
        with proxy(around.server.port) as network:
            yield around, network
    finally:
        around.close()


def train(training, root, *, at_store=False, faults=None):
    """Let clients train; return what became of each step, by client.

    Args:
        at_store: Whether they meet at a store, not at a coordinator.
        faults: What to do with the surroundings, by step.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    with surroundings() as (around, network):
        ports = [None if at_store else around.server.port] * training.num_clients
        if not at_store:
            ports[1] = network.port
        crew = Trainers(training, ports, store.port, str(root))
        try:
            return crew.run(lambda step: (faults or {}).get(step, lambda *_: None)(around, network))
        finally:
            crew.end()


def saved_by_all(seen):
    """Return the steps that every client was told are saved; each must hold rows of that step alone."""
    for step in seen[0]:
        if step.outcome == "saved":
            assert set(step.rows) == {step.step}, seen
    return [steps[0].step for steps in zip(*seen, strict=True) if all(each.outcome == "saved" for each in steps)]


WAYS = pytest.mark.parametrize("where", ["one path", "a path each", "manager"])


@pytest.mark.share(2, of="faults of jobs")
@WAYS
@pytest.mark.parametrize("is_lockstep", [False, True])
def test_client_that_was_cut_off_for_a_while(tmp_path, where, is_lockstep):
    # Clients that run free have steps left when the network is back, also on a machine with much else to do.
    training = Training(num_steps=10 if is_lockstep else 70, where=where, is_lockstep=is_lockstep, step_s=0.15)
    seen = train(training, tmp_path, faults={3: lambda around, network: around.cut(network, 2.5)})
    saved = saved_by_all(seen)
    assert len(saved) < training.num_steps, "the network was cut"
    if is_lockstep:
        failed = sorted(set(range(training.num_steps)) - set(saved))
        assert failed[-1] <= failed[0] + 1, seen
    assert saved[-5:] == list(range(training.num_steps - 5, training.num_steps)), seen


@pytest.mark.share(2, of="faults of jobs")
@pytest.mark.parametrize("where", ["one path", "a path each"])
@pytest.mark.parametrize("is_lockstep", [False, True])
def test_client_that_gave_a_save_up_while_it_was_cut_off(tmp_path, where, is_lockstep):
    """It is cut off for longer than it looks for the coordinator, so its call ends without a verdict."""
    steps = 14 if is_lockstep else 60
    training = Training(num_steps=steps, where=where, is_lockstep=is_lockstep, step_s=0.15, patience_s=0.5)
    seen = train(training, tmp_path, faults={3: lambda around, network: around.cut(network, TIMEOUT_S + 1.5)})
    saved = saved_by_all(seen)
    assert len(saved) < steps, "the network was cut"
    assert saved[-4:] == list(range(steps - 4, steps)), seen


@pytest.mark.share(2, of="faults of jobs")
@pytest.mark.parametrize("at_store", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_client_that_skipped_a_save(tmp_path, at_store, is_async):
    training = Training(num_steps=7, is_lockstep=True, is_async=is_async, skips=((1, 2),))
    seen = train(training, tmp_path, at_store=at_store)
    assert saved_by_all(seen) == [0, 1, 4, 5, 6]
    assert [steps[3].outcome for steps in seen] == ["SaveDisagreementError"] * 2
    assert seen[0][3].text == seen[1][3].text
    assert "client 1 is at its 3rd save, the others at their 4th" in seen[0][3].text
    assert max(steps[3].seconds for steps in seen) < QUICK_S


@pytest.mark.share(2, of="faults of jobs")
@pytest.mark.parametrize("at_store", [False, True])
def test_client_that_skipped_a_save_of_a_step(tmp_path, at_store):
    training = Training(num_steps=6, is_lockstep=True, gives_step=True, skips=((1, 2),))
    assert saved_by_all(train(training, tmp_path, at_store=at_store)) == [0, 1, 3, 4, 5]


@pytest.mark.share(2, of="faults of jobs")
@pytest.mark.parametrize("at_store", [False, True])
@pytest.mark.parametrize("gives_step", [False, True])
def test_client_whose_state_cannot_be_had_while_others_run_ahead(tmp_path, at_store, gives_step):
    training = Training(num_steps=8, gives_step=gives_step, raises=((0, 2),), step_s=0.01)
    assert saved_by_all(train(training, tmp_path, at_store=at_store)) == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.share(2, of="faults of jobs")
def test_coordinator_that_is_killed_amid_saves(tmp_path):
    training = Training(num_clients=3, num_steps=14, is_lockstep=True)
    faults = {step: lambda around, _, step=step: around.restart(0.1 + 0.01 * step, 0.2) for step in (2, 5, 8)}
    saved = saved_by_all(train(training, tmp_path, faults=faults))
    failed = sorted(set(range(training.num_steps)) - set(saved))
    assert len(failed) <= 6, "of each kill at most the save that it struck, and the next"
    assert saved[-3:] == [11, 12, 13]


def random_history(seed):
    """Return a training, whether at a store, and faults."""
    draw = random.Random(seed)
    at_store = draw.random() < 0.3
    is_lockstep = draw.random() < 0.6
    gives_step = draw.random() < 0.5
    where = draw.choice(["one path", "one path", "a path each", "manager"])
    num_clients = draw.choice([2, 2, 3])
    places = [(client, step) for client in range(num_clients) for step in range(2, 6)]
    may_skip = is_lockstep or gives_step or where == "manager"
    training = Training(
        num_clients,
        14,
        where,
        is_async=draw.random() < 0.3,
        gives_step=gives_step,
        is_lockstep=is_lockstep,
        step_s=draw.choice([0.05, 0.15]),
        skips=tuple(draw.sample(places, draw.choice([0, 1]))) if may_skip else (),
        raises=tuple(draw.sample(places, draw.choice([0, 1]))),
        interrupts=tuple(draw.sample(places, draw.choice([0, 0, 1]))) if may_skip else (),
    )
    if not is_lockstep:  # a client that runs ahead while another is cut off has steps left when that is back
        training = replace(training, num_steps=30 + round(LONGEST_CUT_S / training.step_s))
    faults = {}
    if not at_store and draw.random() < 0.5:
        seconds = draw.choice([0.3, 1.5, LONGEST_CUT_S])
        faults[draw.randrange(2, 5)] = lambda around, network: around.cut(network, seconds)
    if not at_store and draw.random() < 0.4:
        delay_s, down_s = draw.uniform(0.0, 0.3), draw.choice([0.0, 0.5])
        faults[5] = lambda around, network: around.restart(delay_s, down_s)
    return training, at_store, faults


@pytest.mark.parametrize("seed", HISTORIES)
def test_random_history(tmp_path, seed):
    training, at_store, faults = random_history(seed)
    seen = train(training, tmp_path, at_store=at_store, faults=faults)
    saved = saved_by_all(seen)
    tail = 4
    assert saved[-tail:] == list(range(training.num_steps - tail, training.num_steps)), (training, seen)
    waits = [step.seconds for steps in seen for step in steps]
    assert max(waits) < 4 * TIMEOUT_S + 12.0, "of each barrier its timeout, and ten seconds to look for a coordinator"
