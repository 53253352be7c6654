"""What an operator sees of the coordinator: metrics, the status page, log lines, and how it ends."""

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from coordination.test_grpc_client import clients_at
from dtckpt_server import events, metrics, status_page
from dtckpt_server.events import TaskProgress
from dtckpt_server.logs import JsonFormatter, LineFormatter
from dtckpt_server.main import run
from dtckpt_server.metrics import Metrics, kind_of
from dtckpt_server.rules import Rules, apply
from dtckpt_server.server import Server, ServerConfig
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from support.client_calls import Running, at, leave_all, together, wait_until
from support.coordinators import running_server, server_in_thread, server_process

from dtckpt import __version__, errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination.feeds import events as feeds

PREFIX = "dtckpt_coordinator_"
TIMEOUT_S = 10.0


class World:
    """Rules, their metrics, and a clock that the test sets."""

    def __init__(self):
        self.now = 100.0
        self.rules = Rules(TIMEOUT_S, incarnation=0xC0)
        self.metrics = Metrics(lambda: self.rules, "1.2.3", lambda: self.now)
        self.calls = itertools.count(1)

    def happen(self, event):
        self.rules, effects = apply(self.rules, event, self.now)
        for transition in effects.log:
            self.metrics.note(transition)
        if effects.refusal is not None:
            self.metrics.note_refused_event(effects.refusal)
        return effects

    def register(self, job="job", num_clients=2, *, only=None, **options):
        for task in range(num_clients if only is None else only):
            self.happen(events.Register(events.Identity(job, task, task + 1), num_clients, **options))

    def arrive(self, task, name="save/begin", job="job", **options):
        arrival = {"call": next(self.calls), "participants": (), "timeout_s": 60.0, **options}
        return self.happen(events.Arrive(events.Identity(job, task, task + 1), name, **arrival))

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(PREFIX + name, labels)


@pytest.fixture
def world():
    world = World()
    world.register()
    return world


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_tasks_and_heartbeats(world):
    world.now += 3
    world.happen(events.Heartbeat(events.Identity("job", 0, 1)))
    world.happen(events.Heartbeat(events.Identity("job", 0, 99)))
    world.happen(events.Heartbeat(events.Identity("nobody", 0, 1)))
    assert world.value("heartbeats_total", job="job") == 1
    assert world.value("heartbeats_total", job="nobody") is None
    assert world.value("fenced_calls_total") == 1
    assert world.value("tasks", job="job", state="REGISTERED") == 2
    assert world.value("heartbeat_age_max_seconds", job="job") == 3
    world.happen(events.Tick())
    world.now += TIMEOUT_S - 2
    for _ in range(int(2 * TIMEOUT_S)):
        world.now += 0.5
        world.happen(events.Heartbeat(events.Identity("job", 0, 1)))
        world.happen(events.Tick())
    assert world.value("tasks", job="job", state="LOST") == 1
    assert world.value("task_lost_total", job="job", reason="heartbeat") == 1
    assert world.value("heartbeat_age_max_seconds", job="job") == 0


def test_barriers(world):
    world.arrive(0)
    assert world.value("barriers_open", job="job", kind="save_begin") == 1
    world.now += 2
    world.arrive(1)
    assert world.value("barriers_open", job="job", kind="save_begin") is None
    assert world.value("barriers_total", job="job", kind="save_begin", outcome="passed") == 1
    assert world.value("barrier_duration_seconds_sum", kind="save_begin") == 2
    world.arrive(0, "mine", timeout_s=5)
    world.now += 6
    world.happen(events.Tick())
    assert world.value("barriers_total", job="job", kind="user", outcome="timeout") == 1
    assert world.value("barrier_duration_seconds_sum", kind="user") == 6
    assert world.value("barrier_skew_seconds_sum", kind="user") == 0
    world.arrive(0, "save/begin", ok=False, reason="no")
    assert world.value("barriers_total", job="job", kind="save_begin", outcome="vote") == 1


