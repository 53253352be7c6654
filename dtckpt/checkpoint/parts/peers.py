"""Requests to the servers of other hosts; see `dtckpt.checkpoint.parts.server` for the protocol."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

import xxhash

from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.parts.server import DIGEST_NBYTES, LENGTH_NBYTES
from dtckpt.errors import CheckpointCorruptError, DtckptError, StorageError, StorageFullError
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.region import Region

SEND_NBYTES = 4 << 20
RECV_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class BoxRequest:
    """A box of a piece that is to be read.

    Args:
        number: Number of the piece in its part.
        box: The box, in elements of the piece.
        buffer: Memory of its size.
        seed: If the box is a whole piece: the seed of the piece's digest, and
        digest: the digest.
    """

    number: int
    box: Region
    buffer: memoryview
    seed: int | None = None
    digest: int = 0


class Peer:
    """The server of one client on another host. Thread-safe: each request opens a new connection.

    Args:
        url: ``host:port``.
        host: Name of the host, for messages.
        token: The token that requests send.
        timeout_s: Longest wait for each answer, in seconds.
    """

    def __init__(self, url: str, host: str, token: str, timeout_s: float) -> None:
        self.host = host
        self._url = urlsplit(f"//{url}")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s

    @contextmanager
    def _errors_named(self, what: str) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(str(self._url.hostname), self._url.port, timeout=self._timeout_s)
        try:
            yield connection
        except DtckptError:
            raise
        except (OSError, HTTPException) as error:
            raise StorageError(f"host {self.host}: {what}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _answer_to(self, connection: HTTPConnection) -> HTTPResponse:
        response = connection.getresponse()
        if response.status >= 300:
            reason = f"host {self.host}: {response.read(4000).decode(errors='replace')}"
            raise {409: CheckpointCorruptError, 507: StorageFullError}.get(response.status, StorageError)(reason)
        return response

    def _get(self, path: str, what: str) -> bytes:
        with self._errors_named(what) as connection:
            connection.request("GET", path, headers=self._headers)
            return self._answer_to(connection).read()

    def text(self, digest: int) -> bytes:
        """Return a text that the client keeps. Raises: CheckpointCorruptError: Its digest differs."""
        data = self._get(f"/v1/texts/{digest}", "read a description")
        if bytes_digest(data) != digest:
            raise CheckpointCorruptError(f"host {self.host}: a description is not the one that its client announced")
        return data

    def indexes(self, save: SaveId) -> list[bytes]:
        """Return the indexes of a save's parts on the host."""
        data = self._get(f"/v1/indexes/{save.name}", "read indexes")
        files = []
        while data:
            stop = LENGTH_NBYTES + int.from_bytes(data[:LENGTH_NBYTES], "big")
            files.append(data[LENGTH_NBYTES:stop])
            data = data[stop:]
        return files

    def read(self, save: SaveId, client: int, boxes: Sequence[BoxRequest]) -> None:
        """Read boxes of a client's part into their buffers, and verify them.

        Raises:
            CheckpointCorruptError: The host's copy is damaged, or the answer is.
            StorageError: The host does not answer, or refuses.
        """
        asked = json.dumps([(each.number, each.box.offset, each.box.shape) for each in boxes])
        with self._errors_named("read a part") as connection:
            connection.request("POST", f"/v1/read/{save.name}/{client}", asked, self._headers)
            response, of_parts = self._answer_to(connection), xxhash.xxh3_64()
            for each in boxes:
                digest = of_parts if each.seed is None else xxhash.xxh3_64(seed=each.seed)
                at = 0
                while at < len(each.buffer):
                    count = response.readinto(each.buffer[at : at + RECV_NBYTES])
                    if not count:
                        # What the host has said it would send came, or it died meanwhile.
                        kind = StorageError if response.length else CheckpointCorruptError
                        raise kind(f"host {self.host}: the answer ended before its length")
                    digest.update(each.buffer[at : at + count])
                    at += count
                if each.seed is not None and digest.intdigest() != each.digest:
                    raise CheckpointCorruptError(f"host {self.host}: a piece of the part of client {client} is damaged")
            if response.read() != of_parts.intdigest().to_bytes(DIGEST_NBYTES, "big"):
                raise CheckpointCorruptError(f"host {self.host}: the answer was damaged on its way")

    def put(self, save: SaveId, client: int, index: bytes, data: memoryview, max_rate: float | None) -> None:
        """Give the host a copy of a part; return when it has verified the copy.

        Args:
            save: The save.
            client: The client whose part it is.
            index: The index file.
            data: The elements.
            max_rate: Bound on the bytes per second.
        """
        head = len(index).to_bytes(LENGTH_NBYTES, "big") + index
        with self._errors_named("send a copy") as connection:
            connection.putrequest("PUT", f"/v1/parts/{save.name}/{client}")
            for name, value in {**self._headers, "Content-Length": str(len(head) + len(data))}.items():
                connection.putheader(name, value)
            connection.endheaders(head)
            try:
                _send(connection.sock, data, max_rate, time.monotonic, time.sleep)
            except OSError:
                # The host may have answered before it took all; its answer tells more than a broken pipe.
                self._answer_to(connection)
                raise
            self._answer_to(connection)


def _send(
    connection: socket.socket,
    data: memoryview,
    max_rate: float | None,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> None:
    begin = clock()
    step = SEND_NBYTES if max_rate is None else max(1 << 16, min(SEND_NBYTES, int(max_rate / 10)))
    for start in range(0, len(data), step):
        connection.sendall(data[start : start + step])
        if max_rate is not None:
            sleep(max(0.0, begin + (start + step) / max_rate - clock()))


def own_address() -> str:
    """Return the address at which other hosts reach this host: the address from which it reaches ``MASTER_ADDR``."""
    master = os.environ.get("MASTER_ADDR") or "localhost"
    try:
        family, kind, _, _, to = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
