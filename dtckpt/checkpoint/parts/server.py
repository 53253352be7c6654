"""`PartServer`: gives other hosts the parts that this host holds, and takes copies of theirs.

The protocol is HTTP/1.1. Every request has the header ``Authorization: Bearer <token>``, with a token that the clients
of one attempt agree on. A process of another job, or of an earlier attempt, can neither read nor write. The exception
is a ticket in the token's place, where the server takes tickets: it lets its bearer read the parts of one save.

    GET  /v1/indexes/<save>               the indexes of the save's parts on this host, each after its length
    POST /v1/read/<save>/<client>         body: JSON list of [number of the piece, offset, shape, base], in elements of
                                          it; answer: these boxes' elements, one after the other, then a digest of those
                                          that have none in the index. With a base, the digest of the box in another
                                          save, each box begins with a length: of the changes from there that follow,
                                          or 0: the elements follow
    POST /v1/boxes/<save>/<client>        body: an `announcement` of boxes that later parts are to have digests of
    PUT  /v1/parts/<save>/<client>        body: length of the index, the index, the elements; 204 when it is verified
    GET  /v1/texts/<digest>               a text that this client keeps for the others
    POST /v1/pull/<save>/<client>         body and answer: see `dtckpt.checkpoint.live.pulls`

Errors are status codes with a text: 400 malformed, 403 wrong token, 404 not here, 409 damaged, 507 no space. A
connection beyond `MAX_CONNECTIONS` is closed without an answer.
"""

from __future__ import annotations

import hmac
import json
import math
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import xxhash

from dtckpt.checkpoint.parts.announced_boxes import MAX_ANNOUNCEMENT_NBYTES, AnnouncedBoxes
from dtckpt.checkpoint.parts.changes import WORDS, changes_between
from dtckpt.checkpoint.parts.host_folder import HostFolder, PartFile
from dtckpt.checkpoint.parts.open_part import OpenPart, validate_part
from dtckpt.checkpoint.parts.records import MAX_INDEX_NBYTES, PartIndex, SaveId
from dtckpt.errors import CheckpointCorruptError, DtckptError, StorageFullError, TicketError
from dtckpt.format.digest import as_bytes
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

LENGTH_NBYTES = DIGEST_NBYTES = 8
RECV_NBYTES = 4 << 20
POLL_S = 0.05
"""How often the server looks whether it is to end, which `PartServer.close` waits for."""
MAX_BOXES = 4096
"""Boxes that one request may ask for."""
MAX_REQUEST_NBYTES = 1024 * MAX_BOXES
MAX_ANSWER_NBYTES = 64 << 20
"""Bytes of the boxes that one request may ask for, if it asks for several."""
MAX_CONNECTIONS = 1024
"""Connections at a time; each has a thread."""
MAX_REFUSED = 1024
"""Refused copies that are remembered."""
MAX_OPEN_PARTS = 4
"""Parts that are kept open: those of a few versions, from one to the next of which readers ask for changes."""
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
    ) -> None:
        self.texts: Mapping[int, bytes] = {}
        """Texts that other clients may ask for, by their digests."""
        self._server = _Server((address, 0), folder, timeout_s, check_ticket, boxes)
        self._server.answer_pull, self._server.is_relay = answer_pull, is_relay
        self.url = f"{_bracketed(address)}:{self._server.server_address[1]}"
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
        """Answer requests that show a token; those that came before wait for this."""
        self._server.token = token
        self._server.is_open.set()

    def forget_part(self, save: SaveId, client: int) -> None:
        """Open a part anew when it is asked for next: the file of a part that was removed is filled with another."""
        self._server.forget_part(save, client)

    def close(self) -> None:
        """Take no more requests."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    block_on_close = False
    answer_pull: AnswerPull | None = None
    is_relay = False

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
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _PartHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, or close it if there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

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
                self._parts.popitem(last=False)
        return kept

    def _forget_removed(self) -> None:
        """Close the parts that were removed: their files are filled with others."""
        with self._lock:
            for save, client in list(self._parts):
                if not self.folder.has(save, client):
                    del self._parts[save, client]

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
            self._parts.pop((save, client), None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that dies amid a request is ordinary, and the request's own side reports the rest."""


@dataclass(frozen=True, slots=True)
class _FileRange:
    """Bytes of a file that the kernel sends, without a copy."""

    path: Path
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


