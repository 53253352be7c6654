"""``dtckpt live``, and the commands on ``live://feed``, beside a coordinator and a job that publishes."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from dtckpt_server.tokens import Tokens
from support.coordinators import running_server

import dtckpt
from dtckpt.cli import live_access
from dtckpt.coordination import connect
from dtckpt.coordination.grpc_credentials import PLAINTEXT
from dtckpt.coordination.grpc_status import StatusClient

from .conftest import run_process

pytestmark = pytest.mark.processes

PUBLISHER = """
import sys, torch, dtckpt
weight = torch.arange(48.0).reshape(6, 8)
with dtckpt.Publisher("policy", keep=2, folder=sys.argv[1]) as feed:
    for step in (10, 20):
        feed.publish({"model": {"w": weight + step, "b": torch.ones(4)}, "lr": 0.5}, step=step, wait=True)
    print("published", flush=True)
    sys.stdin.read()
"""
NBYTES = 6 * 8 * 4 + 4 * 4


@contextmanager
def publisher(port, folder, **variables):
    """Run a job that publishes steps 10 and 20 of feed policy."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DTCKPT_", "MASTER_", "PET_"))}
    env |= {"DTCKPT_COORDINATOR": f"127.0.0.1:{port}", "DTCKPT_JOB": "trainer", "DTCKPT_COORDINATOR_INSECURE": "1"}
    env |= variables
    command = [sys.executable, "-c", PUBLISHER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as process:
        try:
            assert process.stdout.readline() == "published\n"
            yield
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Port of a coordinator that knows feed policy."""
    with running_server(heartbeat_timeout_s=10.0) as server, publisher(server.port, tmp_path_factory.mktemp("live")):
        yield server.port


@pytest.fixture(autouse=True)
def environment(monkeypatch, port):
    for name in [name for name in os.environ if name.startswith(("DTCKPT_", "MASTER_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DTCKPT_COORDINATOR", f"127.0.0.1:{port}")
    # A shell of the training job: a command must not take the place of its client 0.
    monkeypatch.setenv("DTCKPT_JOB", "trainer")


def feed_of(port):
    client = StatusClient(f"127.0.0.1:{port}", PLAINTEXT)
    try:
        (feed,) = client.feeds()
        return feed
    finally:
        client.close()


def test_feeds_as_text(run, port):
    run("inspect", "live://policy")
    result = run("live")
    assert (result.code, result.err) == (0, "")
    title, _, feed, header, newest, older, *ended = [line.strip() for line in result.out.splitlines()]
    assert title == f"coordinator 127.0.0.1:{port}: 1 feed"
    assert feed == "feed policy: published by trainer, 1 client alive, attempt 0, keeps 2"
    assert header.split() == ["version", "step", "state", "age", "parts", "size", "readers", "holders"]
    number, *facts = newest.split()
    assert facts[:2] == ["20", "readable"]
    assert facts[-5:] == ["1/1", str(NBYTES), "B", "0", "0"]
    assert older.split()[1:3] == ["10", "readable"]
    assert ended[0].startswith("trainer#command-")
    assert ended[0].endswith(f"/client 0: fetched version {number}")


def test_feeds_as_json(run, port):
    (event,) = run("live", "--coordinator", f"127.0.0.1:{port}", "--json").events
    assert event["event"] == "live"
    (feed,) = event["feeds"]
    assert (feed["feed"], feed["job"], feed["publishers"], feed["keep"]) == ("policy", "trainer", 1, 2)
    facts = ("step", "state", "parts", "parts_put", "bytes", "num_readers", "readers", "holders")
    assert [[version[fact] for fact in facts] for version in feed["versions"]] == [
        [10, "readable", 1, 1, NBYTES, 0, [], []],
        [20, "readable", 1, 1, NBYTES, 0, [], []],
    ]


def test_a_reader_is_shown_with_its_version(run):
    with connect.as_job_of_command(10.0), dtckpt.open_checkpoint("live://policy@10"):
        (event,) = run("live", "--json").events
        text = run("live").out
    (reader,) = event["feeds"][0]["versions"][0]["readers"]
    assert reader["reader"].endswith("/client 0")
    assert f"{reader['reader']}: reads version {event['feeds'][0]['versions'][0]['number']}, for 0 s" in text


def test_inspect(run):
    result = run("inspect", "live://policy")
    assert (result.code, result.err) == (0, "")
    assert "checkpoint  live://policy@20\nformat      live version\n" in result.out
    (event,) = run("inspect", "live://policy@10", "--json").events
    assert (event["path"], event["format"], event["values"]) == ("live://policy@10", "live version", {"lr": 0.5})
    assert {each["name"]: each["bytes"] for each in event["tensors"]} == {"model/b": 16, "model/w": NBYTES - 16}


def test_verify(run):
    assert "live://policy@20 is sound: 2 tensors" in run("verify", "live://policy").out
    (event,) = run("verify", "live://policy@10", "--json").events
    assert (event["path"], event["is_sound"], event["bytes"]) == ("live://policy@10", True, NBYTES)


def test_diff(run):
    result = run("diff", "live://policy@10", "live://policy", "--values", "--json")
    *differences, total = result.events
    assert result.code == 1
    assert [(each["path"], each["different"]) for each in differences] == [("model/w", 48)]
    assert (total["a"], total["b"], total["is_same"]) == ("live://policy@10", "live://policy@20", False)
    assert run("diff", "live://policy@20", "live://policy").code == 0


def test_cat(run):
    assert run("cat", "live://policy", "model/w[0,:3]").out.split() == ["[20.", "21.", "22.]"]
    assert run("cat", "live://policy@10", "lr").out == "0.5\n"


@pytest.mark.parametrize("target", ["step_20", "model.safetensors"])
def test_convert(run, tmp_path, target):
    select = ["--select", "model/*"] if target.endswith("safetensors") else []
    result = run("convert", "live://policy", tmp_path / target, *select)
    assert (result.code, result.err) == (0, "")
    assert "converted live://policy@20 (live version)" in result.out
    tree = dtckpt.restore(tmp_path / target)
    weights = tree["model"] if "model" in tree else {"w": tree["model.w"]}
    assert torch.equal(weights["w"], torch.arange(48.0).reshape(6, 8) + 20)
    assert run("diff", "live://policy", tmp_path / "step_20").code == 0 or select


def test_reshard(run, tmp_path):
    result = run("reshard", "live://policy", tmp_path / "step_20", "--mesh", "x=2", "--layout", "model/w=x,unsharded")
    assert result.code == 0, result
    assert run("diff", "live://policy@20", tmp_path / "step_20", "--ignore", "layout").code == 0


def test_the_version_that_was_planned_is_converted(run, tmp_path, monkeypatch):
    """A version that is published between the plan and the work is not taken for the planned one."""
    from dtckpt.checkpoint.converting import convert as module

    opened, open_checkpoint = [], module.open_checkpoint

    def noted(path, **options):
        opened.append(str(path))
        return open_checkpoint(path, **options)

    monkeypatch.setattr(module, "open_checkpoint", noted)
    assert run("convert", "live://policy", tmp_path / "step_20").code == 0
    assert opened[:2] == ["live://policy", "live://policy@20"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("inspect", "live://none"), 3, "there is no version at live://none: no lease within 0 s: no job publishes"),
        (("inspect", "live://policy@15"), 3, "there is no version at live://policy@15"),
        (("verify", "live://policy@x"), 2, "expected live://feed or live://feed@step"),
        (("cat", "live://policy", "nothing"), 3, "nothing"),
        (("convert", "live://policy", "out.nothing", "--select", "none*"), 3, "none*"),
        (("ls", "live://policy"), 2, "is a live version; only a Publisher writes"),
        (("convert", "live://policy", "live://policy"), 2, "is a live version; only a Publisher writes"),
    ],
)
def test_errors(run, arguments, code, text, port, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(*arguments).fails(code, text)
    assert not any(version.num_leases for version in feed_of(port).versions)  # the lease ends with the command


def test_no_coordinator(run, monkeypatch, unused_address):
    monkeypatch.delenv("DTCKPT_COORDINATOR")
    run("inspect", "live://policy").fails(2, "live versions need a coordinator")
    run("live").fails(2, "there is no coordinator to ask")
    monkeypatch.setattr(live_access, "HEARTBEAT_TIMEOUT_S", 0.2)
    monkeypatch.setenv("DTCKPT_COORDINATOR", unused_address)
    run("inspect", "live://policy").fails(69, unused_address)
    run("live", "--timeout", "0.2").fails(69, unused_address)


@pytest.fixture
def unused_address():
    """An address at which no process listens."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_commands_at_one_time(run):
    """Each command is in a separate job, so none fences another."""
    with connect.as_job_of_command(10.0), dtckpt.open_checkpoint("live://policy"):
        assert run_process("cat", "live://policy", "lr").out == "0.5\n"
        assert run("cat", "live://policy", "lr").out == "0.5\n"


def test_completion_asks_no_coordinator(port):
    """It would join as a client of the job of the shell, whose place may be taken."""
    from dtckpt.cli.commands import cli
    from dtckpt.cli.options import complete_tensors

    command = cli.commands["cat"]
    context = command.make_context("cat", ["live://policy", "model/"], resilient_parsing=True)
    before = feed_of(port).latest
    assert complete_tensors(context, command.params[1], "model/") == []
    assert feed_of(port).latest == before


def test_a_token_of_a_job_lets_its_commands_read(run, monkeypatch, tmp_path, capsys):
    tokens = (
        "trainer trainer-token-0123456789\nengine engine-token-0123456789 reads=policy\njudge judge-token-01234567890\n"
    )
    monkeypatch.setenv("DTCKPT_COORDINATOR_INSECURE", "1")
    with (
        running_server(heartbeat_timeout_s=10.0, tokens=Tokens.parse(tokens)) as server,
        publisher(server.port, tmp_path / "live", DTCKPT_COORDINATOR_TOKEN="trainer-token-0123456789"),
    ):
        monkeypatch.setenv("DTCKPT_COORDINATOR", f"127.0.0.1:{server.port}")
        for job, code in (("engine", 0), ("trainer", 0), ("judge", 69)):
            token = f"{job}-token-0123456789" + ("0" if job == "judge" else "")
            monkeypatch.setenv("DTCKPT_COORDINATOR_TOKEN", token)
            monkeypatch.setenv("DTCKPT_JOB", job)
            assert run("cat", "live://policy", "lr").code == code, capsys.readouterr()
            assert ("feed policy" in run("live").out) == (code == 0)
