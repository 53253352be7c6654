"""TLS of the data: readers verify all bytes served by it, and take nothing else for it."""

import os
import socket
import time
from datetime import UTC, datetime, timedelta

import pytest
from support.certificates import Authority

from dtckpt.checkpoint.parts.data_tls import DataTls
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.errors import ConfigError, StorageError, StoragePermissionError

from .test_server import DATA, SAVE, TOKEN, WAIT_S, folder, index_of, read  # noqa: F401  the fixture

CA = "DTCKPT_DATA_CA"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def serve(folder):  # noqa: F811
    """Start servers with certificates; they end with the test."""
    started = []

    def start(cert, key):
        server = PartServer(folder, "127.0.0.1", 2.0, tls=DataTls(cert, key))
        server.open(TOKEN)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


def trusting(authority, **options):
    return DataTls(ca=authority.ca, ca_variable=CA, is_required=True, **options)


def peer_of(server, tls):
    return Peer(server.url, "there", TOKEN, WAIT_S, tls=tls)


def test_parts_by_tls(serve, folder, ours):  # noqa: F811
    server = serve(ours.cert, ours.key)
    assert server.url.startswith("https://127.0.0.1:")
    peer = peer_of(server, trusting(ours))
    peer.put(SAVE, 1, index_of().to_bytes(), DATA, None)
    assert read(peer, 0, (0, 0), (12, 5)) == bytes(DATA)  # a file's bytes, which the kernel would send in plaintext
    assert len(read(peer, 0, (1, 2), (3, 2))) == 24
    assert [len(file) for file in peer.indexes(SAVE)] == [len(index_of().to_bytes())]
    host, _, port = server.url.removeprefix("https://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as plain:
        plain.sendall(f"GET /v1/indexes/{SAVE.name} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert b"HTTP" not in plain.recv(1 << 16)


@pytest.mark.parametrize("fault", ["authority", "expired", "name"])
def test_certificates_that_are_not_to_be_trusted(serve, ours, theirs, tmp_path, fault):
    cert, key = tmp_path / "cert", tmp_path / "key"
    now = datetime.now(UTC)
    text = {
        "authority": "self-signed certificate|unable to get local issuer",
        "expired": "certificate has expired",
        "name": "IP address mismatch, certificate is not valid for '127.0.0.1'",
    }[fault]
    issuer = theirs if fault == "authority" else ours
    name = "trainer.example" if fault == "name" else "127.0.0.1"
    issuer.issue(cert, key, name, not_after=now - timedelta(days=1) if fault == "expired" else None)
    server = serve(cert, key)
    start = time.monotonic()
    expected = rf"host there is not to be trusted at 127.0.0.1, as {CA} says: .*({text}).*DTCKPT_DATA_SERVER_NAME"
    with pytest.raises(StoragePermissionError, match=expected):
        peer_of(server, trusting(ours)).indexes(SAVE)
    assert time.monotonic() - start < WAIT_S / 2
    if fault == "name":
        assert peer_of(server, trusting(ours, server_name="trainer.example")).indexes(SAVE) == []


def test_plaintext_is_refused_where_tls_is_asked_for(folder, ours):  # noqa: F811
    server = PartServer(folder, "127.0.0.1", 2.0, tls=DataTls())
    server.open(TOKEN)
    try:
        with pytest.raises(
            StoragePermissionError, match="host there serves its parts in plaintext, and DTCKPT_DATA_CA"
        ):
            peer_of(server, trusting(ours)).indexes(SAVE)
        by_tls = Peer(f"https://{server.url}", "there", TOKEN, 5.0, tls=trusting(ours))
        with pytest.raises(StorageError, match=r"host there: no TLS with its server at 127\.0\.0\.1"):
            by_tls.indexes(SAVE)
        # The authorities of the coordinator count for sources that serve by TLS, and ask for none.
        env = {"DTCKPT_COORDINATOR_CA": str(ours.ca)}
        assert peer_of(server, DataTls.from_environ(env)).indexes(SAVE) == []
    finally:
        server.close()


def test_no_authorities_are_named(serve, ours):
    with pytest.raises(ConfigError, match="host there serves its parts by TLS; set DTCKPT_DATA_CA"):
        peer_of(serve(ours.cert, ours.key), DataTls()).indexes(SAVE)


def test_certificates_are_read_again(serve, ours, theirs, tmp_path):
    cert, key = tmp_path / "cert", tmp_path / "key"
    ours.issue(cert, key, "127.0.0.1")
    server = serve(cert, key)
    assert peer_of(server, trusting(ours)).indexes(SAVE) == []
    key.write_text("")
    assert peer_of(server, trusting(ours)).indexes(SAVE) == []  # the one in use stays
    theirs.issue(cert, key, "127.0.0.1")
    assert peer_of(server, trusting(theirs)).indexes(SAVE) == []
    with pytest.raises(StoragePermissionError):
        peer_of(server, trusting(ours)).indexes(SAVE)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"CERT": "x"}, "DTCKPT_DATA_CERT and DTCKPT_DATA_KEY come together, and with DTCKPT_DATA_CA"),
        ({"CERT": "x", "KEY": "y"}, "come together, and with DTCKPT_DATA_CA"),
        (
            {"CERT": "/none", "KEY": "/none", "CA": "/none"},
            "DTCKPT_DATA_CERT=/none, .*KEY=/none cannot be used: No such",
        ),
    ],
)
def test_settings_that_cannot_be_used(folder, monkeypatch, variables, text):  # noqa: F811
    for name in [name for name in os.environ if name.startswith("DTCKPT_DATA_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(f"DTCKPT_DATA_{name}", value)
    with pytest.raises(ConfigError, match=text):
        PartServer(folder, "127.0.0.1", 2.0)


def test_authorities_that_cannot_be_read(serve, ours, tmp_path):
    (tmp_path / "ca").write_text("nothing")
    tls = DataTls(ca=tmp_path / "ca", ca_variable=CA)
    with pytest.raises(ConfigError, match=f"{CA}=.*/ca cannot be used"):
        peer_of(serve(ours.cert, ours.key), tls).indexes(SAVE)
