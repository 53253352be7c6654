"""Certificates and tokens: which clients get in, which do not, and their errors."""

import hashlib
import os
import secrets
import time
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from dtckpt_server.main import main
from dtckpt_server.tls import TlsFiles
from dtckpt_server.tokens import Tokens
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.certificates import Authority
from support.client_calls import Running, at, leave_all, together, wait_until
from support.coordinators import running_server, server_in_thread, server_process

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination import connect
from dtckpt.coordination.api import Member, Progress, Vote
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.grpc_credentials import Access

TOKEN_A, TOKEN_B, OPERATOR = (f"{name}-{hashlib.sha256(name.encode()).hexdigest()}" for name in ("a", "b", "operator"))
TOKENS = f"# tokens of the tests\na {TOKEN_A}\n\nb {TOKEN_B}\n* {OPERATOR}\n"
BOUND_S = 8.0
"""Within which a client with a heartbeat timeout of a second knows that it may not come in."""


class Certificates(Authority):
    """An authority, the coordinator's certificate of it, and one for a client, as files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.client_cert, self.client_key = folder / "client.pem", folder / "client.key"
        self.issue(self.client_cert, self.client_key, "client")

    def server(self, *, mutual: bool = False) -> TlsFiles:
        return TlsFiles(self.cert, self.key, self.ca if mutual else None)

    def client(self, *, mutual: bool = False, **variables: str) -> Access:
        env = {"CA": self.ca} | ({"CERT": self.client_cert, "KEY": self.client_key} if mutual else {}) | variables
        return access(**env)


def access(**variables: object) -> Access:
    return Access.from_environ({f"DTCKPT_COORDINATOR_{name}": str(value) for name, value in variables.items()})


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls") / "theirs")


def client_at(port, how=None, job="a", client=0, num_clients=1):
    member = Member(job, client, num_clients, secrets.randbits(60))
    return GrpcCoordination(f"127.0.0.1:{port}", member, access=how or Access(), heartbeat_timeout_s=1.0)


def refused(client, cls, *texts):
    """Check that registering fails in time, with the class and a text that holds all of these."""
    start = time.monotonic()
    with pytest.raises(cls) as caught:
        client.register()
    assert time.monotonic() - start < BOUND_S
    assert type(caught.value) is cls
    for text in texts:
        assert text in str(caught.value)
    client.leave()


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(ours, mutual):
    with server_in_thread(tls=ours.server(mutual=mutual)) as port:
        clients = [client_at(port, ours.client(mutual=mutual), client=number, num_clients=2) for number in range(2)]
        for result in together(clients, at("b", vote=Vote(payload=b"x"), collect=True)).values():
            assert result.value.payloads == {0: b"x", 1: b"x"}
        leave_all(clients)


def test_coordinator_of_another_authority(ours, theirs):
    with server_in_thread(tls=theirs.server()) as port:
        refused(client_at(port, ours.client()), errors.CoordinatorPermissionError, "_CA says", "CERTIFICATE_VERIFY")


def test_coordinator_of_another_name(ours, tmp_path):
    cert, key = tmp_path / "cert", tmp_path / "key"
    ours.issue(cert, key, "coordinator.example")
    with server_in_thread(tls=TlsFiles(cert, key)) as port:
        refused(client_at(port, ours.client()), errors.CoordinatorPermissionError, "not to be trusted")
        client = client_at(port, ours.client(SERVER_NAME="coordinator.example"))
        client.register()
        client.leave()


def test_client_without_certificate(ours):
    with server_in_thread(tls=ours.server(mutual=True)) as port:
        refused(client_at(port, ours.client()), errors.CoordinatorUnavailableError, "DTCKPT_COORDINATOR_CERT")


def test_client_of_another_authority(ours, theirs):
    with server_in_thread(tls=ours.server(mutual=True)) as port:
        env = {"CA": ours.ca, "CERT": theirs.client_cert, "KEY": theirs.client_key}
        refused(client_at(port, access(**env)), errors.CoordinatorUnavailableError, "DTCKPT_COORDINATOR_CERT")


def test_plaintext_and_tls_do_not_mix(ours):
    with server_in_thread(tls=ours.server()) as port:
        refused(client_at(port), errors.CoordinatorUnavailableError, "does it expect TLS (DTCKPT_COORDINATOR_CA)")
    with server_in_thread() as port:
        refused(client_at(port, ours.client()), errors.CoordinatorPermissionError, "WRONG_VERSION_NUMBER")


def test_certificates_are_replaced_while_it_serves(ours, tmp_path):
    first, second = Certificates(tmp_path / "first"), Certificates(tmp_path / "second")
    with server_in_thread(tls=first.server()) as port:
        early = client_at(port, first.client())
        early.register()
        key = first.key.read_text()
        first.key.write_bytes(second.key.read_bytes())  # half of a change is none
        refused(client_at(port, second.client()), errors.CoordinatorPermissionError)
        first.cert.write_bytes(second.cert.read_bytes())
        late = client_at(port, second.client(), job="late")
        late.register()
        early.barrier("b", timeout_s=10)
        assert first.key.read_text() != key
        leave_all([early])
        leave_all([late])


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(ours):
    with server_in_thread(tls=ours.server(), tokens=Tokens.parse(TOKENS)) as port:
        yield port


def test_each_job_with_its_token(guarded, ours):
    clients = [client_at(guarded, ours.client(TOKEN=token), job) for job, token in (("a", TOKEN_A), ("b", TOKEN_B))]
    for client in clients:
        client.barrier("b", timeout_s=10)
        assert client.status().tasks[0].state == "registered"
        client.leave()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "wants a token; set DTCKPT_COORDINATOR_TOKEN_FILE"),
        ({"TOKEN": "wrong"}, "does not know this token"),
        ({"TOKEN": TOKEN_B}, "the token is not for job 'a'"),
        ({"TOKEN": OPERATOR}, "the token is not for job 'a'"),
    ],
)
def test_other_tokens(guarded, ours, variables, text):
    refused(client_at(guarded, ours.client(**variables)), errors.CoordinatorPermissionError, text)


def test_tokens_are_replaced_while_it_serves(ours, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("dtckpt_server.server.RELOAD_S", 0.05)
    file = tmp_path / "tokens"
    file.write_text("broken\n")
    with running_server(tls=ours.server(), tokens=Tokens.parse(TOKENS), tokens_file=file) as server:
        client = client_at(server.port, ours.client(TOKEN=TOKEN_A))
        wait_until(lambda: "keeping the tokens that are in use" in caplog.text)
        client.barrier("b", timeout_s=10)
        replaced = file.with_name("replaced")
        replaced.write_text(f"b {TOKEN_B}\n")
        replaced.replace(file)
        wait_until(lambda: refusal_of(client) == "the coordinator does not know this token")
        client.leave()


def refusal_of(client):
    try:
        client.barrier("b", timeout_s=10)
    except errors.CoordinatorPermissionError as error:
        return error.message
    return ""


@pytest.fixture
def call(ours):
    """Make one call with a token, to a coordinator that no other test uses, and return its status code."""
    credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    with (
        server_in_thread(tls=ours.server(), tokens=Tokens.parse(TOKENS)) as port,
        grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel,
    ):
        stub = pb_grpc.CoordinatorStub(channel)

        def make(name, request, token):
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            try:
                getattr(stub, name)(request, timeout=10, metadata=metadata)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        make.stub = stub
        yield make


def requests(job):
    who = pb.TaskIdentity(job=job, task=0, incarnation=7)
    return {
        "Register": pb.RegisterRequest(task=who, num_clients=1),
        "Heartbeat": pb.HeartbeatRequest(task=who),
        "Arrive": pb.ArriveRequest(task=who, name="b", call=1, timeout_s=10, vote=pb.Vote(ok=True)),
        "Await": pb.AwaitRequest(task=who, barrier_id="x"),
        "Cancel": pb.CancelRequest(task=who, barrier_id="x"),
        "Leave": pb.LeaveRequest(task=who),
        "GetJob": pb.GetJobRequest(job=job),
        "GetBarrier": pb.GetBarrierRequest(job=job, barrier_id="x"),
    }


def test_every_call_is_guarded(call):
    methods = set(pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name)
    assert set(requests("a")) == methods - {"HeartbeatStream", "ListJobs"}
    codes = grpc.StatusCode
    looking = ("GetJob", "GetBarrier")
    for name, request in requests("a").items():
        assert call(name, request, "") == codes.UNAUTHENTICATED, name
        assert call(name, request, "unknown") == codes.UNAUTHENTICATED, name
        assert call(name, request, TOKEN_B) == codes.PERMISSION_DENIED, name
        accepted = call(name, request, OPERATOR) in (codes.OK, codes.NOT_FOUND)
        assert accepted == (name in looking), name
        assert call(name, request, TOKEN_A) in (codes.OK, codes.NOT_FOUND), name
    assert call("ListJobs", pb.ListJobsRequest(), "") == codes.UNAUTHENTICATED
    beat = pb.HeartbeatStreamRequest(task=pb.TaskIdentity(job="a", incarnation=7))
    with pytest.raises(grpc.RpcError) as caught:
        list(call.stub.HeartbeatStream(iter([beat]), timeout=10, metadata=(("authorization", f"Bearer {TOKEN_B}"),)))
    assert caught.value.code() == codes.PERMISSION_DENIED


def test_the_operator_cannot_be_a_job(call):
    assert call("Register", requests("*")["Register"], OPERATOR) == grpc.StatusCode.PERMISSION_DENIED


def test_a_token_shows_its_own_job_only(call):
    for job, token in (("a", TOKEN_A), ("b", TOKEN_B)):
        assert call("Register", requests(job)["Register"], token) == grpc.StatusCode.OK

    def listed(token):
        answer = call.stub.ListJobs(pb.ListJobsRequest(), timeout=10, metadata=(("authorization", f"Bearer {token}"),))
        return [job.job for job in answer.jobs]

    assert listed(TOKEN_A) == ["a"]
    assert listed(TOKEN_B) == ["b"]
    assert sorted(listed(OPERATOR)) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "job\n", "job short\n", f"ok {TOKEN_A}\n{TOKEN_B}\n"])
def test_lists_of_tokens_that_cannot_be_used(text):
    with pytest.raises(errors.ConfigError) as caught:
        Tokens.parse(text)
    assert TOKEN_B not in str(caught.value)


def test_jobs_with_blanks_and_several_tokens():
    tokens = Tokens.parse(f"my job {TOKEN_A}\nmy job {TOKEN_B}\n")
    for token in (TOKEN_A, TOKEN_B):
        tokens.authorize(f"Bearer {token}", "my job", only_looks=False)
    assert len(tokens) == 2


# --- the environment of a client -------------------------------------------------------------------------------------


def test_jobs_beside_one_that_has_a_token():
    tokens = Tokens.parse(f"mine {TOKEN_A}\nmine#other {TOKEN_B}\n")
    for job in ("mine", "mine#durable-1"):
        tokens.authorize(f"Bearer {TOKEN_A}", job, only_looks=False)
        with pytest.raises(errors.CoordinatorPermissionError):
            tokens.authorize(f"Bearer {TOKEN_B}", job, only_looks=False)
    for job in ("mine#other", "mine#other#durable-1"):
        tokens.authorize(f"Bearer {TOKEN_B}", job, only_looks=False)
        with pytest.raises(errors.CoordinatorPermissionError):
            tokens.authorize(f"Bearer {TOKEN_A}", job, only_looks=False)
    with pytest.raises(errors.CoordinatorPermissionError):
        tokens.authorize(f"Bearer {TOKEN_A}", "mine2#durable-1", only_looks=False)


def test_variables_that_cannot_be_used(ours, theirs, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for variables, text in (
        ({"TOKEN": TOKEN_A}, "would travel in plaintext"),
        ({"TOKEN": TOKEN_A, "TOKEN_FILE": empty, "CA": ours.ca}, "got both"),
        ({"TOKEN_FILE": empty, "CA": ours.ca}, "the file is empty"),
        ({"TOKEN_FILE": tmp_path / "none", "CA": ours.ca}, "cannot be read"),
        ({"TOKEN": "two words", "CA": ours.ca}, "without blanks"),
        ({"TOKEN": "schlüssel", "CA": ours.ca}, "printable ASCII"),
        ({"CERT": ours.client_cert, "CA": ours.ca}, "come together"),
        ({"CERT": ours.client_cert, "KEY": ours.client_key}, "come together"),
        ({"CA": empty}, "cannot be used"),
        ({"CA": tmp_path / "none"}, "cannot be used: No such file"),
        ({"CA": ours.ca, "CERT": ours.client_cert, "KEY": theirs.client_key}, "cannot be used"),
    ):
        with pytest.raises(errors.ConfigError, match=text) as caught:
            access(**variables)
        assert TOKEN_A not in str(caught.value)


def test_variables_reach_the_client(guarded, ours, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("DTCKPT_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    file = tmp_path / "token"
    file.write_text(TOKEN_B + "\n")
    monkeypatch.setenv("DTCKPT_JOB", "b")
    monkeypatch.setenv("DTCKPT_COORDINATOR_CA", str(ours.ca))
    monkeypatch.setenv("DTCKPT_COORDINATOR_TOKEN_FILE", str(file))
    connect.set_coordination(None)
    connect.initialize_multi_client(f"127.0.0.1:{guarded}")
    connect.current_coordination().barrier("variables", timeout_s=10)
    connect.shutdown_multi_client()


def test_a_token_in_plaintext_if_told_so():
    with server_in_thread(tokens=Tokens.parse(TOKENS)) as port:
        client = client_at(port, access(TOKEN=TOKEN_A, INSECURE="1"))
        client.barrier("b", timeout_s=10)
        client.leave()


def test_no_text_shows_a_secret(ours):
    how = ours.client(mutual=True, TOKEN=TOKEN_A)
    for shown in (repr(how), str(how)):
        assert TOKEN_A not in shown
        assert "PRIVATE" not in shown


# --- limits -----------------------------------------------------------------------------------------------------------


def test_oversized_message():
    with server_in_thread() as port:
        start = time.monotonic()
        refused(client_at(port, job="j" * (1 << 20)), errors.CoordinationError, "larger than max")
        refused(client_at(port, job="j" * 1000), errors.ConfigError, "job name is too long")
        client = client_at(port)
        client.register()
        client.heartbeat(Progress("p" * 1000))
        client.barrier("b", timeout_s=10)
        client.leave()
        assert time.monotonic() - start < BOUND_S


def test_calls_are_limited():
    """One waits, so that there is room for one call less; a call that finds no room comes again."""
    with server_in_thread(heartbeat_timeout_s=60.0, max_calls=1) as port:
        clients = [client_at(port, client=number, num_clients=2) for number in range(2)]
        for client in clients:
            client.register()
        waiting = Running(clients[:1], at("b", timeout_s=3))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.CoordinatorStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(iter(lambda: stub.ListJobs(pb.ListJobsRequest(), timeout=10), None))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "no room for a call at the coordinator" in caught.value.details()
        assert isinstance(waiting.results()[0].error, errors.BarrierTimeoutError)
        leave_all(clients)


def test_reflection_only_by_flag():
    request = reflection_pb2.ServerReflectionRequest(list_services="")

    def services(port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
            return {service.name for service in answer.list_services_response.service}

    with server_in_thread(reflection=True) as port:
        assert {"dtckpt.coordinator.v1.Coordinator", "grpc.health.v1.Health"} < services(port)
    with server_in_thread() as port, pytest.raises(grpc.RpcError) as caught:
        services(port)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


# --- the command ------------------------------------------------------------------------------------------------------


def test_plaintext_needs_a_flag(ours, theirs, tmp_path):
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    for arguments, text in (
        ([], "expected --tls-cert and --tls-key, or --insecure"),
        (["--tls-cert", ours.cert], "expected --tls-cert and --tls-key"),
        (["--insecure", "--client-ca", ours.ca], "contradicts"),
        (["--tls-cert", ours.cert, "--tls-key", theirs.key], "TLS files cannot be used"),
        (["--tls-cert", tmp_path / "none", "--tls-key", ours.key], "No such file"),
        (["--insecure", "--tokens-file", tmp_path / "none"], "cannot be read"),
        (["--insecure", "--tokens-file", file], "got both"),
    ):
        env = {"DTCKPT_COORDINATOR_SERVE_TOKENS": TOKENS} if text == "got both" else {}
        result = CliRunner(env=env).invoke(main, ["serve", "--port", "0", *map(str, arguments)])
        assert result.exit_code == 2
        assert text in result.stderr
        assert TOKEN_A not in result.output


@pytest.mark.processes
def test_command_with_everything(ours):
    env = {
        "DTCKPT_COORDINATOR_SERVE_TOKENS": TOKENS,
        "DTCKPT_COORDINATOR_SERVE_CLIENT_CA": str(ours.ca),
        "DTCKPT_COORDINATOR_SERVE_HEALTH_PORT": "0",
    }
    with server_process("--tls-cert", str(ours.cert), "--tls-key", str(ours.key), env=env) as server:
        health_port = int(server.process.stdout.readline().rpartition(":")[2])
        with grpc.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            for name in ("", "liveness", "readiness"):
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=name), timeout=10
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                pb_grpc.CoordinatorStub(channel).ListJobs(pb.ListJobsRequest(), timeout=10)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        client = client_at(server.port, ours.client(mutual=True, TOKEN=TOKEN_A))
        client.barrier("b", timeout_s=10)
        client.leave()
        refused(
            client_at(server.port, ours.client(mutual=True, TOKEN=TOKEN_B)),
            errors.CoordinatorPermissionError,
            "not for",
        )
        command_line = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        log = server.terminate()
        assert server.process.returncode == 143
        assert "SERVING" not in log
        for token in (TOKEN_A, TOKEN_B, OPERATOR):
            assert token not in log + command_line
