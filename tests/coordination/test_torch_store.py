"""Clients that meet at a store: in threads, over memory and over TCP."""

import secrets
import threading
from collections import deque
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.client_calls import (
    HEARTBEAT_S,
    Running,
    at,
    leave_all,
    same_error,
    together,
    wait_until,
)

from dtckpt import errors
from dtckpt.coordination import torch_store
from dtckpt.coordination.api import Member
from dtckpt.coordination.torch_store import TorchStoreCoordination

from .contract import ManyClientsContract


def clients_at(store, num_clients, job, **options):
    return [
        TorchStoreCoordination(
            store,
            Member(job, client, num_clients, incarnation=secrets.randbits(60)),
            heartbeat_timeout_s=HEARTBEAT_S,
            **options,
        )
        for client in range(num_clients)
    ]


class StoreContract(ManyClientsContract):
    def make(self, num_clients, job):
        return clients_at(self.store, num_clients, job)

    def silence(self, client):
        client._send = lambda store, state: None


class ReusedConnections:
    """A TCPStore whose clones are connections made in advance.

    A TCPStore asks the name server for the name of every peer, in the only thread that serves all; each answer that
    gets lost holds all clients for seconds. A job opens a few connections, once; these tests would open hundreds.
    """

    def __init__(self, store, num_connections):
        self.idle = deque(store.clone() for _ in range(num_connections))
        self.store = store

    def clone(self):
        return ReusedConnection(self)


class ReusedConnection:
    def __init__(self, pool):
        self._pool = pool
        self._store = pool.idle.popleft()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def __del__(self):
        self._pool.idle.append(self._store)


@pytest.fixture(scope="module")
def tcp_store():
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    return ReusedConnections(store, 48)


class TestTcpStore(StoreContract):
    @pytest.fixture(autouse=True)
    def meeting_point(self, tcp_store):
        self.store = tcp_store


class TestPrefixOverMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def meeting_point(self):
        self.store = dist.PrefixStore("default_pg/0/", dist.HashStore())


def test_keys_do_not_pile_up():
    store = dist.HashStore()
    clients = clients_at(store, 2, "job")
    for step in range(3 * torch_store.KEPT_BARRIERS):
        together(clients, at(f"step {step}"))
    per_barrier = 6  # open, verdict, count, two arrivals, and what a barrier that just ends may still add
    left_behind = 3 * torch_store.KEPT_BARRIERS  # the emptied "open" key of each name
    assert store.num_keys() < per_barrier * (torch_store.KEPT_BARRIERS + 1) + left_behind + 4
    leave_all(clients)


def test_forgotten_barrier_does_not_look_open():
    clients = clients_at(dist.HashStore(), 2, "job")
    for name in ["b", *map(str, range(2 * torch_store.KEPT_BARRIERS)), "b"]:
        assert not any(result.error for result in together(clients, at(name)).values())
    leave_all(clients)


def test_restarted_client_meets_the_others_whatever_has_been_forgotten():
    store = dist.HashStore()
    clients = clients_at(store, 2, "job")
    for name in ["b", "b", *map(str, range(2 * torch_store.KEPT_BARRIERS))]:
        together(clients, at(name))
    clients[1].leave()
    reborn = clients_at(store, 2, "job")[1]
    reborn.register()
    results = together([clients[0], reborn], at("b"))
    assert [result.value.generation for result in results.values()] == [2, 2], results
    leave_all([clients[0], reborn])


def test_silent_store_is_reported(monkeypatch):
    """A store that never answers must not hang its clients: neither clients that wait nor clients that begin."""
    store = dist.HashStore()
    (first, second) = clients_at(store, 2, "job", host_client=0)
    second.register()
    never = threading.Event()
    monkeypatch.setattr(torch_store.StoreConnection, "_ask", _freeze(torch_store.StoreConnection._ask, never))
    with pytest.raises(errors.ClientLostError, match=r"client 0 .*whose process hosts the store.*not answered for 1 s"):
        second.barrier("b", timeout_s=60)
    with pytest.raises(errors.CoordinatorUnavailableError, match="not answered for 1 s"):
        first.status()
    never.set()
    second.leave()


def test_host_of_the_store_does_not_wait_again_for_a_client_that_was_named_lost():
    """It watches the others all the time, not only from when it leaves."""
    timeout_s = 3.0
    store, job = dist.HashStore(), secrets.token_hex(4)
    host, watching, lost = (
        TorchStoreCoordination(
            store,
            Member(job, client, 3, incarnation=secrets.randbits(60)),
            heartbeat_timeout_s=timeout_s,
            host_client=0,
        )
        for client in range(3)
    )
    together([host, watching, lost], lambda client: client.register())
    lost._send = lambda store, state: None
    first = Running([watching], at("b"))  # it looks after the others, and the host after it alone
    wait_until(lambda: watching.status().barriers)
    same_error({**first.results(), **together([host], at("b"))}, errors.ClientLostError, "client 2")
    left = together([host, watching], lambda client: client.leave())
    assert max(result.seconds for result in left.values()) < timeout_s / 6 + 1.0, left


def _freeze(ask, release):
    def frozen(link, work):
        def late(store):
            release.wait(20)
            return work(store)

        return ask(link, late)

    return frozen


def test_local_group_meets():
    group = torch_store.local_group(4)
    results = together(group, at("b", collect=True))
    assert [sorted(result.value.payloads) for result in results.values()] == [[0, 1, 2, 3]] * 4
    leave_all(group)
