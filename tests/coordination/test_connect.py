"""Which coordination a process gets, and its life in the process."""

import os

import pytest
from support.coordinators import server_in_thread

from dtckpt import errors
from dtckpt.coordination import connect, identity
from dtckpt.coordination.api import Vote
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.single_client import SingleClientCoordination

RELEVANT = ("DTCKPT_", "DTENSOR_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "PET_")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith(RELEVANT)]:
        monkeypatch.delenv(name)
    connect.set_coordination(None)
    yield
    connect.shutdown_multi_client()


def test_one_client_needs_nobody():
    current = connect.current_coordination()
    assert isinstance(current, SingleClientCoordination)
    assert connect.current_coordination() is current


def test_coordinator_is_chosen_by_variable(monkeypatch):
    monkeypatch.setenv("DTCKPT_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DTCKPT_HEARTBEAT_TIMEOUT_S", "7.5")
    monkeypatch.setenv("DTCKPT_JOB", "train")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    chosen = connect.connect()
    assert isinstance(chosen, GrpcCoordination)
    assert chosen.heartbeat_timeout_s == 7.5
    member = chosen.member
    assert (member.job, member.client, member.num_clients, member.attempt) == ("train", 1, 2, 3)
    assert member.incarnation == identity.incarnation()


def test_attempt_and_job_have_an_order(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert connect.connect().member.job == "run"
    monkeypatch.setenv("DTENSOR_JOB_NAME", "worker")
    assert connect.connect().member.job == "worker"
    monkeypatch.setenv("DTCKPT_JOB", "train")
    assert connect.connect().member.job == "train"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("DTCKPT_ATTEMPT", "5")
    assert connect.connect().member.attempt == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DTCKPT_ATTEMPT", "-1"),
        ("DTCKPT_ATTEMPT", "x"),
        ("DTCKPT_HEARTBEAT_TIMEOUT_S", "0"),
        ("DTCKPT_HEARTBEAT_TIMEOUT_S", "nan"),
        ("DTCKPT_HEARTBEAT_TIMEOUT_S", "soon"),
        ("DTCKPT_COORDINATOR", "nowhere"),
    ],
)
def test_bad_variables_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(errors.ConfigError, match=value):
        connect.connect()


def test_many_clients_without_a_meeting_place_are_told_what_to_do(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(errors.ConfigError, match=r"2 clients have no place to meet: .*MASTER_ADDR.*DTCKPT_COORDINATOR"):
        connect.connect()


def test_initialize_once():
    assert connect.initialize_multi_client() is None
    with pytest.raises(errors.ConfigError, match="already initialized"):
        connect.initialize_multi_client()
    connect.shutdown_multi_client()
    connect.shutdown_multi_client()
    connect.initialize_multi_client()


def test_initialize_with_a_coordinator_and_again():
    with server_in_thread() as port:
        for generation in range(2):
            connect.initialize_multi_client(f"127.0.0.1:{port}")
            verdict = connect.current_coordination().barrier("b", Vote(payload=b"x"), timeout_s=10, collect=True)
            assert (verdict.generation, verdict.payloads) == (generation, {0: b"x"})
            connect.shutdown_multi_client()


def test_failed_initialize_leaves_nothing_behind():
    with pytest.raises(errors.CoordinatorUnavailableError):
        connect.initialize_multi_client("127.0.0.1:1", heartbeat_timeout_s=0.5)
    assert isinstance(connect.current_coordination(), SingleClientCoordination)


def test_a_client_need_not_register_at_once():
    connect.initialize_multi_client("127.0.0.1:1", heartbeat_timeout_s=0.5, enable_coordination_service=False)
    with pytest.raises(errors.CoordinatorUnavailableError):
        connect.job_status()


@pytest.mark.parametrize("value", [True, False])
def test_what_tensorflow_passes_by_position_is_refused(value):
    with pytest.raises(errors.ConfigTypeError, match="expected host:port; pass enable_coordination_service"):
        connect.initialize_multi_client(value)


def test_a_late_goodbye_of_an_earlier_attempt_counts_for_nothing(monkeypatch):
    """A process that joins a newer attempt at the same place stays in it."""
    with server_in_thread() as port:
        monkeypatch.setenv("DTCKPT_COORDINATOR", f"127.0.0.1:{port}")
        before, now = connect.connect(), connect.connect(attempt=1)
        before.register()
        now.register()
        before.leave()
        assert [task.state for task in now.status().tasks] == ["registered"]
        now.leave()
