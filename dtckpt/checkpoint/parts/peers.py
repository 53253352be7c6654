"""Requests to the servers of other hosts; see `dtckpt.checkpoint.parts.server` for the protocol."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import SplitResult, urlsplit

import xxhash
from typing_extensions import override

from dtckpt.checkpoint.parts.changes import apply_changes
from dtckpt.checkpoint.parts.data_tls import SCHEME, DataTls
from dtckpt.checkpoint.parts.records import HeldRange, SaveId, gaps
from dtckpt.checkpoint.parts.server import DIGEST_NBYTES, LENGTH_NBYTES
from dtckpt.checkpoint.parts.transports import BoxRequest
from dtckpt.errors import CheckpointCorruptError, DtckptError, StorageError, StorageFullError
from dtckpt.format.digest import bytes_digest

SEND_NBYTES = 4 << 20
RECV_NBYTES = 1 << 20
_Filled = tuple[BoxRequest, memoryview]
"""A box, and the memory for its stored elements."""


class Peer:
    """The server of one client on another host, as a `PartTransport`. Each request opens a new connection.

    Args:
        url: ``host:port``, or ``https://host:port``.
        host: Name of the host, for messages.
        token: The token that requests send.
        timeout_s: Longest wait for each answer, in seconds.
        tls: The authorities that this client trusts; default: as the environment names them.
    """

    kind = "http"

    def __init__(self, url: str, host: str, token: str, timeout_s: float, *, tls: DataTls | None = None) -> None:
        self.host = host
        self._url = urlsplit(url if url.startswith(SCHEME) else f"//{url}")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._tls = DataTls.from_environ() if tls is None else tls

    @contextmanager
    def _errors_named(self, what: str) -> Iterator[HTTPConnection]:
        connection = _PeerConnection(self._url, self.host, self._timeout_s, self._tls)
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
            raise CheckpointCorruptError(f"host {self.host}: a description differs from its client's announcement")
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

    def index_file(self, save: SaveId, client: int) -> bytes:
        """As `PartTransport.index_file`."""
        return self._get(f"/v1/indexes/{save.name}/{client}", "read indexes")

    def nixl_offer(self, save: SaveId, client: int) -> bytes:
        """Return how NIXL reaches the memory of a client's part. Raises: StorageError: The host refuses."""
        return self._get(f"/v1/nixl/{save.name}/{client}", "ask for NIXL")

    def close(self) -> None:
        """As `PartTransport.close`: no connection is kept."""

    def announce(self, save: SaveId, client: int, boxes: bytes) -> None:
        """Announce the boxes of a client's parts that this reader reads.

        Args:
            save: A save that this reader may read.
            client: The client.
            boxes: Their `announcement`.

        Raises:
            DtckptError: The client does not take them.
        """
        with self._errors_named("announce boxes") as connection:
            connection.request("POST", f"/v1/boxes/{save.name}/{client}", boxes, self._headers)
            self._answer_to(connection)

    def read(self, save: SaveId, client: int, boxes: Sequence[BoxRequest]) -> int:
        """As `PartTransport.read`."""
        with ExitStack() as delivery:
            filled = [(each, delivery.enter_context(each.memory())) for each in boxes]
            nbytes, misfits = self._read(save, client, filled)
            if misfits:
                # The memory, or the array from which the host made the changes, was not the base. Whole boxes need
                # no base.
                again = [(replace(each, base=None), buffer) for each, buffer in misfits]
                nbytes += self._read(save, client, again)[0]
        return nbytes

    def _read(self, save: SaveId, client: int, boxes: Sequence[_Filled]) -> tuple[int, list[_Filled]]:
        """Read boxes; return the bytes that the host sent, and the boxes that changes did not bring to their digests.

        Raises: as `read`.
        """
        asked = json.dumps([(each.number, each.box.offset, each.box.shape, each.base) for each, _ in boxes])
        nbytes, misfits = 0, []
        with self._errors_named("read a part") as connection:
            connection.request("POST", f"/v1/read/{save.name}/{client}", asked, self._headers)
            answer, of_parts = _Answer(self.host, self._answer_to(connection)), xxhash.xxh3_64()
            for each, buffer in boxes:
                digest = of_parts if each.seed is None else xxhash.xxh3_64(seed=each.seed)
                length = 0 if each.base is None else int.from_bytes(answer.take(LENGTH_NBYTES), "big")
                if length:
                    if length >= len(buffer):
                        raise CheckpointCorruptError(f"host {self.host}: changes of a box are longer than the box")
                    nbytes += length
                    with suppress(ValueError):  # malformed: the digest tells
                        apply_changes(answer.take(length), buffer, each.dtype.itemsize)
                    digest.update(buffer)
                    if digest.intdigest() != each.digest:
                        misfits.append((each, buffer))
                    continue
                nbytes += len(buffer)
                answer.fill(buffer, digest)
                if each.seed is not None and digest.intdigest() != each.digest:
                    raise CheckpointCorruptError(f"host {self.host}: a piece of the part of client {client} is damaged")
            if answer.take(DIGEST_NBYTES) != of_parts.intdigest().to_bytes(DIGEST_NBYTES, "big") or answer.goes_on():
                raise CheckpointCorruptError(f"host {self.host}: the answer was damaged on its way")
        return nbytes, misfits

    def put(
        self,
        save: SaveId,
        client: int,
        index: bytes,
        data: memoryview,
        max_rate: float | None,
        *,
        base: SaveId | None = None,
        held: Sequence[HeldRange] = (),
    ) -> int:
        """Give the host a copy of a part; return when it has verified the copy.

        Args:
            save: The save.
            client: The client whose part it is.
            index: The index file.
            data: The elements.
            max_rate: Bound on the bytes per second.
            base: A save of which the host holds the client's part.
            held: The ranges of the elements that are in that part, too (`PartIndex.ranges_in`); they are not sent.

        Returns:
            The bytes of elements that were sent.

        Raises:
            StorageError: The host does not take it, or holds no such part of the base.
        """
        head = len(index).to_bytes(LENGTH_NBYTES, "big") + index
        sent = [data[start:stop] for start, stop in gaps(held, len(data))]
        nbytes = sum(map(len, sent))
        with self._errors_named("send a copy") as connection:
            connection.putrequest(
                "PUT", "/".join(["/v1/parts", save.name, str(client), *([base.name] if base else [])])
            )
            for name, value in {**self._headers, "Content-Length": str(len(head) + nbytes)}.items():
                connection.putheader(name, value)
            connection.endheaders(head)
            try:
                _send(connection.sock, sent, max_rate, time.monotonic, time.sleep)
            except OSError:
                # The host may have answered before it took all; its answer tells more than a broken pipe.
                self._answer_to(connection)
                raise
            self._answer_to(connection)
        return nbytes


