"""Names of tasks: what a client calls itself is what the coordinator knows, and two jobs never mix."""

import itertools
import os

import pytest
from support import forkserver
from support.client_calls import at, leave_all, same_error, together
from support.coordinators import server_in_thread

import dtckpt
from dtckpt import errors
from dtckpt.coordination.api import Member, Vote
from dtckpt.coordination.connect import current_coordination
from dtckpt.coordination.grpc_calls import HeldError
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.grpc_credentials import PLAINTEXT
from dtckpt.coordination.grpc_status import StatusClient


@pytest.fixture
def port():
    with server_in_thread(heartbeat_timeout_s=60.0) as port:
        yield port


def clients_at(port, num_clients, job, job_name="", first_incarnation=1):
    members = [
        Member(job, client, num_clients, first_incarnation + client, job_name=job_name) for client in range(num_clients)
    ]
    return [GrpcCoordination(f"127.0.0.1:{port}", member) for member in members]


def ask_for_tasks(environment, connection):
    """In a new process: join the job, and send the facts that this client knows about it."""
    os.environ.update(environment)
    dtckpt.initialize_multi_client()
    current_coordination().barrier("everyone is there", timeout_s=60)
    status = dtckpt.job_status()
    tasks = [(task.client, task.name, task.state) for task in status.tasks]
    connection.send((status.job, dtckpt.job_name(), dtckpt.full_job_name(), dtckpt.jobs(), tasks))
    current_coordination().barrier("everyone has looked", timeout_s=60)
    dtckpt.shutdown_multi_client()


@pytest.mark.processes
def test_clients_of_two_jobs_ask_for_their_tasks(port):
    """Both jobs have equal barriers and equal client ids, and are asked for at the same time."""

    def start(job, client):
        env = {"DTCKPT_COORDINATOR": f"127.0.0.1:{port}", "DTCKPT_JOB": job, "RANK": str(client), "WORLD_SIZE": "2"}
        connection, theirs = forkserver.Pipe()
        return forkserver.start(ask_for_tasks, env, theirs), connection

    started = {(job, client): start(job, client) for job in ("llm", "vision") for client in range(2)}
    for (job, client), (process, connection) in started.items():
        names = [f"{job}/replica:0/task:{number}" for number in range(2)]
        tasks = [(number, name, "registered") for number, name in enumerate(names)]
        assert connection.poll(120)
        assert connection.recv() == (job, job, names[client], names, tasks)
        process.join(120)
        assert process.exitcode == 0


def test_names_of_those_that_never_came(port):
    (client, _) = clients_at(port, 2, "train", "worker")
    client.register()
    assert client.task_name == "worker/replica:0/task:0" == client.member.full_task_name()
    seen = [(task.name, task.state) for task in client.status().tasks]
    assert seen == [("worker/replica:0/task:0", "registered"), ("worker/replica:0/task:1", "unknown")]
    assert StatusClient(f"127.0.0.1:{port}", PLAINTEXT).job("train").tasks[1].name == "worker/replica:0/task:1"
    client.leave()


def test_clients_of_a_job_agree_on_its_name(port):
    (first, _), (_, other) = clients_at(port, 2, "train", "worker"), clients_at(port, 2, "train", "trainer")
    first.register()
    with pytest.raises(errors.ConfigError, match=r"client 1 .* calls the job 'trainer'; expected 'worker'.*DTCKPT_JOB"):
        other.register()
    first.leave()


def test_next_attempt_may_have_another_name(port):
    (first,) = clients_at(port, 1, "train", "worker")
    first.register()
    second = GrpcCoordination(f"127.0.0.1:{port}", Member("train", 0, 1, 9, attempt=1, job_name="trainer"))
    second.register()
    assert second.task_name == "trainer/replica:0/task:0"
    first.leave()
    second.leave()


def test_equal_jobs_are_refused_not_mixed(port):
    """Two jobs without different names: of equal size, and of another size."""
    one, same = clients_at(port, 2, "none"), clients_at(port, 2, "none", first_incarnation=100)
    larger = clients_at(port, 3, "none", first_incarnation=200)
    together(one, lambda client: client.register())
    for client in same:
        client.heartbeat_timeout_s = 1.0
    refused = together(same, lambda client: client.register())
    for number, result in refused.items():
        assert isinstance(result.error, errors.FencedError)
        assert f"client {number} (none/{number})" in str(result.error)
    with pytest.raises(errors.ConfigError, match="got 3, expected 2"):
        larger[2].register()
    assert not any(result.error for result in together(one, at("b")).values())
    leave_all(one)


def test_a_place_that_is_held_stays_the_reason_when_the_last_call_comes_too_late(monkeypatch):
    client = GrpcCoordination("127.0.0.1:1", Member("train", 0, 1, 1))
    client.heartbeat_timeout_s = 0.1
    answers = itertools.chain(
        [HeldError("client 0 is held")], itertools.repeat(errors.CoordinatorUnavailableError("late"))
    )

    def refused(*_):
        raise next(answers)

    monkeypatch.setattr(client, "_call", refused)
    with pytest.raises(errors.FencedError, match="client 0 is held"):
        client.register()


@pytest.mark.parametrize("is_abandoned", [True, False])
def test_what_else_ends_a_registration_is_said_at_once(monkeypatch, is_abandoned):
    """Also where the place was held before: nothing of the two minutes that are left is waited for."""
    client = GrpcCoordination("127.0.0.1:1", Member("train", 0, 1, 1))
    client.heartbeat_timeout_s = 0.1 if is_abandoned else 60.0
    answers = [HeldError("client 0 is held"), errors.CoordinatorUnavailableError("the reason")]

    def refused(*_):
        if is_abandoned and len(answers) == 1:
            client.abandon("the reason")
        raise answers.pop(0)

    monkeypatch.setattr(client, "_call", refused)
    with pytest.raises(errors.CoordinatorUnavailableError, match="the reason"):
        client.register()


def test_barriers_and_failures_stay_in_their_job(port):
    one, two = clients_at(port, 2, "one"), clients_at(port, 2, "two")
    failed = together(one, lambda c: c.barrier("b", Vote(ok=False), timeout_s=20))
    same_error(failed, errors.ClientFailedError, "voted no")
    assert not any(result.error for result in together(two, at("b")).values())
    assert not two[0]._failures
    leave_all(one)
    leave_all(two)


def test_alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("DTENSOR_", "DTCKPT_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    (task,) = dtckpt.job_status().tasks
    assert (task.name, task.state) == (dtckpt.full_job_name(), "registered")