def test_a_job_that_is_over_leaves_no_metrics(world):
    world.happen(events.Heartbeat(events.Identity("job", 0, 1)))
    for task in range(2):
        world.arrive(task)
        world.happen(events.Leave(events.Identity("job", task, task + 1)))
    assert any("job" in sample.labels for family in world.metrics.registry.collect() for sample in family.samples)
    world.now += 3601
    world.happen(events.Tick())
    assert not any("job" in sample.labels for family in world.metrics.registry.collect() for sample in family.samples)


def publish(world):
    """Let two clients of a trainer publish a version, and an engine lease and serve it."""
    world.register("trainer")
    world.register("engine", 1)
    who = [events.Identity("trainer", task, task + 1) for task in range(2)]
    for each in who:
        world.happen(feeds.OpenFeed(each, "policy", 0, 2, floor=1000, secret=b"s3cret" * 4))
    world.happen(feeds.Announce(who[0], "policy", 0, 1000, 70, 2, b"tree", 30.0))
    for each in who:
        world.happen(feeds.PutPart(each, "policy", 0, 1000, b"tcp://x", b"digest", 1 << 20, "host"))
    engine = events.Identity("engine", 0, 1)
    world.happen(feeds.Subscribe(engine, "policy", "left", 7))
    world.happen(feeds.Serve(engine, "policy", 1000, b"tree", b"tcp://y", b"", is_whole=True, nbytes=2 << 20))


def test_feeds_in_metrics(world):
    publish(world)
    world.now += 5.0
    for name in ("feeds", "feed_leases", "feed_holders"):
        assert world.value(name) == 1
    assert world.value("feed_versions", state="READABLE") == 1
    assert world.value("feed_age_max_seconds") == 5.0
    assert world.value("feed_version_changes_total", change="readable") == 1
    world.happen(events.Leave(events.Identity("engine", 0, 1)))
    assert world.value("feed_leases_ended_total", outcome="lost") == 1
    assert world.value("feed_leases") == world.value("feed_holders") == 0


def test_uses_of_versions(world):
    """Metrics and page tell the version that readers use, and not a version that they have only fetched."""
    publish(world)
    engine = events.Identity("engine", 0, 1)

    def uses():
        return [int(world.value("feed_readers", uses=kind)) for kind in ("newest", "older", "none")]

    assert uses() == [0, 0, 0]
    world.happen(feeds.Done(engine, "policy", 7, feeds.FETCHED))
    assert uses() == [0, 0, 1]
    world.happen(feeds.Done(engine, "policy", 7, feeds.APPLIED))
    assert uses() == [1, 0, 0]
    trainers = [events.Identity("trainer", task, task + 1) for task in range(2)]
    world.happen(feeds.Announce(trainers[0], "policy", 0, 1001, 71, 2, b"tree", 30.0))
    for each in trainers:
        world.happen(feeds.PutPart(each, "policy", 0, 1001, b"tcp://x", b"digest", 1 << 20, "host"))
    assert uses() == [0, 1, 0]
    world.happen(feeds.Subscribe(engine, "policy", "left", 8))
    world.happen(feeds.Done(engine, "policy", 8, feeds.FETCHED))
    assert uses() == [0, 1, 0]
    page = status_page.status_page(world.rules, world.now)
    assert "ended last: engine/left: applied 1000, engine/left: fetched 1001" in page
    world.happen(feeds.Done(engine, "policy", 8, feeds.APPLIED))
    assert uses() == [1, 0, 0]


def test_feeds_on_the_status_page(world):
    publish(world)
    page = status_page.status_page(world.rules, world.now)
    assert "<h2>feed policy</h2><p>published by trainer, attempt 0, keeps 2" in page
    cells = re.sub(r"<[^>]*>", "|", page.partition("<h2>feed policy")[2])
    assert re.search(r"1000\|+70\|+READABLE\|+0\.0 s\|+ ?2 / 2\|+2,097,152\|+1\|+1\|+engine/left", cells), cells
    assert "s3cret" not in page + repr(world.rules.feeds.feeds)


