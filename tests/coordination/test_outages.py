"""Real processes that save while one of them, the coordinator or the network is gone for a while, or for good.

What dies or freezes, and when, is tried out in full in `test_outage_matrix`.
"""

import signal
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.client_calls import wait_until
from support.coordinators import server_process

import dtckpt
from dtckpt.coordination.api import Member
from dtckpt.coordination.grpc_calls import CALL_TIMEOUT_S
from dtckpt.coordination.grpc_client import GrpcCoordination

from .saving_clients import HEARTBEAT_S, NUM_CLIENTS, Halt, proxy, savers

pytestmark = pytest.mark.processes

VICTIM, LATE = 2, 1
BARRIER, NEXT = "save/written", "save/merged"
MOMENTS = ("before", "in", "after")
TOLD_WITHIN_S = HEARTBEAT_S + 1.5


@contextmanager
def saving(path, moment):
    """Clients that save; yields them when the victim is before, in or after the barrier, and `LATE` before it if in."""
    halted, halt = halted_in(moment), Halt(BARRIER, "after" if moment == "after" else "before")
    with (
        server_process(heartbeat_timeout_s=HEARTBEAT_S) as server,
        proxy(server.port) as network,
        savers(server.port, server.port, network.port) as crew,
    ):
        for client in range(NUM_CLIENTS):
            crew.tell(client, "save", str(path), halt if client == halted else None)
        assert crew.answer(halted) == "halted"
        if moment == "in":
            wait_until(lambda: missing(server, BARRIER) == (LATE,))
        if moment == "after":  # for all: they are at the next one
            wait_until(lambda: missing(server, NEXT) == (VICTIM,))
        yield server, network, crew


def halted_in(moment):
    return LATE if moment == "in" else VICTIM


def status(server, job="job"):
    """Return the job as the coordinator shows it to a caller that is no client."""
    observer = GrpcCoordination(f"127.0.0.1:{server.port}", Member(job, 0, NUM_CLIENTS, 1))
    try:
        return observer.status()
    finally:
        observer.leave()


def missing(server, name, job="job"):
    """Return who has not arrived at an open barrier."""
    return next((barrier.missing for barrier in status(server, job).barriers if barrier.name == name), None)


def is_whole(path, size=NUM_CLIENTS * 1000):
    """Return whether there is a checkpoint; a checkpoint must be whole."""
    try:
        with dtckpt.open_checkpoint(path) as checkpoint:
            assert checkpoint.verify().is_sound
            assert checkpoint.read("range").tolist() == list(range(size))
            return True
    except (dtckpt.errors.CheckpointNotFoundError, dtckpt.errors.CheckpointIncompleteError):
        return False


def victim_is_named(crew, moment, gone_at):
    """The others fail, soon, all in the same way; return how."""
    first = crew.answer(0)
    if moment == "in":
        crew.release(LATE)  # earlier, and the barrier would pass
    answers = [first, crew.answer(LATE)]
    assert max(answer[3] for answer in answers) - gone_at < TOLD_WITHIN_S
    (failure,) = {answer[:3] for answer in answers}
    assert failure[0] == "ClientLostError", failure
    assert f"client {VICTIM} (job/{VICTIM}) sent no heartbeat for" in failure[1]
    assert failure[2] == (VICTIM,)
    return failure


def test_slow_client_is_shown_with_what_it_does(tmp_path):
    """Its heartbeats go on while it is in a save and does not get on, with the phase and the bytes it has done."""
    with saving(tmp_path / "step", "before") as (server, _, crew):
        time.sleep(1.5 * HEARTBEAT_S)  # for this long it does not get on
        task = status(server).tasks[VICTIM]
        assert task.state == "registered"
        assert task.heartbeat_age_s < HEARTBEAT_S
        assert task.progress.phase == BARRIER
        assert task.progress.bytes_done == task.progress.bytes_total >= 8000
        crew.release(VICTIM)
        assert {crew.answer(client)[0] for client in range(NUM_CLIENTS)} == {"saved"}


