"""Clients that may do without their coordinator: all of them do, or none."""

import secrets
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.client_calls import (
    Running,
    at,
    leave_all,
    same_error,
    together,
    wait_until,
)
from support.coordinators import server_in_thread, server_process
from torch._C._distributed_c10d import HashStore

from dtckpt import errors
from dtckpt.coordination import connect
from dtckpt.coordination.api import BEGIN, Member, Progress, Vote
from dtckpt.coordination.fallback import FallbackCoordination
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.single_client import SingleClientCoordination
from dtckpt.coordination.torch_store import TorchStoreCoordination
from dtckpt.coordination.verdicts import PASSED, Decision

from .saving_clients import HEARTBEAT_S, NUM_CLIENTS, Halt, proxy, savers
from .test_outages import BARRIER, LATE, VICTIM, is_whole, missing

TIMEOUT_S = 3.0
"""Of heartbeats, where clients are threads; they look at the store six times as often."""


def clients_at(*ports, give_up_s=0.3, store=None):
    """Clients that give the coordinator up quickly."""
    store = HashStore() if store is None else store
    made = []
    for client, port in enumerate(ports):
        member = Member("job", client, len(ports), secrets.randbits(60))
        primary = GrpcCoordination(f"127.0.0.1:{port}", member, heartbeat_timeout_s=TIMEOUT_S)
        secondary = TorchStoreCoordination(store, member, heartbeat_timeout_s=TIMEOUT_S)
        made.append(FallbackCoordination(primary, secondary))
        primary.give_up_s = give_up_s
    return made


@contextmanager
def cut_off_clients(num_clients):
    """Clients of which the last one's network can be cut, a coordinator, and that network."""
    with server_in_thread(heartbeat_timeout_s=TIMEOUT_S) as port, proxy(port) as network:
        clients = clients_at(*[port] * (num_clients - 1), network.port)
        together(clients, lambda client: client.register())
        yield clients, network
        network.flowing.set()
        leave_all(clients)


def test_all_leave_a_coordinator_that_one_cannot_reach(caplog):
    with cut_off_clients(3) as (clients, network):
        network.flowing.clear()
        results = together(clients, at("b", timeout_s=20))
        outcomes = {(type(result.error), str(result.error)) for result in results.values()}
        assert len(outcomes) == 1, results
        wait_until(lambda: all(client.has_fallen_back for client in clients))
        assert len([text for text in caplog.messages if "from now on all clients meet at the store" in text]) == 3
        assert "client 2 (job/2) gave it up: the coordinator at 127.0.0.1" in caplog.text
        after = together(
            clients, lambda c: c.barrier("c", Vote(payload=b"%d" % c.member.client), timeout_s=20, collect=True)
        )
        for result in after.values():
            assert result.value.payloads == {0: b"0", 1: b"1", 2: b"2"}
        clients[0].heartbeat(Progress("write", 3))
        wait_until(lambda: clients[1].status().tasks[0].progress.step == 3)


@pytest.mark.parametrize("collect", [True, False])
def test_verdict_that_one_was_not_told_is_at_the_store(collect):
    """The last client arrived, and all others were let through."""
    with cut_off_clients(2) as (clients, network):
        clients[1]._primary.give_up_s = 20.0
        waiting = Running(clients[1:], lambda c: c.barrier("b", Vote(payload=b"last"), timeout_s=20, collect=collect))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(0,)])
        network.flowing.clear()
        passed = together(clients[:1], lambda c: c.barrier("b", Vote(payload=b"first"), timeout_s=20, collect=collect))
        clients[1]._give_up(errors.CoordinatorUnavailableError("nobody answers"))
        network.flowing.set()  # lets the call that waits end; what it is told comes too late
        told = waiting.results()[1]
        assert told.error is None
        assert told.value == passed[0].value
        assert told.value.payloads == ({0: b"first", 1: b"last"} if collect else {})
        wait_until(lambda: clients[0].has_fallen_back)
        again = together(clients, at("b"))
        assert [result.value.generation for result in again.values()] == [1, 1]