class _RefusedError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _PartHandler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.timeout_s)

    def log_message(self, *args: object) -> None:
        pass

    def _handle(self) -> None:
        self._has_begun_answer = False
        try:
            # The first of the clients to learn the token may ask before the others have learned it.
            if not self.server.is_open.wait(self.server.timeout_s):
                raise _RefusedError(503, "the clients of this job have not met yet")
            match [self.command, *self.path.split("/")[1:]]:
                case ["GET", "v1", "indexes", save]:
                    self._admit(SaveId.parse(save))
                    self._answer(list(self._indexes(SaveId.parse(save))))
                case ["POST", "v1", "read", save, client]:
                    self._admit(SaveId.parse(save))
                    self._read(SaveId.parse(save), int(client))
                case ["POST", "v1", "boxes", save, client]:
                    self._admit(SaveId.parse(save))
                    self._take_boxes(int(client))
                case ["POST", "v1", "pull", save, client] if self.server.answer_pull is not None:
                    self._admit(SaveId.parse(save))
                    body = self.rfile.read(self._length(MAX_REQUEST_NBYTES))
                    self._answer(self.server.answer_pull(SaveId.parse(save), int(client), body))
                case ["PUT", "v1", "parts", save, client]:
                    self._admit()
                    self._take(SaveId.parse(save), int(client))
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
            return
        if read is None or self.server.check_ticket is None:
            raise _RefusedError(403, "the token belongs to another attempt of the job")
        try:
            self.server.check_ticket(shown, read)
        except TicketError as error:
            raise _RefusedError(403, str(error)) from None

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

    def _answer(
        self, parts: Sequence[bytes | memoryview] | Sequence[bytes | memoryview | _FileRange], status: int = 200
    ) -> None:
        for part in parts:
            if isinstance(part, _FileRange) and part.path.stat().st_size < part.offset + part.nbytes:
                raise CheckpointCorruptError(f"{part.path} was cut short")
        self.send_response(status)
        self.send_header("Content-Length", str(sum(len(part) for part in parts)))
        self.end_headers()
        self.wfile.flush()
        self._has_begun_answer = True
        for part in parts:
            if isinstance(part, _FileRange):
                with part.path.open("rb") as file:
                    if self.connection.sendfile(file, part.offset, part.nbytes) < part.nbytes:
                        raise CheckpointCorruptError(f"{part.path} was cut short")
            else:
                self.connection.sendall(part)

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

    def _read(self, save: SaveId, client: int) -> None:
        wanted = json.loads(self.rfile.read(self._length(MAX_REQUEST_NBYTES)))
        part = self.server.open_part(save, client)
        _validate_boxes(wanted, part.index)
        digest = xxhash.xxh3_64()
        parts: list[bytes | memoryview | _FileRange] = []
        bases = self.server.bases(save, client) if any(base is not None for *_, base in wanted) else ()
        for number, offset, shape, base in wanted:
            box = Region(tuple(offset), tuple(shape))
            if (part.tensor(number).name, part.region(number, box)) not in part.digests:
                # The receiver has no digest to verify the box with. So it is verified here.
                elements = part.elements(number)
                data = as_bytes(elements[box.slices()] if box.ndim else elements).data
                digest.update(data)
                parts.append(data)
                continue
            if base is not None:
                changes = _changes(part, number, box, bases, base)
                parts.append(len(changes).to_bytes(LENGTH_NBYTES, "big"))
                if changes:
                    parts.append(changes)
                    continue
            parts.append(_elements(part, number, box))
        self._answer([*parts, digest.intdigest().to_bytes(DIGEST_NBYTES, "big")])

    def _take_boxes(self, client: int) -> None:
        boxes = self.server.boxes
        if boxes is None or boxes.client != client:
            raise _RefusedError(404, f"the parts of client {client} are not made here")
        boxes.announce(self.rfile.read(self._length(MAX_ANNOUNCEMENT_NBYTES)))
        self._answer([], 204)

    def _take(self, save: SaveId, client: int) -> None:
        length = self._length()
        size = int.from_bytes(self.rfile.read(min(length, LENGTH_NBYTES)), "big")
        if size > min(length - LENGTH_NBYTES, MAX_INDEX_NBYTES):
            raise _RefusedError(400, "the index is longer than the request, or than any index")
        index_file = self.rfile.read(size)
        index = PartIndex.from_bytes(index_file)
        if (index.save, index.client) != (save, client) or length != LENGTH_NBYTES + len(index_file) + index.nbytes:
            raise _RefusedError(400, "the part is not the one that the request names")
        try:
            self._keep(index, index_file)
        except BaseException:
            self.server.refused.append((save, client))
            raise
        self._answer([], 204)

    def _keep(self, index: PartIndex, index_file: bytes) -> None:
        file = self.server.folder.take(index.nbytes)
        try:
            self._receive(file, index)
            validate_part(file.view, index)
            self.server.folder.put(file, index, index_file, is_voted=True)
            self.server.forget_part(index.save, index.client)
            with suppress(ValueError):
                self.server.refused.remove((index.save, index.client))
        except BaseException:
            self.server.folder.give_back(file)
            raise

    def _receive(self, file: PartFile, index: PartIndex) -> None:
        at = 0
        while at < index.nbytes:
            count = self.rfile.readinto(file.view[at : min(at + RECV_NBYTES, index.nbytes)])
            if not count:
                raise _RefusedError(400, "the part ended before its length")
            at += count


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


def _elements(part: OpenPart, number: int, box: Region) -> memoryview | _FileRange:
    """Return the elements of a box for an answer, unverified: the receiver has their digest."""
    elements = part.view(number, box)
    if elements.flags.c_contiguous and part.path is not None:
        return _FileRange(part.path, part.offset(elements), elements.nbytes)
    return as_bytes(elements).data


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