@pytest.mark.share(1, of="outages")
@pytest.mark.parametrize("moment", MOMENTS)
def test_client_is_cut_off_and_comes_back(tmp_path, moment):
    """It is told what the others were told, and may take part again."""
    path = tmp_path / "step"
    with saving(path, moment) as (_, network, crew):
        network.flowing.clear()
        failure = victim_is_named(crew, moment, time.monotonic())
        network.flowing.set()
        if moment != "in":
            crew.release(VICTIM)
        assert crew.answer(VICTIM)[:3] == failure
        assert is_whole(path) == (moment == "after")
        assert crew.all("save", str(tmp_path / "next")) == ["saved"] * NUM_CLIENTS
        assert is_whole(tmp_path / "next")


@pytest.mark.share(1, of="outages")
@pytest.mark.parametrize("how", ["frozen", "cut off"])
def test_client_is_gone_for_less_than_the_timeout(tmp_path, how):
    with saving(tmp_path / "step", "in") as (_, network, crew):
        if how == "frozen":
            crew.signal(VICTIM, signal.SIGSTOP)
        else:
            network.flowing.clear()
        time.sleep(HEARTBEAT_S / 4)  # for this long it is away
        crew.signal(VICTIM, signal.SIGCONT)
        network.flowing.set()
        crew.release(LATE)
        assert {crew.answer(client)[0] for client in range(NUM_CLIENTS)} == {"saved"}
    assert is_whole(tmp_path / "step")


@pytest.mark.share(1, of="outages")
def test_coordinator_is_gone_for_good(tmp_path):
    """A save fails with a clear error, in time; training goes on, and may save again with or without a coordinator."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    with server_process(heartbeat_timeout_s=HEARTBEAT_S) as server, savers(*[server.port] * NUM_CLIENTS) as crew:
        assert crew.all("save", str(tmp_path / "first")) == ["saved"] * NUM_CLIENTS
        server.kill()
        gone_at = time.monotonic()
        for client in range(NUM_CLIENTS):
            crew.tell(client, "save impatiently", str(tmp_path / "second"))
        for client in range(NUM_CLIENTS):
            error, text, _, at = crew.answer(client)
            assert error == "CoordinatorUnavailableError"
            assert text.startswith(f"the coordinator at 127.0.0.1:{server.port} cannot be reached: UNAVAILABLE")
            assert at - gone_at < 1.0 + CALL_TIMEOUT_S + 5.0
        assert is_whole(tmp_path / "first")
        assert not is_whole(tmp_path / "second")
        with server_process(port=server.port, heartbeat_timeout_s=HEARTBEAT_S) as again:
            assert crew.all("save", str(tmp_path / "third")) == ["saved"] * NUM_CLIENTS
            again.kill()
        assert crew.all("go on without", store.port) == ["gone on"] * NUM_CLIENTS
        assert crew.all("save", str(tmp_path / "fourth")) == ["saved"] * NUM_CLIENTS
        assert is_whole(tmp_path / "third")
        assert is_whole(tmp_path / "fourth")


def test_held_interpreter_lock():
    """A call that lets no thread run for less than the timeout does no harm; after a longer one the client is back."""
    with server_process(heartbeat_timeout_s=HEARTBEAT_S) as server, savers(*[server.port] * NUM_CLIENTS) as crew:
        crew.tell(VICTIM, "hold_gil", HEARTBEAT_S / 2)
        crew.tell(0, "meet", "first")
        crew.tell(LATE, "meet", "first")
        assert crew.answer(VICTIM)[0] == "held"
        crew.tell(VICTIM, "meet", "first")
        assert {crew.answer(client)[0] for client in range(NUM_CLIENTS)} == {"met"}

        crew.tell(VICTIM, "hold_gil", 2 * HEARTBEAT_S)
        crew.tell(0, "meet", "second")
        crew.tell(LATE, "meet", "second")
        (failure,) = {crew.answer(client)[:3] for client in (0, LATE)}
        assert failure[0] == "ClientLostError"
        assert crew.answer(VICTIM)[0] == "held"
        crew.tell(VICTIM, "meet", "second")
        error, text, clients, _ = crew.answer(VICTIM)
        assert (error, clients) == (failure[0], failure[2])
        assert text.endswith(failure[1])  # of an earlier round, it may say before
        assert crew.all("meet", "second") == ["met"] * NUM_CLIENTS