def test_operation_goes_on_though_one_was_not_told_at_the_coordinator_that_it_began(monkeypatch):
    """At the store the others wait for that client, which has not given the operation up."""
    with cut_off_clients(2) as (clients, network):
        clients[1]._primary.give_up_s = 20.0
        untold = Running(clients[1:], at("save/begin", operation=BEGIN, timeout_s=20))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(0,)])
        network.flowing.clear()
        (told,) = together(clients[:1], at("save/begin", operation=BEGIN, timeout_s=20)).values()
        clients[0]._give_up(errors.CoordinatorUnavailableError("nobody answers"))
        looks, judge = [], clients[0]._secondary._is_elsewhere
        monkeypatch.setattr(clients[0]._secondary, "_is_elsewhere", lambda *of: looks.append(of) or judge(*of))
        join, may_join = clients[1]._secondary.barrier, threading.Event()
        monkeypatch.setattr(
            clients[1]._secondary, "barrier", lambda *of, **options: may_join.wait(20) and join(*of, **options)
        )
        written = Running(clients[:1], at("save/written", operation=told.value.operation, timeout_s=20))
        clients[1]._give_up(errors.CoordinatorUnavailableError("nobody answers"))
        wait_until(lambda: looks)
        may_join.set()
        (begun,) = untold.results().values()
        assert begun.error is None
        assert begun.value.operation == told.value.operation
        last = together(clients[1:], at("save/written", operation=begun.value.operation, timeout_s=20))
        assert [result.error for result in (*written.results().values(), *last.values())] == [None, None]


def test_verdict_that_comes_late_to_the_store_is_not_that_of_the_next_operation():
    """A round there that was opened by a call made there waits for nothing that a coordinator has decided."""
    store = HashStore()
    clients = [
        TorchStoreCoordination(store, Member("job", client, 2, 7 + client), heartbeat_timeout_s=TIMEOUT_S)
        for client in range(2)
    ]
    old = Decision("save/begin", "", (0, 1), "round-of-the-coordinator", PASSED, {0: b"old", 1: b"old"})

    def begin_with(payload):
        return at("save/begin", operation=BEGIN, vote=Vote(payload=payload), collect=True, timeout_s=20)

    first = Running(clients[:1], begin_with(b"new"))
    wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(1,)])
    clients[1].publish(old)
    last = together(clients[1:], begin_with(b"new"))
    results = [*first.results().values(), *last.values()]
    assert [result.value.payloads for result in results] == [{0: b"new", 1: b"new"}] * 2
    leave_all(clients)


def test_failure_that_one_was_not_told_is_at_the_store():
    with cut_off_clients(2) as (clients, network):
        network.flowing.clear()
        vote = Vote(ok=False, code="StorageFullError", reason="disk full")
        first = together(clients[:1], lambda c: c.barrier("b", vote, timeout_s=20))
        clients[1]._give_up(errors.CoordinatorUnavailableError("nobody answers"))
        wait_until(lambda: clients[0].has_fallen_back)
        second = together(clients[1:], at("b", timeout_s=20))
        same_error({**first, **second}, errors.StorageFullError, "^client 0: disk full$")


def test_payloads_that_nobody_asked_for_are_not_made_up():
    with cut_off_clients(2) as (clients, _):
        waiting = Running(clients[1:], at("b", timeout_s=20))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(0,)])
        together(clients[:1], at("b", timeout_s=20))
        waiting.results()
        clients[0]._give_up(errors.CoordinatorUnavailableError("nobody answers"))
        wait_until(lambda: clients[1].has_fallen_back)
        with pytest.raises(errors.BarrierConflictError, match="no client there asked for the payloads"):
            clients[1]._secondary.barrier("b", timeout_s=20, collect=True, moved_from="")  # as if it had not been told


def test_a_vote_about_an_unreachable_coordinator_is_only_a_vote():
    with cut_off_clients(2) as (clients, _):
        error = errors.CoordinatorUnavailableError("another one, of another job")
        results = together(clients, lambda c: c.barrier("b", Vote.of_error(error), timeout_s=20))
        same_error(results, errors.CoordinatorUnavailableError, "client .: another one")
        assert not any(client.has_fallen_back for client in clients)


