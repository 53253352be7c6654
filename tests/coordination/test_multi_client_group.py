"""`initialize_multi_client` alone connects the clients, also by a default process group; a missing one is named."""

import socket

import pytest
import torch
import torch.distributed as dist
from support.coordinators import server_in_thread

import dtckpt
from dtckpt import Layout, Replicate, Shard, errors
from dtckpt.config import Config
from dtckpt.coordination import multi_client_group

from . import process_group_cases as cases


@pytest.fixture(scope="module")
def coordinator():
    with server_in_thread(heartbeat_timeout_s=30.0) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def jobs():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"127.0.0.1:{port},127.0.0.1:1"


def test_through_the_coordinator(pool, coordinator):
    found = pool.values(cases.initialize_alone, clients=2, coordinator=coordinator)
    assert found == [(cases.EXCHANGED, "gloo", 0)] * 2


def test_restarted_through_the_coordinator(pool, coordinator):
    killed = pool.run(
        cases.initialize_alone, 0, job="restarted", dies=True, clients=2, coordinator=coordinator, heartbeat_timeout_s=5
    )
    assert all(answer.has_died for answer in killed)
    found = pool.values(cases.initialize_alone, 1, job="restarted", clients=2, coordinator=coordinator)
    assert found == [(cases.EXCHANGED, "gloo", 1)] * 2


def test_at_the_first_address_of_the_jobs(pool, jobs):
    assert all(answer.has_died for answer in pool.run(cases.initialize_alone, 0, jobs, dies=True, clients=2))
    found = pool.values(cases.initialize_alone, 1, jobs, clients=2)
    assert found == [(cases.EXCHANGED, "gloo", 1)] * 2


@pytest.mark.parametrize("with_coordinator", [False, True])
def test_at_the_store_of_torchrun(pool, coordinator, with_coordinator):
    address = coordinator if with_coordinator else ""
    assert pool.values(cases.initialize_at_a_store, clients=2, coordinator=address) == [cases.EXCHANGED] * 2


def test_a_group_that_is_there_stays(pool):
    assert pool.values(cases.initialize_with_a_group, clients=2, group=True) == [True, True]


def test_a_store_that_cannot_be_reached_is_an_error_of_all(pool, coordinator):
    answers = pool.run(cases.initialize_unreachable, clients=2, coordinator=coordinator)
    assert {answer.error for answer in answers} == {"CoordinatorUnavailableError"}, answers
    assert "nowhere.invalid" in answers[0].text
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize(
    ("jobs", "coordinator", "host"),
    [("[::1]:5,b:6", "c:1", "::1"), ("train-0:5,b:6", "c:1", "train-0"), (None, "127.0.0.1:1", socket.gethostname())],
)
def test_the_host_that_client_0_tells(monkeypatch, jobs, coordinator, host):
    environment = {"DTENSOR_JOBS": jobs} if jobs else {}
    assert multi_client_group._own_host(Config.from_environ(environment), coordinator) == host


@pytest.mark.parametrize("jobs", ["a,b", "a:x,b:1", "/bns/cell/0,/bns/cell/1"])
def test_jobs_without_addresses_are_no_place_to_meet(monkeypatch, jobs):
    monkeypatch.setenv("DTENSOR_JOBS", jobs)
    with pytest.raises(errors.ConfigError, match=r"2 clients have no place to meet: .*DTENSOR_JOBS=host:port"):
        dtckpt.initialize_multi_client()


# --- no process group ---


def sharded():
    mesh = dtckpt.create_distributed_mesh({"x": 2})
    return dtckpt.pack([torch.ones(2)], Layout(["x"], mesh), (4,))


@pytest.mark.parametrize(
    "operation",
    [
        lambda: dtckpt.pack([torch.ones(2)], sharded().layout),
        lambda: dtckpt.pack([torch.ones(2)], sharded().layout, (4,), run_check=True),
        lambda: dtckpt.dtensor.DTensor.from_local(torch.ones(2), sharded().device_mesh, [Shard(0)]),
        lambda: dtckpt.relayout(sharded(), Layout(["unsharded"], sharded().device_mesh)),
        lambda: dtckpt.copy_to_mesh(sharded(), Layout(["unsharded"], sharded().device_mesh)),
        lambda: dtckpt.relayout([sharded(), sharded()], Layout(["unsharded"], sharded().device_mesh)),
        lambda: sharded().full_tensor(),
        lambda: sharded().redistribute(placements=[Replicate()]),
        lambda: sharded().redistribute(placements=[Replicate()], async_op=True),
        lambda: sharded().sum().item(),
        lambda: sharded() + torch.ones(4),
        lambda: dtckpt.DVariable(sharded()).assign(dtckpt.relayout(torch.ones(4), sharded().layout)).full_tensor(),
        lambda: dtckpt.dtensor.distribute_tensor(torch.ones(4), sharded().device_mesh, [Shard(0)]),
        lambda: dtckpt.dtensor.rand(4, device_mesh=sharded().device_mesh, placements=[Shard(0)]),
        lambda: torch.nn.functional.dropout(sharded()),
        lambda: sharded().device_mesh.get_group(0),
    ],
)
def test_a_missing_group_is_named(monkeypatch, operation):
    monkeypatch.setenv("DTENSOR_NUM_CLIENTS", "2")
    assert not dist.is_initialized()
    with pytest.raises(
        errors.CoordinationError, match=r"got clients 0, 1, expected .*call dtckpt\.initialize_multi_client or"
    ):
        operation()


def test_what_needs_no_group_goes_without(monkeypatch):
    monkeypatch.setenv("DTENSOR_NUM_CLIENTS", "2")
    tensor = sharded()
    again = dtckpt.relayout(torch.ones(4), tensor.layout)
    assert (tensor + again).components[0].tolist() == [2, 2]
    whole = dtckpt.relayout(torch.ones(4), Layout(["unsharded"], tensor.device_mesh))
    assert dtckpt.relayout(whole, tensor.layout).components[0].tolist() == [1, 1]
