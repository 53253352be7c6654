import json
import os
import pty
import re
import secrets
import select
import signal
import subprocess
import sys
import time

import pytest
import trustme
from dtckpt_server.tls import TlsFiles
from dtckpt_server.tokens import Tokens
from support.client_calls import Running, at, leave_all, wait_until
from support.coordinators import running_server, server_process

from dtckpt.coordination.api import BarrierStatus, JobStatus, Member, Progress, TaskStatus
from dtckpt.coordination.grpc_client import GrpcCoordination

from .conftest import run_process

COMMAND = [sys.executable, "-W", "error", "-m", "dtckpt.cli.main", "status"]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("DTCKPT_", "MASTER_", "PET_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def server():
    with running_server(heartbeat_timeout_s=60.0) as server:
        yield server


def clients_of(port, job, num_clients):
    return [
        GrpcCoordination(f"127.0.0.1:{port}", Member(job, number, num_clients, secrets.randbits(60)))
        for number in range(num_clients)
    ]


@pytest.fixture
def waiting(server):
    """A job of three: client 0 waits at a barrier, 1 writes, 2 has not come."""
    clients = clients_of(server.port, "train", 3)
    at_barrier = Running(clients[:1], at("save/written", timeout_s=30))
    clients[1].register()
    clients[1].heartbeat(Progress("write", 12, 250, 1000))
    wait_until(lambda: clients[0].status().barriers and clients[0].status().tasks[1].progress.phase)
    yield clients
    leave_all(clients)
    at_barrier.results()


def test_text(run, server, waiting):
    result = run("status", "--coordinator", f"127.0.0.1:{server.port}")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[:3] == [f"coordinator 127.0.0.1:{server.port}: 1 job", "", "job train: 2/3 clients alive, attempt 0"]
    assert re.fullmatch(
        r"  barrier save/written generation 0: open for \d+\.\d s, 1/3 arrived; missing client 1 \(registered, heard "
        r"\d+\.\d s ago; write step 12 25%, unchanged for \d+ s\), client 2 \(never registered\)",
        lines[3],
    )
    assert lines[4].split() == ["client", "state", "heard", "phase", "step", "done", "unchanged", "host"]
    assert lines[5].split() == ["2", "unknown", "never"]
    rows = {line.split()[0]: line for line in lines[5:]}
    assert set(rows) == {"0", "1", "2"}
    assert re.search(r"registered +\d+\.\d s ago +write +12 +25% +\d+ s +\S", rows["1"])


def test_rows_are_limited(run, server, waiting):
    result = run("status", "--coordinator", f"127.0.0.1:{server.port}", "--rows", "1")
    assert result.out.splitlines()[-2].split()[:2] == ["2", "unknown"]
    assert result.out.splitlines()[-1] == "  and 2 more clients"


def test_json(run, server, waiting):
    result = run("status", "--coordinator", f"127.0.0.1:{server.port}", "--job", "train", "--json")
    (event,) = result.events
    assert (event["event"], event["coordinator"]) == ("status", f"127.0.0.1:{server.port}")
    (job,) = event["jobs"]
    assert (job["job"], job["num_clients"], job["attempt"]) == ("train", 3, 0)
    (barrier,) = job["barriers"]
    assert barrier.pop("age_s") > 0
    assert barrier == {
        "name": "save/written",
        "generation": 0,
        "num_participants": 3,
        "missing": [1, 2],
        "num_unlisted": 0,
    }
    assert job["tasks"][1]["progress"] == {"phase": "write", "step": 12, "bytes_done": 250, "bytes_total": 1000}
    assert job["tasks"][1]["incarnation"] == f"{waiting[1].member.incarnation:x}"
    assert job["tasks"][2]["heartbeat_age_s"] is None


def test_the_worst_are_first():
    from dtckpt.cli.status import _report

    states = ("left", "registered", "suspect", "registered", "lost", "unknown", "fenced")
    tasks = tuple(
        TaskStatus(number, state, heartbeat_age_s=None if state == "unknown" else float(number))
        for number, state in enumerate(states)
    )
    job = JobStatus("a\nb", 7, tasks, (BarrierStatus("x\x1b[2J", 0, 7, (4, 5), 1.0),))
    lines = list(_report("c:1", [job], 20))
    assert [line.split()[0] for line in lines[5:]] == ["4", "5", "2", "6", "3", "1", "0"]
    assert lines[2] == "job a\\nb: 3/7 clients alive, attempt 0"
    assert "x\\x1b[2J" in lines[3]


def test_what_cannot_be_shown(run, server):
    run("status").fails(
        2, "there is no coordinator to ask", "DTCKPT_COORDINATOR", "DTCKPT_JOBSET_COORDINATOR", "MASTER_ADDR"
    )
    run("status", "--coordinator", "nowhere").fails(2, "expected host:port")
    where = f"127.0.0.1:{server.port}"
    run("status", "--coordinator", where, "--job", "other").fails(3, "knows no job 'other'")
    assert run("status", "--coordinator", where).out == f"coordinator {where}: 0 jobs\n"
    start = time.monotonic()
    run("status", "--coordinator", "127.0.0.1:1", "--timeout", "0.5").fails(69, "cannot be reached")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("name", "host"), [("DTCKPT_JOBSET_COORDINATOR", "localhost"), ("PET_MASTER_ADDR", "127.0.0.1")]
)
def test_found_as_clients_find_it(run, server, monkeypatch, name, host):
    monkeypatch.setenv(name, host)
    monkeypatch.setenv("DTCKPT_COORDINATOR_PORT_NUMBER", str(server.port))
    assert run("status").out == f"coordinator {host}:{server.port}: 0 jobs\n"