def test_late_client_follows_the_decision():
    """It registers at the store at once, although it sees a coordinator."""
    store = HashStore()
    with server_in_thread(heartbeat_timeout_s=TIMEOUT_S) as port:
        early, late = clients_at(1, port, store=store)
        early.register()
        assert early.has_fallen_back
        late.register()
        assert late.has_fallen_back
        assert not any(result.error for result in together([early, late], at("b")).values())
        leave_all([early, late])


def test_neither_coordinator_nor_store():
    with server_in_thread(heartbeat_timeout_s=TIMEOUT_S) as port:
        (client,) = clients_at(port)
        client.register()

    def record_once(*_):
        raise errors.CoordinatorUnavailableError("the store where clients meet cannot be reached: it is gone")

    client._secondary.record_once = record_once
    expected = (
        r"^the coordinator at .* cannot be reached.*; and there is nothing to fall back to: the store .* it is gone$"
    )
    with pytest.raises(errors.CoordinatorUnavailableError, match=expected):
        client.barrier("b", timeout_s=5)
    assert not client.has_fallen_back
    client.leave()


def test_options(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "DTCKPT_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(connect.connect({}, fallback="process_group"), SingleClientCoordination)
    env = {"DTCKPT_COORDINATOR": "127.0.0.1:1", "DTCKPT_COORDINATOR_FALLBACK": "process_group"}
    assert isinstance(connect.connect(env), FallbackCoordination)
    assert isinstance(connect.connect(env, fallback=""), GrpcCoordination)
    with pytest.raises(errors.ConfigError, match=r"fallback.*is 'store'; expected process_group"):
        connect.connect(env, fallback="store")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(errors.ConfigError, match="have no place to meet"):
        connect.connect(env)


# --- with real processes --------------------------------------------------------------------------------------------


@contextmanager
def saving(path):
    """Clients that save: all but `LATE` wait at `BARRIER`. Yields coordinator, the victim's network, clients."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    with (
        server_process(heartbeat_timeout_s=HEARTBEAT_S) as server,
        proxy(server.port) as network,
        savers(server.port, server.port, network.port, store_port=store.port) as crew,
    ):
        for client in range(NUM_CLIENTS):
            crew.tell(client, "save", str(path), Halt(BARRIER, "before") if client == LATE else None)
        assert crew.answer(LATE) == "halted"
        wait_until(lambda: missing(server, BARRIER) == (LATE,))
        yield server, network, crew


@pytest.mark.processes
def test_saves_go_on_when_the_coordinator_is_gone_for_good(tmp_path):
    """Also the call that is under way."""
    with saving(tmp_path / "first") as (server, _, crew):
        server.kill()
        crew.release(LATE)
        assert {crew.answer(client)[0] for client in range(NUM_CLIENTS)} == {"saved"}
        assert crew.all("has fallen back", None) == [True] * NUM_CLIENTS
        assert crew.all("save", str(tmp_path / "second")) == ["saved"] * NUM_CLIENTS
    assert is_whole(tmp_path / "first")
    assert is_whole(tmp_path / "second")


@pytest.mark.processes
def test_one_process_is_cut_off_from_the_coordinator(tmp_path):
    """The others see it; they fail in the same way as that one, and save with it at the store from then on."""
    with saving(tmp_path / "first") as (server, network, crew):
        network.flowing.clear()
        first = crew.answer(0)  # the coordinator takes the victim for lost
        crew.release(LATE)
        answers = [first, crew.answer(LATE), crew.answer(VICTIM)]
        (failure,) = {answer[:3] for answer in answers}
        assert failure[0] == "ClientLostError", failure
        assert failure[2] == (VICTIM,)
        deadline = time.monotonic() + 20.0
        while not all(crew.all("has fallen back", None)):
            assert time.monotonic() < deadline
        assert not is_whole(tmp_path / "first")
        assert crew.all("save", str(tmp_path / "second")) == ["saved"] * NUM_CLIENTS
        assert server.process.poll() is None
        assert is_whole(tmp_path / "second")
