"""A bucket of S3 in memory, on loopback, that answers every request late and counts requests.

moto's server, which the tests use, answers some hundred requests a second; this one is fast enough to be measured
against. It knows what checkpoints need: objects and ranges of them, conditional writes, uploads in parts, and lists.
Signatures and checksums are not looked at.

Run: ``python -m benchmarks.bucket_server [--latency-ms 20]``; it prints its URL. ``GET /-/counts`` returns the counts
since the last such request; ``GET /-/clear`` removes all objects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BufferedIOBase
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from typing_extensions import override

COUNTS, CLEAR = "/-/counts", "/-/clear"
PIECE_NBYTES = 1 << 20
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_REGION": "us-east-1"}


@dataclass(slots=True)
class Counts:
    """What clients asked for.

    Args:
        requests: Number of requests.
        most_in_flight: Most requests at one time, from their first line to the end of the answer.
        by_method: Number of requests by method.
    """

    requests: int = 0
    most_in_flight: int = 0
    by_method: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its method, the object's name ("bucket/key"), the query, headers in lower case, and the body."""

    method: str
    name: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; ``size`` is the length that it tells, if that is not the body's."""

    status: int
    body: bytes | memoryview = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None


class BucketServer(socketserver.ThreadingTCPServer):
    """The server: a thread per connection."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.latency_s = latency_s
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes | bytearray, str]] = {}
        self.uploads: dict[str, dict[int, bytes | bytearray]] = {}
        self._tags = itertools.count(1)
        self._counts = Counts()
        self._in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def begin(self, method: str) -> None:
        """Count a request that has come."""
        with self.lock:
            self._in_flight += 1
            counts = self._counts
            counts.requests += 1
            counts.most_in_flight = max(counts.most_in_flight, self._in_flight)
            counts.by_method[method] = counts.by_method.get(method, 0) + 1

    def end(self) -> None:
        """Count a request that was answered."""
        with self.lock:
            self._in_flight -= 1

    def take_counts(self) -> Counts:
        """Return the counts since the last call."""
        with self.lock:
            counts, self._counts = self._counts, Counts()
        return counts

    def clear(self) -> Counts:
        """Remove all objects; return the counts."""
        with self.lock:
            self.objects.clear()
        return self.take_counts()

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for."""
        match request.method:
            case "GET" if "list-type" in request.query:
                return self._list(request)
            case "GET" | "HEAD":
                return self._read(request)
            case "PUT" if "uploadId" in request.query:
                self.uploads[request.query["uploadId"]][int(request.query["partNumber"])] = request.body
                return Answer(200, headers={"ETag": f'"{next(self._tags)}"'})
            case "PUT" if "x-amz-copy-source" in request.headers:
                source = unquote(request.headers["x-amz-copy-source"]).strip("/")
                written = self._write(request, self.objects[source][0])
                return _xml("CopyObjectResult", f"<ETag>{written.headers.get('ETag', '')}</ETag>")
            case "PUT":
                return self._write(request, request.body)
            case "POST" if "uploads" in request.query:
                number = str(next(self._tags))
                self.uploads[number] = {}
                return _xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
            case "POST" if "uploadId" in request.query:
                parts = self.uploads.pop(request.query["uploadId"])
                written = self._write(request, b"".join(parts[number] for number in sorted(parts)))
                return _xml("CompleteMultipartUploadResult", f"<ETag>{written.headers.get('ETag', '')}</ETag>")
            case "DELETE":
                with self.lock:
                    self.objects.pop(request.name, None)
                return Answer(204)
        return Answer(501)

    def _read(self, request: Request) -> Answer:
        stored = self.objects.get(request.name)
        if stored is None:
            return _error(404, "NoSuchKey")
        data, tag = stored
        headers = {"ETag": tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if request.method == "HEAD":
            return Answer(200, headers=headers, size=len(data))
        wanted = request.headers.get("range")
        if wanted is None:
            return Answer(200, memoryview(data), headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= len(data):
            return _error(416, "InvalidRange")
        return Answer(
            206, memoryview(data)[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        )

    def _write(self, request: Request, body: bytes | bytearray) -> Answer:
        with self.lock:
            tag = self.objects.get(request.name, (b"", ""))[1]
            must_match = request.headers.get("if-match")
            if (request.headers.get("if-none-match") == "*" and tag) or (must_match is not None and must_match != tag):
                return _error(412, "PreconditionFailed")
            tag = f'"{next(self._tags)}"'
            self.objects[request.name] = body, tag
        return Answer(200, headers={"ETag": tag})

    def _list(self, request: Request) -> Answer:
        bucket = request.name.partition("/")[0] + "/"
        prefix, after = (bucket + request.query.get(name, "") for name in ("prefix", "start-after"))
        with self.lock:
            found = sorted(
                (name, len(data), tag)
                for name, (data, tag) in self.objects.items()
                if name.startswith(prefix) and name > after
            )
        contents = "".join(
            f"<Contents><Key>{escape(name.removeprefix(bucket))}</Key><Size>{size}</Size><ETag>{escape(tag)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for name, size, tag in found
        )
        return _xml("ListBucketResult", f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>{contents}")


def _xml(kind: str, content: str) -> Answer:
    text = f'<?xml version="1.0"?><{kind} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{kind}>'
    return Answer(200, text.encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())


class _Connection(socketserver.StreamRequestHandler):
    server: BucketServer
    rbufsize = 1 << 16
    disable_nagle_algorithm = True

    @override
    def handle(self) -> None:
        try:
            while line := self.rfile.readline():
                self._answer_one(line.decode())
        except ConnectionError:
            return  # the client has gone

    def _answer_one(self, line: str) -> None:
        method, target, _ = line.split(" ", 2)
        headers = {}
        while header := self.rfile.readline().decode().strip():
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        parts = urlsplit(target)
        if parts.path in (COUNTS, CLEAR):
            counts = self.server.take_counts() if parts.path == COUNTS else self.server.clear()
            self._send(method, Answer(200, json.dumps(asdict(counts)).encode()))
            return
        self.server.begin(method)
        try:
            if headers.get("expect") == "100-continue":
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
            request = Request(method, unquote(parts.path).strip("/"), query, headers, self._body(headers))
            time.sleep(self.server.latency_s)
            self._send(method, self.server.answer(request))
        finally:
            self.server.end()

    def _body(self, headers: Mapping[str, str]) -> bytes | bytearray:
        if "aws-chunked" in headers.get("content-encoding", ""):
            return b"".join(_chunks(self.rfile))
        return _read(self.rfile, int(headers.get("content-length", 0)))

    def _send(self, method: str, answer: Answer) -> None:
        size = len(answer.body) if answer.size is None else answer.size
        lines = [f"HTTP/1.1 {answer.status} -", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        self.connection.sendall(head if method == "HEAD" or len(answer.body) > PIECE_NBYTES else head + answer.body)
        if method != "HEAD" and len(answer.body) > PIECE_NBYTES:
            self.connection.sendall(answer.body)


def _read(file: BufferedIOBase, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view.nbytes:
        count = file.readinto(view)
        if not count:
            raise ConnectionError("the client ended within a body")
        view = view[count:]
    return data


def _chunks(file: BufferedIOBase) -> Iterator[bytearray]:
    """Yield the chunks of a body in AWS's encoding, and pass over the checksums behind them."""
    while size := int(file.readline().partition(b";")[0], 16):
        yield _read(file, size)
        file.readline()
    while file.readline().strip():
        pass


@contextmanager
def bucket_server(latency_ms: float) -> Iterator[str]:
    """Run a server as a process, for a context; yield its URL."""
    command = [sys.executable, "-m", "benchmarks.bucket_server", "--latency-ms", str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def take_counts(url: str) -> Counts:
    """Return what a server has counted since the last call."""
    with urllib.request.urlopen(url + COUNTS) as answer:
        return Counts(**json.load(answer))


def clear(url: str) -> None:
    """Remove all objects of a server."""
    with urllib.request.urlopen(url + CLEAR) as answer:
        answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=20)
    arguments = parser.parse_args()
    with BucketServer(arguments.latency_ms / 1000) as server:
        print(server.url, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
