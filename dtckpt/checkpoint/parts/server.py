"""`PartServer`: gives other hosts the parts that this host holds, and takes copies of theirs.

The protocol is HTTP/1.1. Every request has the header ``Authorization: Bearer <token>``, with a token that the clients
of one attempt agree on. A process of another job, or of an earlier attempt, can neither read nor write. The exception
is a ticket in the token's place, where the server takes tickets: it lets its bearer read the parts of one save.

    GET  /v1/indexes/<save>               the indexes of the save's parts on this host, each after its length
    GET  /v1/indexes/<save>/<client>      the index of a client's part
    GET  /v1/nixl/<save>/<client>         how NIXL reaches the memory of the part: see `NixlOffer`
    POST /v1/read/<save>/<client>         body: JSON list of [number of the piece, offset, shape, base], in elements of
                                          it; answer: these boxes' elements, one after the other, then a digest of those
                                          that have none in the index. With a base, the digest of the box in another
                                          save, each box begins with a length: of the changes from there that follow,
                                          or 0: the elements follow
    POST /v1/boxes/<save>/<client>        body: an `announcement` of boxes that later parts are to have digests of
    PUT  /v1/parts/<save>/<client>        body: length of the index, the index, the elements; 204 when it is verified
    PUT  /v1/parts/<save>/<client>/<base> the same, without the elements that the client's part of another save has,
                                          which this host holds: both sides compute `PartIndex.ranges_in`
    GET  /v1/texts/<digest>               a text that this client keeps for the others
    POST /v1/pull/<save>/<client>         body and answer: see `dtckpt.checkpoint.live.pulls`

Errors are status codes with a text: 400 malformed, 403 wrong token, 404 not here, 409 damaged, 431 too long a head,
507 no space. A connection beyond `MAX_CONNECTIONS` waits. A connection that takes too long for its next step ends
without an answer (`dtckpt.checkpoint.parts.connections`). With a certificate (`dtckpt.checkpoint.parts.data_tls`), the
server speaks TLS, and its address begins with ``https://``.
"""

from __future__ import annotations

import hmac
import io
import json
import math
import socket
import ssl
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from typing_extensions import override

from dtckpt.checkpoint.parts.announced_boxes import MAX_ANNOUNCEMENT_NBYTES, AnnouncedBoxes
from dtckpt.checkpoint.parts.changes import WORDS, changes_between
from dtckpt.checkpoint.parts.connections import ServerConnection, ServerConnections
from dtckpt.checkpoint.parts.data_tls import SCHEME, DataTls, ServerCertificate
from dtckpt.checkpoint.parts.host_folder import HostFolder, PartFile
from dtckpt.checkpoint.parts.nixl_offer import NixlOffer, is_wanted
from dtckpt.checkpoint.parts.open_part import OpenPart, spans, validate_part
from dtckpt.checkpoint.parts.records import MAX_INDEX_NBYTES, HeldRange, PartIndex, SaveId, gaps
from dtckpt.checkpoint.reading.read_chunks import cut
from dtckpt.errors import CheckpointCorruptError, ConfigError, DtckptError, StorageFullError, TicketError
from dtckpt.format.digest import as_bytes
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

LENGTH_NBYTES = DIGEST_NBYTES = 8
RECV_NBYTES = 4 << 20
SEND_NBYTES = 1 << 20
POLL_S = 0.05
"""How often the server looks whether it is to end, which `PartServer.close` waits for."""
MAX_BOXES = 4096
"""Boxes that one request may ask for."""
MAX_REQUEST_NBYTES = 1024 * MAX_BOXES
MAX_ANSWER_NBYTES = 64 << 20
"""Bytes of the boxes that one request may ask for, if it asks for several."""
MAX_CONNECTIONS = 256
"""Connections at a time; each has a thread."""
MAX_WAITING = 4096
"""Connections that wait for a place, as far as the kernel lets them."""
MAX_HEAD_NBYTES = 16 << 10
"""Bytes of a request before its body."""
HEAD_S = 10.0
"""How long a connection has for the next request's head, and for the handshake of TLS."""
MIN_RATE = 64 << 10
"""Bytes per second, beside the time that a step has anyway, below which a connection ends."""
MAX_REFUSED = 1024
"""Refused copies that are remembered."""
MAX_OPEN_PARTS = 4
"""Parts that are kept open: the parts of a few versions, since readers ask what changed between two versions."""
UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104  to refuse them
AnswerPull = Callable[[SaveId, int, bytes], Sequence[bytes | memoryview]]


