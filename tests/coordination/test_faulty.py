"""The faulty wrapper: transparent until told otherwise."""

import secrets

import pytest
from support.client_calls import HEARTBEAT_S
from support.faulty_coordination import Fault, FaultyCoordination

from dtckpt.coordination import torch_store
from dtckpt.coordination.api import Member
from dtckpt.coordination.single_client import SingleClientCoordination

from .contract import ManyClientsContract


class TestFaultyWithoutFaults(ManyClientsContract):
    @pytest.fixture(autouse=True)
    def meeting_point(self):
        self.store = torch_store.HashStore()

    def make(self, num_clients, job):
        return [
            FaultyCoordination(
                torch_store.TorchStoreCoordination(
                    self.store,
                    Member(job, client, num_clients, incarnation=secrets.randbits(60)),
                    heartbeat_timeout_s=HEARTBEAT_S,
                )
            )
            for client in range(num_clients)
        ]

    def silence(self, client):
        client._inner._send = lambda store, state: None


def test_raises_at_the_chosen_call():
    coordination = FaultyCoordination(SingleClientCoordination(), {("barrier", 1): Fault(OSError("gone"))})
    first = coordination.barrier("b", timeout_s=1)
    with pytest.raises(OSError, match="gone"):
        coordination.barrier("b", timeout_s=1)
    assert coordination.barrier("b", timeout_s=1).generation == first.generation + 1
    assert coordination.calls["barrier"] == 3


def test_can_lose_the_answer():
    coordination = FaultyCoordination(
        SingleClientCoordination(), {("barrier", 0): Fault(OSError("gone"), after_call=True)}
    )
    with pytest.raises(OSError, match="gone"):
        coordination.barrier("lost answer", timeout_s=1)
    assert coordination.barrier("lost answer", timeout_s=1).generation == 1


def test_can_wait_and_drop_heartbeats():
    from dtckpt.coordination.api import Progress

    called = []
    coordination = FaultyCoordination(
        SingleClientCoordination(), {("status", 0): Fault(before=lambda: called.append(1))}
    )
    coordination.drop_heartbeats.set()
    coordination.heartbeat(Progress("write"))
    assert coordination.status().tasks[0].progress == Progress()
    assert called == [1]
