"""Real processes, one of which is killed: the others say so, soon, and all say the same."""

import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.client_calls import wait_until
from support.coordinators import server_process

from dtckpt.coordination.api import Member
from dtckpt.coordination.grpc_client import GrpcCoordination

from .killable_clients import HEARTBEAT_S, NUM_CLIENTS, Where, workers

pytestmark = pytest.mark.processes


def kill_one(crew, victim, while_waiting, wait_until_arrived):
    survivors = [client for client in range(NUM_CLIENTS) if client != victim]
    crew.arrive(range(NUM_CLIENTS), "begin")
    assert [crew.answer(client)[0] for client in range(NUM_CLIENTS)] == ["passed"] * NUM_CLIENTS
    if while_waiting:
        crew.arrive([victim], "end")
        wait_until_arrived("end", victim)
        crew.arrive(survivors[:-1], "end")
        wait_until_arrived("end", survivors[-2])
    killed_at = crew.kill(victim)
    if while_waiting:
        # The last survivor stays away until the others have heard of the loss, else the barrier would pass.
        answers = [crew.answer(client) for client in survivors[:-1]]
        assert max(answer[3] for answer in answers) - killed_at < HEARTBEAT_S + 1.5
        crew.arrive(survivors[-1:], "end")
        answers.append(crew.answer(survivors[-1]))
    else:
        crew.arrive(survivors, "end")
        answers = [crew.answer(client) for client in survivors]
        assert max(answer[3] for answer in answers) - killed_at < HEARTBEAT_S + 1.5
    assert len({answer[:3] for answer in answers}) == 1, answers
    assert answers[0][0] == "ClientLostError", answers
    assert answers[0][2] == (victim,)
    assert f"client {victim} (job/{victim}) sent no heartbeat for" in answers[0][1]


@pytest.mark.parametrize("while_waiting", [False, True], ids=["before", "waiting"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_client_at_a_store(victim, while_waiting):
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)

    def wait_until_arrived(name, client):
        wait_until(lambda: any(f"/{name}/" in k and k.endswith(f"arrived/{client}") for k in store.list_keys()))

    with workers(Where(store.port, is_store=True)) as crew:
        kill_one(crew, victim, while_waiting, wait_until_arrived)


def test_killed_host_of_the_store():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with workers(Where(port, is_store=True, is_hosted_by_client_0=True)) as crew:
        crew.arrive(range(NUM_CLIENTS), "begin")
        assert [crew.answer(client)[0] for client in range(NUM_CLIENTS)] == ["passed"] * NUM_CLIENTS
        crew.arrive([1, 2], "end")
        killed_at = crew.kill(0)
        crew.arrive([3], "end")
        answers = [crew.answer(client) for client in (1, 2, 3)]
        assert {answer[0] for answer in answers} == {"ClientLostError"}, answers
        assert {answer[2] for answer in answers} == {(0,)}
        assert max(answer[3] for answer in answers) - killed_at < HEARTBEAT_S + 1.5


def test_host_of_the_store_leaves_last():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with workers(Where(port, is_store=True, is_hosted_by_client_0=True)) as crew:
        crew.arrive(range(NUM_CLIENTS), "end")
        crew.send(0, None)
        for client in range(NUM_CLIENTS):
            assert crew.answer(client)[0] == "passed"
        for client in range(1, NUM_CLIENTS):
            crew.send(client, None)
        for client in range(NUM_CLIENTS):
            assert crew.answer(client) == "left"


@pytest.mark.parametrize("while_waiting", [False, True], ids=["before", "waiting"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_client_at_a_coordinator(victim, while_waiting):
    with server_process(heartbeat_timeout_s=HEARTBEAT_S) as server:
        observer = GrpcCoordination(f"127.0.0.1:{server.port}", Member("job", 0, NUM_CLIENTS, 1))

        def wait_until_arrived(name, client):
            wait_until(lambda: any(b.name == name and client not in b.missing for b in observer.status().barriers))

        with workers(Where(server.port)) as crew:
            kill_one(crew, victim, while_waiting, wait_until_arrived)
        observer.leave()


TORCHRUN = """
import sys
import torch.distributed as dist
from dtckpt.coordination.api import Vote
from dtckpt.coordination.connect import current_coordination
if sys.argv[1] == "group":
    dist.init_process_group("gloo")
coordination = current_coordination()
assert type(coordination).__name__ == "TorchStoreCoordination"
verdict = coordination.barrier("b", Vote(payload=bytes([coordination.member.client])), timeout_s=60, collect=True)
assert verdict.payloads == {0: b"\\0", 1: b"\\1"}, verdict
if sys.argv[1] == "group":
    dist.destroy_process_group()
"""


@pytest.mark.share(1, of="jobs of torchrun")
@pytest.mark.parametrize("group", ["group", "none"])
def test_under_torchrun(tmp_path, group):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), group]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