class PartServer:
    """A server of this process, in separate threads.

    Args:
        folder: The parts of this host.
        address: The address that the other hosts reach it at.
        timeout_s: Longest wait for the rest of a request.
        check_ticket: Called with a ticket, and the save whose parts its bearer asks for; raises `TicketError` unless
            the ticket lets it read them. None: the server takes no tickets.
        boxes: Takes the boxes that readers announce. None: they cannot.
        answer_pull: Called with a save, a client, and the body of a request to pull its part; returns the answer.
        is_relay: Whether the parts are another job's, so that pieces are verified in each request.
        tls: Its certificate; default: as the environment names one.

    Raises:
        ConfigError: The certificate cannot be used, or the address stands for all addresses of a host.
        OSError: The address cannot be used.
    """

    def __init__(
        self,
        folder: HostFolder,
        address: str,
        timeout_s: float,
        check_ticket: Callable[[str, SaveId], object] | None = None,
        *,
        boxes: AnnouncedBoxes | None = None,
        answer_pull: AnswerPull | None = None,
        is_relay: bool = False,
        tls: DataTls | None = None,
    ) -> None:
        self.texts: Mapping[int, bytes] = {}
        """Texts that other clients may ask for, by their digests."""
        if address in UNSPECIFIED:
            raise ConfigError(f"{address!r} is no address that other hosts could reach; pass one of this host's own")
        tls = DataTls.from_environ() if tls is None else tls
        certificate = ServerCertificate(tls.cert, tls.key) if tls.cert is not None and tls.key is not None else None
        nixl = NixlOffer() if is_wanted() and not is_relay else None
        self._server = _Server((address, 0), folder, timeout_s, check_ticket, boxes)
        self._server.answer_pull, self._server.is_relay = answer_pull, is_relay
        self._server.certificate, self._server.nixl = certificate, nixl
        url = f"{_bracketed(address)}:{self._server.server_address[1]}"
        self.url = url if certificate is None else f"{SCHEME}{url}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), daemon=True, name="dtckpt-tier-server"
        )
        self._thread.start()

    @property
    def refused(self) -> Collection[tuple[SaveId, int]]:
        """The parts, by save and client, of which a copy came last that was not taken."""
        return tuple(self._server.refused)

    def keep_texts(self, texts: Mapping[int, bytes]) -> None:
        """Keep texts for the other clients, by their digests, and forget the former ones."""
        self.texts = self._server.texts = texts

    def open(self, token: str) -> None:
        """Answer requests that show a token; earlier requests wait for this."""
        self._server.token = token
        self._server.is_open.set()

    def forget_part(self, save: SaveId, client: int) -> None:
        """Open a part anew when it is asked for next: the file of a part that was removed is filled with another."""
        self._server.forget_part(save, client)

    def close(self) -> None:
        """Take no more requests."""
        self._server.is_closing = True
        self._server.shutdown()
        self._server.server_close()
        if self._server.nixl is not None:
            self._server.nixl.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_WAITING
    block_on_close = False
    answer_pull: AnswerPull | None = None
    is_relay = False
    is_closing = False
    certificate: ServerCertificate | None = None
    nixl: NixlOffer | None = None

    def __init__(
        self,
        address: tuple[str, int],
        folder: HostFolder,
        timeout_s: float,
        check_ticket: Callable[[str, SaveId], object] | None,
        boxes: AnnouncedBoxes | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.folder, self.timeout_s = folder, timeout_s
        self.texts: Mapping[int, bytes] = {}
        self.check_ticket, self.boxes = check_ticket, boxes
        self.token = ""
        self.refused: deque[tuple[SaveId, int]] = deque(maxlen=MAX_REFUSED)
        self.is_open = threading.Event()
        self._parts: OrderedDict[tuple[SaveId, int], OpenPart] = OrderedDict()
        self._lock = threading.Lock()
        self.connections = ServerConnections(MAX_CONNECTIONS)
        super().__init__(address, _PartHandler)

    @override
    def service_actions(self) -> None:
        self.connections.tick()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, as soon as there is a place."""
        while (connection := self.connections.begin(request, HEAD_S, POLL_S)) is None:
            self.connections.tick()
            if self.is_closing:
                self.shutdown_request(request)
                return
        try:
            super().process_request(connection, client_address)  # type: ignore[arg-type]  # given to the method below
        except BaseException:  # there is no thread to be had
            self.connections.end(connection)
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread."""
        connection: ServerConnection = request
        try:
            if self.certificate is not None:
                connection.socket.settimeout(HEAD_S)
                connection.secure(self.certificate.context())
            self.RequestHandlerClass(connection, client_address, self)  # type: ignore[arg-type]  # see its `setup`
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.connections.end(connection)
            self.shutdown_request(connection.socket)

    def open_part(self, save: SaveId, client: int) -> OpenPart:
        """Return a part, open for reading; requests for one part follow each other."""
        if self.is_relay:
            return OpenPart(self.folder, save, client)
        self._forget_removed()
        with self._lock:
            kept = self._parts.get((save, client))
        if kept is None:
            kept = OpenPart(self.folder, save, client)
        with self._lock:
            self._parts[save, client] = kept
            self._parts.move_to_end((save, client))
            while len(self._parts) > MAX_OPEN_PARTS:
                self._close_part(*next(iter(self._parts)))
        return kept

    def _forget_removed(self) -> None:
        """Close the parts that were removed: their files are filled with others."""
        with self._lock:
            for save, client in list(self._parts):
                if not self.folder.has(save, client):
                    self._close_part(save, client)

    def _close_part(self, save: SaveId, client: int) -> None:
        self._parts.pop((save, client), None)
        if self.nixl is not None:
            self.nixl.withdraw(save, client)

    def bases(self, save: SaveId, client: int) -> Sequence[OpenPart]:
        """Return a client's parts of the newest other saves, from which there may be changes to a save."""
        others = (other for other, clients in self.folder.parts().voted.items() if client in clients and other != save)
        found = []
        for other in sorted(others, reverse=True)[: MAX_OPEN_PARTS - 1]:
            with suppress(DtckptError, OSError):
                found.append(self.open_part(other, client))
        return found

    def forget_part(self, save: SaveId, client: int) -> None:
        """Open a part anew when it is asked for next: another file may have taken its place."""
        with self._lock:
            self._close_part(save, client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that dies amid a request is ordinary, and the request's own side reports the rest."""


class _HeadReader(io.BufferedReader):
    """Reads requests. The lines of a head have `MAX_HEAD_NBYTES` together."""

    left = MAX_HEAD_NBYTES

    @override
    def readline(self, size: int | None = -1, /) -> bytes:
        limit = self.left + 1
        line = super().readline(limit if size is None or size < 0 else min(size, limit))
        self.left -= len(line)
        if self.left < 0:
            raise HTTPException(f"the head of a request has more than {MAX_HEAD_NBYTES} bytes")
        return line


@dataclass(frozen=True, slots=True)
class _FileRange:
    """Bytes of a file that the kernel sends, without a copy."""

    path: Path
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def validate(self) -> None:
        if self.path.stat().st_size < self.offset + self.nbytes:
            raise CheckpointCorruptError(f"{self.path} was cut short")

    def send(self, to: socket.socket) -> None:
        with self.path.open("rb") as file:
            if not isinstance(to, ssl.SSLSocket):
                num_sent = to.sendfile(file, self.offset, self.nbytes)
            else:  # the kernel cannot encrypt, and `sendfile` would read 8 KiB at a time
                file.seek(self.offset)
                num_sent = 0
                while data := file.read(min(SEND_NBYTES, self.nbytes - num_sent)):
                    to.sendall(data)
                    num_sent += len(data)
        if num_sent < self.nbytes:
            raise CheckpointCorruptError(f"{self.path} was cut short")


class _Elements:
    """Elements that do not lie densely: they are copied bit by bit as they are sent, whatever their size.

    Args:
        elements: The elements.
        digest: Takes them, too, if the receiver has no digest of them.
    """

    def __init__(self, elements: np.ndarray[Any, Any], digest: xxhash.xxh3_64 | None = None) -> None:
        self._elements, self._digest = elements, digest

    def __len__(self) -> int:
        return self._elements.nbytes

    def send(self, to: socket.socket) -> None:
        for span in spans(self._elements.shape, self._elements.itemsize):
            data = as_bytes(cut(self._elements, span)).data
            if self._digest is not None:
                self._digest.update(data)
            to.sendall(data)


class _Digest:
    """The digest of the elements that were sent before."""

    def __init__(self, digest: xxhash.xxh3_64) -> None:
        self._digest = digest

    def __len__(self) -> int:
        return DIGEST_NBYTES

    def send(self, to: socket.socket) -> None:
        to.sendall(self._digest.intdigest().to_bytes(DIGEST_NBYTES, "big"))


_Sent = bytes | memoryview | _FileRange | _Elements | _Digest


class _RefusedError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Held(NamedTuple):
    """The elements of a new part that this host holds.

    Args:
        memory: The bytes of a part of another save.
        ranges: The ranges of the new part that are in it.
    """

    memory: memoryview
    ranges: list[HeldRange]


class _PartHandler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server_version, sys_version = "dtckpt", ""

    @override
    def setup(self) -> None:
        self._place: ServerConnection = self.request  # as the server gives it
        self.request = self._place.socket
        super().setup()
        self.connection.settimeout(self.server.timeout_s)
        self.rfile = self._head = _HeadReader(self.connection.makefile("rb", buffering=0))

    @override
    def handle_one_request(self) -> None:
        self._head.left = MAX_HEAD_NBYTES
        self._expect(HEAD_S)
        super().handle_one_request()

    def _expect(self, seconds: float | None) -> None:
        self.server.connections.expect(self._place, seconds)

    def log_message(self, *args: object) -> None:
        pass

    def _handle(self) -> None:
        self._has_begun_answer = False
        self._expect(None)
        try:
            # The first of the clients to learn the token may ask before the others have learned it.
            if not self.server.is_open.wait(self.server.timeout_s):
                raise _RefusedError(503, "the clients of this job have not met yet")
            match [self.command, *self.path.split("/")[1:]]:
                case ["GET", "v1", "indexes", save]:
                    self._admit(SaveId.parse(save))
                    self._answer(list(self._indexes(SaveId.parse(save))))
                case ["GET", "v1", "indexes", save, client]:
                    self._admit(SaveId.parse(save))
                    self._answer([self.server.folder.index_file(SaveId.parse(save), int(client))])
                case ["GET", "v1", "nixl", save, client] if (nixl := self.server.nixl) is not None:
                    self._admit(SaveId.parse(save))
                    self._offer(nixl, SaveId.parse(save), int(client))
                case ["POST", "v1", "read", save, client]:
                    self._admit(SaveId.parse(save))
                    self._read(SaveId.parse(save), int(client))
                case ["POST", "v1", "boxes", save, client]:
                    self._admit(SaveId.parse(save))
                    self._take_boxes(int(client))
                case ["POST", "v1", "pull", save, client] if self.server.answer_pull is not None:
                    self._admit(SaveId.parse(save))
                    body = self._body(MAX_REQUEST_NBYTES)
                    self._answer(self.server.answer_pull(SaveId.parse(save), int(client), body))
                case ["PUT", "v1", "parts", save, client, *base] if len(base) < 2:
                    self._admit()
                    self._take(SaveId.parse(save), int(client), *map(SaveId.parse, base))
                case ["GET", "v1", "texts", digest]:
                    self._admit()
                    self._answer([self.server.texts[int(digest)]])
                case _:
                    raise _RefusedError(404, "there is no such path")
        except _RefusedError as refusal:
            self._refuse(refusal.status, str(refusal))
        except Exception as error:
            self._refuse(*_refusal_of(error))

    def _admit(self, read: SaveId | None = None) -> None:
        """Refuse a request without the token; and without a ticket, if it asks for nothing but parts of a save."""
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(shown.encode(), self.server.token.encode()):
            self._place.is_admitted = True
            return
        if read is None or self.server.check_ticket is None:
            raise _RefusedError(403, "the token belongs to another attempt of the job")
        try:
            self.server.check_ticket(shown, read)
        except TicketError as error:
            raise _RefusedError(403, str(error)) from None
        self._place.is_admitted = True

    do_GET = do_POST = do_PUT = _handle  # noqa: N815  names of the base class

    def _refuse(self, status: int, reason: str) -> None:
        # The rest of the request is still on its way, or half of an answer: this connection cannot take another one.
        self.close_connection = True
        if self._has_begun_answer:
            return
        with suppress(OSError):
            data = reason.encode("utf-8", "backslashreplace")[:4000]
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

    def _answer(self, parts: Sequence[_Sent], status: int = 200) -> None:
        for part in parts:
            if isinstance(part, _FileRange):
                part.validate()
        nbytes = sum(len(part) for part in parts)
        self._expect(self.server.timeout_s + nbytes / MIN_RATE)
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()
        self.wfile.flush()
        self._has_begun_answer = True
        for part in parts:
            if isinstance(part, bytes | memoryview):
                # In steps, as the time of a socket is for all that one call sends.
                for start in range(0, len(part), SEND_NBYTES):
                    self.connection.sendall(part[start : start + SEND_NBYTES])
            else:
                part.send(self.connection)

    def _indexes(self, save: SaveId) -> Iterator[bytes]:
        parts = self.server.folder.parts()
        clients = parts.voted.get(save, frozenset()) | parts.written.get(save, frozenset())
        for client in sorted(clients):
            file = self.server.folder.index_file(save, client)
            yield len(file).to_bytes(LENGTH_NBYTES, "big") + file

    def _length(self, limit: int | None = None) -> int:
        length = int(self.headers.get("Content-Length") or -1)
        if length < 0 or (limit is not None and length > limit):
            raise _RefusedError(400, f"the request has no length, or one over {limit} bytes")
        return length

    def _body(self, limit: int) -> bytes:
        """Return the body of a request. Raises: _RefusedError: The body is too long, or ends too early."""
        length = self._length(limit)
        self._expect(self.server.timeout_s + length / MIN_RATE)
        data = self.rfile.read(length)
        self._expect(None)
        if len(data) < length:
            raise _RefusedError(400, "the request ended before its length")
        return data

    def _read(self, save: SaveId, client: int) -> None:
        wanted = json.loads(self._body(MAX_REQUEST_NBYTES))
        part = self.server.open_part(save, client)
        _validate_boxes(wanted, part.index)
        digest = xxhash.xxh3_64()
        parts: list[_Sent] = []
        bases = self.server.bases(save, client) if any(base is not None for *_, base in wanted) else ()
        for number, offset, shape, base in wanted:
            box = Region(tuple(offset), tuple(shape))
            if (part.tensor(number).name, part.region(number, box)) not in part.digests:
                # The receiver has no digest to verify the box with. So it is verified here.
                parts.append(_Elements(cut(part.elements(number), box.slices()), digest))
                continue
            if base is not None:
                changes = _changes(part, number, box, bases, base)
                parts.append(len(changes).to_bytes(LENGTH_NBYTES, "big"))
                if changes:
                    parts.append(changes)
                    continue
            parts.append(_elements(part, number, box))
        self._answer([*parts, _Digest(digest)])

    def _offer(self, nixl: NixlOffer, save: SaveId, client: int) -> None:
        part = self.server.open_part(save, client)
        if part.path is None:
            raise _RefusedError(404, "the part is in lent memory, which NIXL does not read")
        self._answer([nixl.describe(save, client, part)])

    def _take_boxes(self, client: int) -> None:
        boxes = self.server.boxes
        if boxes is None or boxes.client != client:
            raise _RefusedError(404, f"the parts of client {client} are not made here")
        boxes.announce(self._body(MAX_ANNOUNCEMENT_NBYTES))
        self._answer([], 204)

    def _take(self, save: SaveId, client: int, base: SaveId | None = None) -> None:
        length = self._length()
        size = int.from_bytes(self.rfile.read(min(length, LENGTH_NBYTES)), "big")
        if size > min(length - LENGTH_NBYTES, MAX_INDEX_NBYTES):
            raise _RefusedError(400, "the index is longer than the request, or than any index")
        index_file = self.rfile.read(size)
        index = PartIndex.from_bytes(index_file)
        with self._held_by(base, index) as held:
            nbytes = sum(stop - start for start, stop in gaps(held.ranges, index.nbytes))
            if (index.save, index.client) != (save, client) or length != LENGTH_NBYTES + len(index_file) + nbytes:
                raise _RefusedError(400, "the request names another part")
            try:
                self._keep(index, index_file, held)
            except BaseException:
                self.server.refused.append((save, client))
                raise
        self._answer([], 204)

    @contextmanager
    def _held_by(self, base: SaveId | None, index: PartIndex) -> Iterator[_Held]:
        """Keep a part of another save from being removed; yield the elements of a new part that it has."""
        if base is None:
            yield _Held(memoryview(b""), [])
            return
        unpin = self.server.folder.pin(base)
        try:
            part = self.server.open_part(base, index.client)
            if part.path is None:
                raise _RefusedError(404, "the part is in lent memory")
            yield _Held(part.memory.data, index.ranges_in(part.index))
        finally:
            unpin()

    def _keep(self, index: PartIndex, index_file: bytes, held: _Held) -> None:
        file = self.server.folder.take(index.nbytes)
        try:
            self._receive(file, index, held)
            validate_part(file.view, index)
            self.server.folder.put(file, index, index_file, is_voted=True)
            self.server.forget_part(index.save, index.client)
            with suppress(ValueError):
                self.server.refused.remove((index.save, index.client))
        except BaseException:
            self.server.folder.give_back(file)
            raise

    def _receive(self, file: PartFile, index: PartIndex, held: _Held) -> None:
        for start, stop in gaps(held.ranges, index.nbytes):
            at = start
            while at < stop:
                count = self.rfile.readinto(file.view[at : min(at + RECV_NBYTES, stop)])
                if not count:
                    raise _RefusedError(400, "the part ended before its length")
                at += count
        for each in held.ranges:
            file.view[each.start : each.stop] = held.memory[each.at : each.at + each.stop - each.start]


def _validate_boxes(wanted: Any, index: PartIndex) -> None:
    """Check the boxes that a request asks for. Raises: _RefusedError, ValueError, TypeError: They are malformed."""
    if len(wanted) > MAX_BOXES:
        raise _RefusedError(400, f"the request has {len(wanted)} boxes; expected at most {MAX_BOXES}")
    nbytes = 0
    for number, offset, shape, *_ in wanted:
        if not 0 <= number < len(index.pieces):
            raise _RefusedError(400, f"the part has {len(index.pieces)} pieces; got {number}")
        piece = index.pieces[number]
        sizes = zip(offset, shape, piece.region.shape, strict=True)
        if not all(type(at) is type(size) is int and 0 <= at < at + size <= limit for at, size, limit in sizes):
            raise _RefusedError(400, f"piece {number} has shape {piece.region.shape}, and not all of the box in it")
        nbytes += math.prod(shape) * DTYPES[index.tensors[piece.tensor].dtype].itemsize
    if nbytes > MAX_ANSWER_NBYTES and len(wanted) > 1:
        raise _RefusedError(400, f"the boxes have {nbytes} bytes; expected at most {MAX_ANSWER_NBYTES}, or one box")


def _changes(part: OpenPart, number: int, box: Region, bases: Sequence[OpenPart], digest: int) -> bytes:
    """Return the changes of a box from its elements in another save; empty if all of it is to be sent.

    Args:
        part: The part.
        number: The number of a piece of it.
        box: The box, relative to the piece.
        bases: Parts of other saves.
        digest: The digest of the box in one of them.
    """
    new, tensor, region = part.view(number, box), part.tensor(number), part.region(number, box)
    base = next((each for each in bases if each.digests.get((tensor.name, region)) == digest), None)
    old = None if base is None or new.itemsize not in WORDS else base.find(tensor, region)
    return b"" if old is None else changes_between(old, new) or b""


def _elements(part: OpenPart, number: int, box: Region) -> _Elements | _FileRange:
    """Return the elements of a box for an answer, unverified: the receiver has their digest."""
    elements = part.view(number, box)
    if elements.flags.c_contiguous and part.path is not None:
        return _FileRange(part.path, part.offset(elements), elements.nbytes)
    return _Elements(elements)


def _refusal_of(error: Exception) -> tuple[int, str]:
    """Return the status and the text that an error is answered by."""
    match error:
        case FileNotFoundError() | KeyError():
            return 404, f"not on this host: {error}"
        case StorageFullError():
            return 507, str(error)
        case DtckptError():
            return 409, str(error)
        case ValueError() | TypeError() | IndexError() | RecursionError():
            return 400, f"the request is malformed: {error}"
        case _:
            return 500, f"{type(error).__name__}: {error}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
