"""Clients agree on their attempt, whatever earlier attempts left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.client_calls import wait_until

import dtckpt
from dtckpt import errors
from dtckpt.comm import default_process_group, process_groups, torch_private
from dtckpt.config import Config
from dtckpt.coordination.api import Member
from dtckpt.coordination.torch_store import from_environment

SOON = timedelta(seconds=30)


def config(client, num_clients, restarts=0):
    return Config.from_environ(
        {"RANK": str(client), "WORLD_SIZE": str(num_clients), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    )


def meet(store, restarts, topic="t"):
    """Let clients meet, each in a thread; return the attempt and the keys' prefix of each."""
    with ThreadPoolExecutor(len(restarts)) as threads:
        clients = [config(client, len(restarts), count) for client, count in enumerate(restarts)]
        outcomes = list(
            threads.map(lambda each: default_process_group.agree_on_attempt(store, topic, each, SOON), clients)
        )
    outcomes[0][0].set("key", "value")
    assert all(own.get("key") == b"value" for own, _ in outcomes), "clients of one attempt share its keys"
    return [attempt for _, attempt in outcomes]


def test_each_attempt_has_keys_of_its_own_and_a_higher_number():
    store = dist.HashStore()
    assert meet(store, [0, 0, 0]) == [0, 0, 0]
    assert meet(store, [1, 1, 1]) == [1, 1, 1]
    assert meet(store, [1, 1]) == [2, 2], "another number of clients, and a node that came or went: no count changes"
    assert meet(store, [0, 3, 1, 0]) == [3, 3, 3, 3], "agents count only what their own processes caused"
    assert meet(store, [0], "another topic") == [0]


def test_a_leader_that_was_killed_is_replaced():
    store = dist.HashStore()
    with pytest.raises(errors.BarrierTimeoutError, match=r"clients 1, 2 did not come within 0\.05 s") as caught:
        default_process_group.agree_on_attempt(store, "t", config(0, 3), timedelta(seconds=0.05))
    assert caught.value.missing == [1, 2]
    old = store.get("dtckpt/t/leader").decode()
    with ThreadPoolExecutor(2) as threads:
        others = [
            threads.submit(default_process_group.agree_on_attempt, store, "t", config(client, 3, 1), SOON)
            for client in (1, 2)
        ]
        wait_until(lambda: store.check([f"dtckpt/t/joined/{old}/{client}" for client in (1, 2)]))
        assert default_process_group.agree_on_attempt(store, "t", config(0, 3, 1), SOON)[1] == 1
        assert [other.result()[1] for other in others] == [1, 1]
    with pytest.raises(errors.BarrierTimeoutError, match="clients 0 did not come"):
        default_process_group.agree_on_attempt(store, "t", config(1, 3), timedelta(seconds=0.05))


@pytest.mark.parametrize("poll_s", [default_process_group.POLL_S, 0])
def test_meeting_again_is_another_meeting(monkeypatch, poll_s):
    """Client 1 is still asleep, or between two looks at the store, when client 0 begins the second one."""
    monkeypatch.setattr(default_process_group, "POLL_S", poll_s)
    rounds = 20 if poll_s else 1000
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:

        def twice(client):
            return [
                default_process_group.agree_on_attempt(store, "t", config(client, 2), SOON)[1] for _ in range(rounds)
            ]

        assert list(threads.map(twice, range(2))) == [list(range(rounds))] * 2


@pytest.mark.parametrize(
    ("missing", "match"),
    [("MASTER_ADDR", "got no MASTER_ADDR"), ("MASTER_PORT", "got no MASTER_PORT"), ("RANK", "RANK: is not set")],
)
def test_a_variable_is_missing(monkeypatch, missing, match):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(errors.ConfigError, match=match):
        dtckpt.init_process_group("gloo")


def test_no_store_listens(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.CoordinatorUnavailableError, match=r"the store at 127\.0\.0\.1:1 cannot be reached"):
        dtckpt.init_process_group("gloo", timeout=timedelta(seconds=0.2))


@pytest.fixture
def port(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    yield store.port
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_default_process_group(port):
    dtckpt.init_process_group("gloo", timeout=timedelta(seconds=77))
    assert process_groups.timeout_of(dist.group.WORLD) == timedelta(seconds=77)
    assert default_process_group.attempt_of_default_group() == 0
    with pytest.raises(errors.ConfigError, match="got a default one already"):
        dtckpt.init_process_group("gloo")
    dist.destroy_process_group()
    assert default_process_group.attempt_of_default_group() is None
    with pytest.raises(errors.ConfigError, match="Invalid device:backend pairing"):
        dtckpt.init_process_group("cpu:gloo:gloo")


def test_a_restarted_process_group_of_another_function_names_the_cure(port, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    dist.init_process_group("gloo")
    assert default_process_group.is_stale()
    coordination = from_environment(Member("job", 0, 2, 5, attempt=1), heartbeat_timeout_s=30)
    assert "call dtckpt.init_process_group instead" in caplog.text
    try:
        with pytest.raises(errors.BarrierTimeoutError, match=r"call dtckpt\.init_process_group instead"):
            coordination.barrier("b", timeout_s=0.1)
    finally:
        coordination.leave()


def test_a_process_group_that_cannot_be_connected_names_the_cure(port, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    dist.init_process_group("gloo")

    class Options:
        _timeout = SOON

    def fail(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(torch_private, "new_process_group", fail)
    with pytest.raises(errors.CoordinationError, match=r"clients 0 failed: Gloo .*; call dtckpt.init_process_group"):
        process_groups.process_group_of([0], override=("gloo", Options()))