def test_found_by_variable_and_let_in_by_token(run, monkeypatch, tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, cert, key, token = (tmp_path / name for name in ("ca", "cert", "key", "token"))
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    secret = secrets.token_hex(16)
    token.write_text(secret)
    with running_server(tls=TlsFiles(cert, key), tokens=Tokens.parse(f"* {secret}")) as server:
        monkeypatch.setenv("DTCKPT_COORDINATOR", f"127.0.0.1:{server.port}")
        monkeypatch.setenv("DTCKPT_COORDINATOR_CA", str(ca))
        run("status").fails(69, "wants a token")
        monkeypatch.setenv("DTCKPT_COORDINATOR_TOKEN_FILE", str(token))
        assert run("status").out == f"coordinator 127.0.0.1:{server.port}: 0 jobs\n"
        monkeypatch.delenv("DTCKPT_COORDINATOR_CA")
        run("status").fails(2, "would travel in plaintext")


# --- as a process -----------------------------------------------------------------------------------------------------


def test_process(server, waiting):
    result = run_process("status", "--coordinator", f"127.0.0.1:{server.port}", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.events[0]["jobs"][0]["job"] == "train"


@pytest.mark.processes
def test_watching_goes_on_while_the_coordinator_is_gone():
    with server_process() as first:
        where = f"127.0.0.1:{first.port}"
        command = [*COMMAND, "--coordinator", where, "--watch", "--json", "--interval", "0.1", "--timeout", "0.3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            events = (json.loads(line) for line in process.stdout)
            assert next(events)["event"] == "status"
            first.kill()
            assert "cannot be reached" in next(event for event in events if event["event"] == "unreachable")["message"]
            with server_process(port=first.port):
                assert next(event for event in events if event["event"] == "status")["coordinator"] == where
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
                assert process.stderr.read() == ""


def test_watching_on_a_terminal(server, waiting):
    main_end, terminal = pty.openpty()
    command = [*COMMAND, "--coordinator", f"127.0.0.1:{server.port}", "--watch", "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        deadline = time.monotonic() + 60
        # More than one look, then the screen as it was before.
        while shown.count(b"job train: 2/3 clients alive") < 2:
            assert time.monotonic() < deadline, shown
            if select.select([main_end], [], [], 1.0)[0]:
                shown += os.read(main_end, 1 << 16)
        process.send_signal(signal.SIGINT)
        while select.select([main_end], [], [], 30.0)[0]:
            try:
                more = os.read(main_end, 1 << 16)
            except OSError:  # the other end is closed
                break
            shown += more
        assert process.wait(30) == 130
    os.close(main_end)
    assert b"\x1b[?1049h" in shown
    assert shown.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))
    assert b"\x1b[1;31munknown" in shown