def test_feed_of_a_job_that_is_over_leaves_no_metrics(world):
    publish(world)
    for job, num_clients in (("engine", 1), ("trainer", 2)):
        for task in range(num_clients):
            world.happen(events.Leave(events.Identity(job, task, task + 1)))
    for _ in range(2):
        world.now += 4000.0
        world.happen(events.Tick())
    assert not world.rules.feeds.feeds
    assert not world.rules.jobs
    assert not any("job" in sample.labels for family in world.metrics.registry.collect() for sample in family.samples)


def test_names_of_barriers_make_no_labels():
    assert [kind_of(name) for name in ("save/written", "save/written#00ff", "save/other", "step 7", "save_begin")] == [
        "save_written", "save_written", "user", "user", "user",
    ]  # fmt: skip
    assert len(metrics.KINDS) < 20


def test_barriers_of_a_save_are_of_a_kind():
    """The names stand in dtckpt.checkpoint, which the server may not import."""
    from dtckpt.checkpoint.managing import manager, restore_newest, schedule
    from dtckpt.checkpoint.restoring import restore
    from dtckpt.checkpoint.saving import agree, save

    sources = {
        module: Path(module.__file__).read_text()
        for module in (manager, restore_newest, restore, agree, save, schedule)
    }
    for kind in metrics.KINDS:
        operation, name = kind.split("/")
        assert any(f'"{name}"' in text or f'"{kind}"' in text for text in sources.values()), kind
        assert any(f'"{operation}"' in text or f'"{kind}"' in text for text in sources.values()), kind


# --- pages ------------------------------------------------------------------------------------------------------------


