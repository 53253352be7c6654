"""A server of parts goes on for others, however slow, many or long-winded its strangers are."""

import json
import socket
import ssl
import threading
import time

import numpy as np
import pytest
import torch
from support.certificates import Authority

from dtckpt.checkpoint.parts import connections, open_part
from dtckpt.checkpoint.parts import server as server_module
from dtckpt.checkpoint.parts.connections import ServerConnections
from dtckpt.checkpoint.parts.data_tls import DataTls
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.format.digest import as_bytes

from .test_server import DATA, SAVE, TOKEN, folder, index_of, put, read, request  # noqa: F401  the fixture

WAIT_S = 10.0
ELEMENTS = np.arange(60, dtype=np.float32)


@pytest.fixture
def make(folder):  # noqa: F811
    """Make servers; they end with the test."""
    made = []

    def start(timeout_s=2.0, tls=None):
        server = PartServer(folder, "127.0.0.1", timeout_s, tls=tls or DataTls())
        server.open(TOKEN)
        made.append(server)
        return server

    yield start
    for server in made:
        server.close()


def connected(server):
    host, _, port = server.url.removeprefix("https://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def head(path, nbytes=0, method="GET", token=TOKEN):
    return f"{method} {path} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {nbytes}\r\n\r\n".encode()


def drip(connection, data, pause_s=0.05):
    """Send byte after byte until the server hangs up; return the seconds."""
    start = time.monotonic()
    connection.settimeout(pause_s)
    for byte in data:
        try:
            connection.sendall(bytes([byte]))
            if not connection.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        raise AssertionError("the server has waited for the last byte")
    return time.monotonic() - start


@pytest.mark.parametrize("token", [TOKEN, "none"])
def test_heads_that_drip(make, monkeypatch, token):
    monkeypatch.setattr(server_module, "HEAD_S", 0.4)
    server = make(timeout_s=30.0)
    with connected(server) as slow:
        assert drip(slow, head(f"/v1/indexes/{SAVE.name}", token=token)) < WAIT_S
    with connected(server) as silent:
        assert silent.recv(1) == b""
    assert request(server, "GET", f"/v1/indexes/{SAVE.name}") == 200


def test_handshakes_that_do_not_end(make, monkeypatch, tmp_path):
    monkeypatch.setattr(server_module, "HEAD_S", 0.4)
    ours = Authority(tmp_path / "tls")
    server = make(timeout_s=30.0, tls=DataTls(ours.cert, ours.key))
    with connected(server) as silent:
        assert silent.recv(1) == b""
    with connected(server) as slow:
        assert drip(slow, b"\x16\x03\x01\x02\x00\x01" + bytes(100)) < WAIT_S
    context = ssl.create_default_context(cafile=str(ours.ca))
    with connected(server) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
        assert secured.recv(1) == b""  # no head comes
    tls = DataTls(ca=ours.ca, ca_variable="DTCKPT_DATA_CA")
    assert Peer(server.url, "here", TOKEN, 5.0, tls=tls).indexes(SAVE) == []


def test_bodies_that_drip(make):
    server = make(timeout_s=0.4)
    with connected(server) as slow:
        slow.sendall(head(f"/v1/read/{SAVE.name}/1", 1000, "POST"))
        assert drip(slow, b"[" * 1000) < WAIT_S
    assert request(server, "GET", f"/v1/indexes/{SAVE.name}") == 200


def test_heads_that_are_too_long(make):
    server = make()
    line = b"X-%d: " + b"x" * 1000 + b"\r\n"
    for data in (b"GET /" + b"x" * 60_000, b"GET / HTTP/1.1\r\n" + b"".join(line % number for number in range(50))):
        with connected(server) as stranger:
            try:
                stranger.sendall(data)
                answer = stranger.recv(1 << 16)
            except ConnectionError:
                answer = b""
            assert answer[:12] in (b"", b"HTTP/1.1 431")
    assert request(server, "GET", f"/v1/indexes/{SAVE.name}") == 200


def test_an_answer_that_is_not_taken(make, folder, monkeypatch):  # noqa: F811
    """Its connection ends, though its reader takes a byte now and then."""
    monkeypatch.setattr(server_module, "MIN_RATE", 1 << 40)
    server = make(timeout_s=0.5)
    ended = threading.Event()
    whole = server_module._PartHandler._answer

    def large(handler, parts, status=200):
        try:
            whole(handler, [*parts, bytes(64 << 20)], status)
        finally:
            ended.set()

    monkeypatch.setattr(server_module._PartHandler, "_answer", large)
    with connected(server) as slow:
        slow.sendall(head(f"/v1/indexes/{SAVE.name}"))
        deadline = time.monotonic() + WAIT_S
        while not ended.wait(0.05) and time.monotonic() < deadline:
            slow.recv(1000)
        assert ended.is_set()


def test_an_answer_that_takes_longer_than_the_timeout(make, monkeypatch):
    """The timeout is for each step: an answer that goes on comes to its end."""
    server, whole, nbytes = make(timeout_s=0.5), server_module._PartHandler._answer, 64 << 20
    monkeypatch.setattr(
        server_module._PartHandler, "_answer", lambda handler, _: whole(handler, [memoryview(bytes(nbytes))])
    )
    with connected(server) as reader:
        reader.sendall(head(f"/v1/indexes/{SAVE.name}"))
        left, start = nbytes, time.monotonic()
        while left > 0:
            data = reader.recv(1 << 20)
            assert data, f"the answer ended {left} bytes too early, after {time.monotonic() - start:.1f} s"
            left -= len(data)
            time.sleep(len(data) / nbytes * 1.5)
        assert time.monotonic() - start > 1.0


def test_who_shows_no_token_makes_room(make, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "SHOW_S", 0.2)
    server = make(timeout_s=30.0)
    kept = [connected(server) for _ in range(4)]
    try:
        assert request(server, "GET", f"/v1/indexes/{SAVE.name}") == 200
        kept[0].settimeout(WAIT_S)
        assert kept[0].recv(1) == b""  # the oldest
    finally:
        for connection in kept:
            connection.close()


def test_a_place_is_waited_for(make, monkeypatch):
    """No client is refused because others are served."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    server, begun, goes_on = make(timeout_s=30.0), threading.Semaphore(0), threading.Event()

    def indexes(handler, save):
        begun.release()
        assert goes_on.wait(WAIT_S)
        yield b""

    monkeypatch.setattr(server_module._PartHandler, "_indexes", indexes)
    statuses = []
    readers = [
        threading.Thread(target=lambda: statuses.append(request(server, "GET", f"/v1/indexes/{SAVE.name}")))
        for _ in range(5)
    ]
    for reader in readers:
        reader.start()
    for _ in range(2):
        assert begun.acquire(timeout=WAIT_S)
    assert not begun.acquire(timeout=0.3)
    goes_on.set()
    for reader in readers:
        reader.join(WAIT_S)
    assert statuses == [200] * 5


def test_a_server_ends_while_connections_wait(make, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(connections, "SHOW_S", 1000.0)
    server = make(timeout_s=30.0)
    kept = [connected(server) for _ in range(3)]
    time.sleep(0.2)
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < 5.0
    for connection in kept:
        connection.close()


def test_a_thousand_readers(make, folder):  # noqa: F811
    """All ask at one time, each gets its box."""
    server = make(timeout_s=60.0)
    Peer(server.url, "here", TOKEN, 5.0).put(SAVE, 1, index_of().to_bytes(), DATA, None)
    body = json.dumps([[0, [3, 1], [2, 3], None]]).encode()
    asked = head(f"/v1/read/{SAVE.name}/1", len(body), "POST").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    readers = []
    try:
        for _ in range(1000):
            readers.append(connected(server))
            readers[-1].sendall(asked + body)
        expected = ELEMENTS.reshape(12, 5)[3:5, 1:4].tobytes()
        for reader in readers:
            reader.settimeout(60.0)
            answer = b"".join(iter(lambda: reader.recv(4096), b""))  # noqa: B023  it is called at once
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
            assert answer.partition(b"\r\n\r\n")[2][: len(expected)] == expected
    finally:
        for reader in readers:
            reader.close()


def test_strided_boxes_are_copied_bit_by_bit(make, folder, monkeypatch):  # noqa: F811
    put(folder, SAVE, torch.from_numpy(ELEMENTS.reshape(12, 5)))
    sizes = []
    monkeypatch.setattr(open_part, "SPAN_NBYTES", 64)
    monkeypatch.setattr(server_module, "as_bytes", lambda elements: sizes.append(elements.nbytes) or as_bytes(elements))
    peer = Peer(make().url, "here", TOKEN, 5.0)
    found = read(peer, 0, (1, 2), (9, 2))
    assert found == ELEMENTS.reshape(12, 5)[1:10, 2:4].tobytes()
    assert max(sizes) <= 64
    assert sum(sizes) == len(found)


def test_time_in_which_the_process_stood_still_does_not_count():
    now = [0.0]
    ours, theirs = socket.socketpair()
    places = ServerConnections(2, clock=lambda: now[0])
    with ours, theirs:
        place = places.begin(ours, 3.0, 0.0)
        now[0] += 1000.0
        places.tick()
        theirs.settimeout(0.05)
        with pytest.raises(TimeoutError):
            theirs.recv(1)
        for _ in range(3):
            now[0] += 0.9
            places.tick()
        assert theirs.recv(1) == b""
        places.end(place)