class _PeerConnection(HTTPConnection):
    """A connection to the server of a host: by TLS, if its address says so."""

    def __init__(self, url: SplitResult, host: str, timeout_s: float, tls: DataTls) -> None:
        super().__init__(str(url.hostname), url.port, timeout=timeout_s)
        self._host_name, self._tls, self._is_secure = host, tls, bool(url.scheme)

    @override
    def connect(self) -> None:
        if not self._is_secure:
            self._tls.validate_plaintext(self._host_name)
        super().connect()
        if self._is_secure:
            self.sock = self._tls.secure(self.sock, self.host, self._host_name)


class _Answer:
    """The body of an answer, which must have the bytes that are read of it."""

    def __init__(self, host: str, response: HTTPResponse) -> None:
        self._host = host
        self._response = response

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        data = self._response.read(nbytes)
        if len(data) < nbytes:
            raise self._ended()
        return data

    def fill(self, buffer: memoryview, digest: xxhash.xxh3_64) -> None:
        """Read the next bytes into a buffer, and digest them."""
        at = 0
        while at < len(buffer):
            count = self._response.readinto(buffer[at : at + RECV_NBYTES])
            if not count:
                raise self._ended()
            digest.update(buffer[at : at + count])
            at += count

    def _ended(self) -> DtckptError:
        # Either all announced bytes came, or the host died meanwhile.
        kind = StorageError if self._response.length else CheckpointCorruptError
        return kind(f"host {self._host}: the answer ended before its length")

    def goes_on(self) -> bool:
        """Whether there is more of it."""
        return bool(self._response.read(1))


def _send(
    connection: socket.socket,
    parts: Sequence[memoryview],
    max_rate: float | None,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> None:
    begin, sent = clock(), 0
    step = SEND_NBYTES if max_rate is None else max(1 << 16, min(SEND_NBYTES, int(max_rate / 10)))
    for data in parts:
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
            sent += min(step, len(data) - start)
            if max_rate is not None:
                sleep(max(0.0, begin + sent / max_rate - clock()))


def own_address(towards: str = "") -> str:
    """Return the address at which other hosts reach this host: the address from which it reaches ``MASTER_ADDR``.

    Args:
        towards: ``host:port`` of a server that other jobs reach, too; used where ``MASTER_ADDR`` is a loopback address,
            as for a job on one host.
    """
    found = _address_towards(os.environ.get("MASTER_ADDR") or "localhost", "9")
    if towards and ipaddress.ip_address(found).is_loopback:
        host, _, port = towards.rpartition(":")
        found = _address_towards(host.strip("[]"), port)
    return found


def _address_towards(host: str, port: str) -> str:
    try:
        family, kind, _, _, to = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