def get(server, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{server.metrics_port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.headers, answer.read().decode()


@pytest.fixture
def server():
    with running_server(metrics_port=0, heartbeat_timeout_s=60.0) as server:
        yield server


def test_metrics_over_http(server):
    clients = clients_at(server.port, 2)
    together(clients, at("save/begin"))
    with pytest.raises(errors.ConfigError):
        clients_at(server.port, 3)[0].register()
    headers, text = get(server, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=")
    found = {
        (sample.name.removeprefix(PREFIX), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["build_info", ("version", __version__)] == 1
    assert abs(found["incarnation_start_timestamp_seconds",] - time.time()) < 60
    assert found["tasks", ("job", "job"), ("state", "REGISTERED")] == 2
    assert found["barriers_total", ("job", "job"), ("kind", "save_begin"), ("outcome", "passed")] == 1
    assert found["refused_calls_total", ("code", "INVALID_ARGUMENT")] == 1
    wait_until(lambda: f"{PREFIX}event_loop_lag_seconds_count 0.0\n" not in get(server, "/metrics")[1])
    headers, text = get(server, "/metrics?name[]=x", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    leave_all(clients)


def test_status_page(server):
    clients = clients_at(server.port, 2, job="<b>&job")
    waiting = Running(clients[:1], at("save/<i>"))
    wait_until(lambda: clients[0].status().barriers)
    headers, text = get(server, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "&lt;b&gt;&amp;job" in text
    assert "save/&lt;i&gt;" in text
    assert "client 1 (&lt;b&gt;&amp;job/1), which never registered" in text
    for tag in ("<b>", "<i>"):
        assert tag not in text
    together(clients[1:], at("save/<i>"))
    waiting.results()
    leave_all(clients)


def test_status_page_of_a_large_job_stays_small():
    world = World()
    world.register(num_clients=5000, host="h" * 256)
    for number in range(500):
        world.arrive(0, f"barrier {number}")
    page = status_page.status_page(world.rules, world.now)
    assert "and 4950 more tasks" in page
    assert "and 450 more open barriers" in page
    assert len(page) < 500_000


def test_who_is_worst_is_first():
    world = World()
    world.register()
    world.happen(events.Heartbeat(events.Identity("job", 1, 2), TaskProgress("write", 12, 1000, 4000)))
    world.happen(events.Tick())
    for _ in range(14):
        world.now += 0.5
        world.happen(events.Heartbeat(events.Identity("job", 0, 1)))
        world.happen(events.Tick())
    page = status_page.status_page(world.rules, world.now)
    bar = "<progress max=4000 value=1000></progress> 1,000 / 4,000 bytes"
    suspect = f"<td>1<td class=bad>SUSPECT<td>7.0 s ago<td>write<td>12<td>{bar}"
    assert page.index(suspect) < page.index("<td>0<td>REG")


def test_other_requests_are_refused(server):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/other")
    request = urllib.request.Request(f"http://127.0.0.1:{server.metrics_port}/", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=20)


def test_a_blocked_loop_is_answered_too(server, monkeypatch, caplog):
    monkeypatch.setattr(status_page, "RENDER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("dtckpt_server.server.MAX_PAUSE_S", 0.1)
    loop, is_blocked, go_on = server._pages._loop, threading.Event(), threading.Event()

    def block():
        is_blocked.set()
        go_on.wait(30)

    loop.call_soon_threadsafe(block)
    is_blocked.wait(30)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(server, "/metrics")
    time.sleep(0.5)  # more than the tick and the pause that is told of
    go_on.set()
    wait_until(lambda: "the event loop was blocked" in caplog.text)


def test_connections_are_limited(server, monkeypatch):
    monkeypatch.setattr(server._pages._server, "_slots", threading.BoundedSemaphore(1))
    import http.client

    silent = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=20)
    silent.connect()
    slots = server._pages._server._slots
    wait_until(lambda: slots._value == 0)
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected, urllib.error.URLError)):
        get(server, "/")
    silent.close()
    wait_until(lambda: slots._value == 1)
    get(server, "/")


def test_port_in_use_is_an_error(server):
    with (
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.metrics_port}"),
        running_server(metrics_port=server.metrics_port),
    ):
        pass


# --- log lines --------------------------------------------------------------------------------------------------------


def record(message, *arguments, **more):
    return logging.LogRecord("dtckpt_server", logging.INFO, "file", 1, message, arguments, None, **more)


def test_json_lines():
    entry = record("client %d\nleft", 3)
    entry.facts = {"event": "task_left", "job": "j", "task": 3}
    line = JsonFormatter().format(entry)
    found = json.loads(line)
    assert "\n" not in line
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "INFO", "logger": "dtckpt_server", "message": "client 3\nleft", **entry.facts}


def test_names_cannot_forge_lines():
    line = LineFormatter().format(record("%s registered", "job\n2026-01-01 INFO \x1b[2Jforged"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert "forged" in line


def test_refusals_are_told_but_do_not_flood(caplog):
    with server_in_thread() as port:
        for _ in range(50):
            with pytest.raises(errors.ConfigError):
                clients_at(port, 1, job="")[0].register()
    told = [entry for entry in caplog.records if getattr(entry, "facts", {}).get("event") == "call_refused"]
    assert 1 <= len(told) < 50
    assert told[0].facts["code"] == "INVALID_ARGUMENT"
    assert told[0].facts["method"] == "Register"
    assert "expected a job name" in told[0].getMessage()


# --- the end ----------------------------------------------------------------------------------------------------------


def arrival(task, name="b"):
    return pb.ArriveRequest(task=identity(task), name=name, call=1, timeout_s=20, vote=pb.Vote(ok=True))


def identity(task):
    return pb.TaskIdentity(job="drain", task=task, incarnation=task + 1)


def test_open_barriers_may_end_while_it_drains():
    with running_server(heartbeat_timeout_s=60.0, drain_timeout_s=20.0, health_port=0) as server:
        with (
            grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            grpc.insecure_channel(f"127.0.0.1:{server.health_port}") as probe,
        ):
            stub, health = pb_grpc.CoordinatorStub(channel), health_pb2_grpc.HealthStub(probe)
            for task in range(2):
                stub.Register(pb.RegisterRequest(task=identity(task), num_clients=2), timeout=10)
            barrier_id = stub.Arrive(arrival(0), timeout=10).barrier_id
            waiting = stub.Await.future(
                pb.AwaitRequest(task=identity(0), barrier_id=barrier_id, max_wait_s=20), timeout=20
            )
            stopping = asyncio.run_coroutine_threadsafe(server.stop(5.0), server._running[0].get_loop())
            check = health_pb2.HealthCheckRequest(service="readiness")
            wait_until(lambda: health.Check(check, timeout=10).status == health_pb2.HealthCheckResponse.NOT_SERVING)
            for refused in (
                lambda: stub.Arrive(arrival(1, "new"), timeout=10),
                lambda: stub.Register(pb.RegisterRequest(task=identity(1), num_clients=2), timeout=10),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    refused()
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert stub.Heartbeat(pb.HeartbeatRequest(task=identity(1)), timeout=10).draining
            assert not stopping.done()
            assert stub.Arrive(arrival(1), timeout=10).verdict.state == pb.BARRIER_STATE_PASSED
            assert waiting.result().verdict.state == pb.BARRIER_STATE_PASSED
        stopping.result(20)


@pytest.mark.processes
def test_command_tells_programs_what_happens():
    arguments = ("--insecure", "--log-format", "json", "--metrics-port", "0", "--drain-timeout-s", "0.1")
    with server_process(*arguments, heartbeat_timeout_s=1.0) as server:
        where = server.process.stdout.readline().split()[-1]
        (client,) = clients_at(server.port, 1)
        client.barrier("save/begin", timeout_s=10)
        with urllib.request.urlopen(where, timeout=20) as answer:
            assert b'barriers_total{job="job",kind="save_begin",outcome="passed"} 1.0' in answer.read()
        client.leave()
        lines = [json.loads(line) for line in server.terminate().splitlines()]
        assert server.process.returncode == 143
    transitions = [line for line in lines if "event" in line]
    assert [line["event"] for line in transitions] == ["task_registered", "barrier_passed", "task_left"]
    registered, passed, left = transitions
    assert {registered["job"], passed["job"], left["job"]} == {"job"}
    assert (registered["task"], registered["attempt"]) == (0, 0)
    assert registered["incarnation"] == f"{client.member.incarnation:x}" == left["incarnation"]
    assert (passed["barrier"], passed["generation"], passed["outcome"]) == ("save/begin", 0, "passed")


def test_exit_code_tells_that_the_end_was_not_in_order(monkeypatch, caplog):
    async def start(self, start=Server.start):
        await start(self)
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)

    async def stop(self, stop=Server.stop):
        await stop(self)
        raise RuntimeError("a page does not close")

    monkeypatch.setattr(Server, "start", start)
    assert asyncio.run(run(ServerConfig(port=0))) == 128 + signal.SIGTERM
    monkeypatch.setattr(Server, "stop", stop)
    assert asyncio.run(run(ServerConfig(port=0))) == 70
    assert "a page does not close" in caplog.text


def squares_of(world):
    page = status_page.status_page(world.rules, world.now)
    return re.findall(r"<u class='([a-z ]+)' title='([^']*)'>(.*?)</u>", page)


def test_each_client_has_a_square_that_tells_its_state():
    world = World()
    world.register(num_clients=4, only=3)
    world.arrive(0, "save")
    assert squares_of(world) == [
        ("r", "client 0: alive", ""),
        ("r w", "client 1: alive, waited for", ""),
        ("r w", "client 2: alive, waited for", ""),
        ("n w", "client 3: never registered, waited for", ""),
    ]
    world.happen(events.Leave(events.Identity("job", 2, 3)))
    world.now += 0.7 * TIMEOUT_S
    world.happen(events.Heartbeat(events.Identity("job", 0, 1)))
    world.happen(events.Tick())
    assert [square[::2] for square in squares_of(world)][:3] == [("r", ""), ("s", "?"), ("e", "·")]


def test_of_many_clients_a_square_is_a_block_and_shows_the_worst():
    world = World()
    world.register(num_clients=2000)
    squares = squares_of(world)
    assert len(squares) == 500
    assert squares[1] == ("r", "clients 4 to 7: alive", "")
    world.now += 0.7 * TIMEOUT_S
    for number in range(2000):
        if number != 5:
            world.happen(events.Heartbeat(events.Identity("job", number, number + 1)))
    world.happen(events.Tick())
    assert [square for square in squares_of(world) if square[0] != "r"] == [
        ("s", "clients 4 to 7: silent for half of the timeout", "?")
    ]


def test_a_job_that_claims_a_million_clients_has_no_squares():
    world = World()
    world.register(num_clients=1_000_000, only=1)
    assert squares_of(world) == []
