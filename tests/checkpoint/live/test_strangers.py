"""Damaged memory, and strangers at the server of live versions; see ``test_situations`` for the numbers."""

import ast
import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from support.certificates import Authority

import dtckpt
from dtckpt import Subscriber, errors
from dtckpt.checkpoint.live import publisher as publisher_module
from dtckpt.checkpoint.live import sources
from dtckpt.checkpoint.live.version_checkpoint import save_of_lease

from .jobs_here import FEED, WAIT_S, blank, files, has_step, publish


@pytest.mark.parametrize("way", ["mapped", "http"])
def test_38_damaged_memory(jobs, monkeypatch, way):
    if way == "http":
        monkeypatch.setattr(sources, "folder_of", lambda _: None)
    publish(jobs.publisher(), 1)
    (data,) = [path for path in files(jobs.folder) if path.suffix == ".data"]
    with data.open("r+b") as file:
        file.write(b"\xff")
    target = blank()
    with Subscriber(FEED, target) as subscriber:
        with pytest.raises(errors.CheckpointCorruptError, match=r"no host holds the part of client 0 .* undamaged"):
            jobs.fetch(subscriber)
        assert (subscriber.version, all(not value.count_nonzero() for value in target.values())) == (None, True)


class Stranger:
    """Sends requests to a publisher's server."""

    def __init__(self, url, lease):
        self._url = url
        self.ticket = lease.parts[0].ticket.hex()
        self.save = save_of_lease(lease)

    def ask(self, method, path, *, shown=None, body=None, **headers):
        connection = HTTPConnection(self._url, timeout=10.0)
        try:
            shown = self.ticket if shown is None else shown
            connection.request(method, path, body, {"Authorization": f"Bearer {shown}"} | headers)
            return connection.getresponse().status
        except ConnectionError:
            return 0  # the server has hung up before it was told all
        finally:
            connection.close()

    def read(self, boxes, **options):
        body = boxes if isinstance(boxes, bytes) else json.dumps(boxes).encode()
        return self.ask("POST", f"/v1/read/{self.save.name}/0", body=body, **options)


def test_40_strangers_at_the_server(jobs, monkeypatch):
    publisher = jobs.publisher(keep=2)
    publish(publisher, 1)
    lease = jobs.feeds("engine").subscribe(FEED, timeout_s=WAIT_S)
    publish(publisher, 2)
    other = replace(save_of_lease(lease), number=lease.number + 1, step=2)
    stranger = Stranger(publisher._server.url, lease)
    name = stranger.save.name
    whole = [[0, [0, 0], [8, 6], None]]
    assert stranger.read(whole) == 200
    assert stranger.ask("GET", f"/v1/indexes/{name}") == 200
    forged = stranger.ticket[:-2] + ("00" if stranger.ticket[-2:] != "00" else "11")
    for shown in ("", "x", "\xff", forged, stranger.ticket * 20, "0" * 10_000):
        assert stranger.read(whole, shown=shown) == 403
    assert stranger.read(whole, shown="0" * 60_000) in (0, 431)
    assert stranger.ask("GET", f"/v1/indexes/{other.name}") == 403
    assert stranger.ask("PUT", f"/v1/parts/{name}/0", body=b"x" * 100) == 403
    assert stranger.ask("GET", "/v1/texts/1") == 403
    with monkeypatch.context() as patch:
        patch.setattr(publisher_module.time, "time", lambda now=time.time: now() + 2 * 3600)
        assert stranger.read(whole) == 403
    for path in ("/", "/v1", "/v1/read/../../etc/passwd/0", f"/v1/read/{name}", "/v1/other/x"):
        assert stranger.ask("POST", path, body=b"") in (400, 403, 404)
    for client in ("-1", "1", "x", "9" * 30):
        assert stranger.ask("POST", f"/v1/read/{name}/{client}", body=json.dumps(whole).encode()) in (400, 404)
    malformed = [
        b"", b"{", b"\xff\xff", b"3", b"null", b"{}x", b"[1]", b"[[]]", b"[" * 100_000, b'"text"',
        b'[["0",[0,0],[1,1],null]]', [[9, [0, 0], [1, 1], None]], [[-1, [0, 0], [1, 1], None]],
        [[0, [0, 0], [9, 1], None]], [[0, [-1, 0], [1, 1], None]], [[0, [0], [1], None]], [[0, [0, 0], [0, 0], None]],
        [[0, [0, 0], [1.5, 1], None]], [[True, [0, 0], [1, "1"], None]], [[0, [0, 0], [1, 1], None]] * 5000,
    ]  # fmt: skip
    for body in malformed:
        assert stranger.read(body) == 400, body[:3]
    for length in ("x", "-5", str(1 << 50), ""):
        assert stranger.ask("POST", f"/v1/read/{name}/0", **{"Content-Length": length}) == 400
    assert stranger.read(whole) == 200
    assert jobs.update(Subscriber(FEED, blank())).step == 2


def test_40_answers_are_bounded(jobs, monkeypatch):
    publisher = jobs.publisher()
    publish(publisher, 1, {"w": torch.zeros(1024, 1024)})
    stranger = Stranger(publisher._server.url, jobs.feeds("engine").subscribe(FEED, timeout_s=WAIT_S))
    assert stranger.read([[0, [0, 0], [1024, 1000], None]] * 20) == 400
    assert stranger.read([[0, [0, 0], [1024, 1000], None]]) == 200


@pytest.mark.parametrize("fault", ["", "authority", "expired", "name", "plaintext"])
def test_40_data_by_tls(jobs, monkeypatch, tmp_path, over_http, fault):
    """A reader takes nothing from a source that it cannot trust, and says why."""
    ours = Authority(tmp_path / "ours", "trainer.example" if fault == "name" else "127.0.0.1")
    if fault == "expired":
        ours.issue(ours.cert, ours.key, "127.0.0.1", not_after=datetime.now(UTC) - timedelta(days=1))
    if fault != "plaintext":
        monkeypatch.setenv("DTCKPT_DATA_CA", str(ours.ca))
        monkeypatch.setenv("DTCKPT_DATA_CERT", str(ours.cert))
        monkeypatch.setenv("DTCKPT_DATA_KEY", str(ours.key))
    publish(jobs.publisher(), 1)
    for name in ("CERT", "KEY"):
        monkeypatch.delenv(f"DTCKPT_DATA_{name}", raising=False)
    trusted = Authority(tmp_path / "theirs") if fault == "authority" else ours
    monkeypatch.setenv("DTCKPT_DATA_CA", str(trusted.ca))
    target = blank()
    with Subscriber(FEED, target) as subscriber:
        if fault:
            text = {
                "authority": "not to be trusted at 127.0.0.1, as DTCKPT_DATA_CA says",
                "expired": "certificate has expired",
                "name": "IP address mismatch",
                "plaintext": "serves its parts in plaintext, and DTCKPT_DATA_CA asks for TLS",
            }[fault]
            with pytest.raises(errors.SourceLostError, match=rf"cannot be read: client 0: host .*{text}"):
                jobs.fetch(subscriber)
        if fault == "name":
            monkeypatch.setenv("DTCKPT_DATA_SERVER_NAME", "trainer.example")
        if fault in ("", "name"):
            assert jobs.update(subscriber).step == 1
        assert has_step(target, 1) == (fault in ("", "name"))


def test_40_nothing_is_unpickled():
    root = Path(dtckpt.__file__).parent
    for folder in ("checkpoint/live", "checkpoint/parts", "coordination/feeds"):
        for path in (root / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                calls = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(names), path
                assert (getattr(getattr(node, "func", None), "value", None), calls) != ("torch", "load"), path
