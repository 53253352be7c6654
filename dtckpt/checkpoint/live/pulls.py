"""Pull parts whole, to serve them on: the messages between a relay and its sources.

A relay asks ``POST /v1/pull/<save>/<client>`` for pieces of a part; see `PartServer`. The body is JSON::

    {"puller": random name, "pieces": numbers of pieces | null: the index, "is_all": whether it lacks no others,
     "insists": whether it found no other source, "is_suspect": whether a piece came damaged}

The answer is a length, a head in JSON of this length, and the elements of the pieces that the head names: the asked
pieces that the source has. A head with ``is_full`` says that the source has no place, or not this part. The relay
compares each piece with the publisher's digest before it counts as here, so no relay passes on a wrong byte.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from dtckpt.checkpoint.live.fan_out import Places
from dtckpt.checkpoint.parts.host_folder import HostFolder, PartFile
from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.open_part import elements_of, piece_seed, verified_elements
from dtckpt.checkpoint.parts.peers import RECV_NBYTES, Peer
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.checkpoint.parts.server import LENGTH_NBYTES
from dtckpt.errors import CheckpointCorruptError, DtckptError, StorageError
from dtckpt.format.digest import as_bytes
from dtckpt.format.dtypes import DTYPES

ANSWER_NBYTES = 8 << 20
"""Bytes of elements in one answer; a larger piece has a separate answer."""
MAX_ASKED = 256
"""Pieces that one request names."""
MAX_PLACES = 256
"""Parts of versions whose relays a source remembers."""


class HeldPart:
    """A part with some of its pieces, in memory of this host. Thread-safe.

    Args:
        index: Its index.
        index_file: The index, as its client announced it.
        data: The elements.
        has: Numbers of the pieces that are here, verified; default: all.

    Attributes:
        nbytes: Bytes of the pieces that it received.
    """

    def __init__(
        self, index: PartIndex, index_file: bytes, data: memoryview | LentMemory, has: set[int] | None = None
    ) -> None:
        self.index, self.index_file, self._data = index, index_file, data
        self.nbytes = 0
        self._has = set(range(len(index.pieces))) if has is None else has

    @cached_property
    def _tied(self) -> dict[int, list[int]]:
        """By piece, the later pieces with the same elements of the part: of tied tensors. They come with that piece."""
        by_elements: dict[Hashable, list[int]] = {}
        for number, piece in enumerate(self.index.pieces):
            facts = piece.offset, piece.strides, piece.region.shape, self.index.tensors[piece.tensor].dtype
            by_elements.setdefault(facts, []).append(number)
        return {first: others for first, *others in by_elements.values() if others}

    @classmethod
    def to_fill(cls, index: PartIndex, index_file: bytes, file: PartFile) -> HeldPart:
        """Return a part without pieces."""
        return cls(index, index_file, file.view, set())

    def lacking(self) -> list[int]:
        """Return the numbers of the pieces to pull, without pieces of tied tensors that come with another piece."""
        tied = {number for others in self._tied.values() for number in others}
        return [number for number in range(len(self.index.pieces)) if number not in self._has and number not in tied]

    def some_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the asked pieces that are here, as many as one answer has room for."""
        found: list[int] = []
        nbytes = 0
        for number in numbers:
            if number in self._has:
                nbytes += self._nbytes(number)
                if found and nbytes > ANSWER_NBYTES:
                    break
                found.append(number)
        return found

    def _nbytes(self, number: int) -> int:
        piece = self.index.pieces[number]
        return piece.region.numel * DTYPES[self.index.tensors[piece.tensor].dtype].itemsize

    def _elements(self, number: int) -> np.ndarray[Any, Any]:
        piece = self.index.pieces[number]
        return elements_of(self._data, piece, DTYPES[self.index.tensors[piece.tensor].dtype])

    def elements(self, number: int) -> memoryview:
        """Return the elements of a piece, for an answer. The receiver verifies them."""
        return as_bytes(np.ascontiguousarray(self._elements(number))).data

    def verify(self) -> None:
        """Compare the pieces that are here with their digests. Raises: CheckpointCorruptError: One has changed."""
        for number in sorted(self._has):
            verified_elements(self._data, self.index, number)

    def receive(self, number: int, readinto: Callable[[memoryview], int]) -> None:
        """Read the elements of a piece; it is here when they have the publisher's digest.

        Raises:
            CheckpointCorruptError: Their digest is another one.
            StorageError: The answer ends too early.
        """
        if number in self._has:
            # Also a piece that came with another one: a damaged answer must not overwrite it.
            raise StorageError(f"piece {number} came, and is here already")
        piece, elements = self.index.pieces[number], self._elements(number)
        name = self.index.tensors[piece.tensor].name
        into = elements if piece.is_dense else np.empty_like(elements, order="C")
        buffer, digest, at = as_bytes(into).data, xxhash.xxh3_64(seed=piece_seed(name, piece.region)), 0
        while at < len(buffer):
            count = readinto(buffer[at : at + RECV_NBYTES])
            if not count:
                raise StorageError("the answer ended before its length")
            digest.update(buffer[at : at + count])
            at += count
        if digest.intdigest() != piece.digest:
            raise CheckpointCorruptError(
                f"the part of client {self.index.client} is damaged at {name!r} {piece.region}"
            )
        if not piece.is_dense:
            elements[...] = into
        others = self._tied.get(number, [])
        for other in others:
            verified_elements(self._data, self.index, other)
        self._has.update([number, *others])
        self.nbytes += at


class PullService:
    """Answers the relays that pull parts from this process. Thread-safe.

    Args:
        folder: The parts of this host.
        max_copies: As for `Places`.
        on_damage: Called when a part turns out to be damaged: with the save and the error.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        folder: HostFolder,
        *,
        max_copies: int | None,
        on_damage: Callable[[SaveId, CheckpointCorruptError], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._max_copies, self._on_damage, self._clock = folder, max_copies, on_damage, clock
        self._lock = threading.Lock()
        self._places: dict[tuple[SaveId, int], Places] = {}
        self._filling: dict[tuple[SaveId, int], HeldPart] = {}
        self._whole: dict[tuple[SaveId, int], HeldPart] = {}

    def begin(self, save: SaveId, client: int, part: HeldPart) -> None:
        """Serve the pieces of a part that is being filled."""
        with self._lock:
            self._filling[save, client] = part

    def end(self, save: SaveId, client: int) -> None:
        """Serve a part from its file again, if it is there."""
        with self._lock:
            self._filling.pop((save, client), None)

    def forget(self, save: SaveId) -> None:
        """Let go of the memory of a version whose files were removed."""
        with self._lock:
            self._whole = {key: part for key, part in self._whole.items() if key[0] != save}

    def _part(self, save: SaveId, client: int) -> HeldPart | None:
        key = save, client
        if (filling := self._filling.get(key)) is not None:
            return filling
        if not self._folder.has(save, client):
            self._whole.pop(key, None)
            return None
        if (part := self._whole.get(key)) is None:
            file = self._folder.index_file(save, client)
            part = HeldPart(PartIndex.from_bytes(file), file, self._folder.open_memory(save, client))
            self._whole[key] = part
        return part

    def _places_of(self, save: SaveId, client: int) -> Places:
        places = self._places.setdefault((save, client), Places(self._max_copies))
        while len(self._places) > MAX_PLACES:
            del self._places[next(iter(self._places))]
        return places

    def __call__(self, save: SaveId, client: int, body: bytes) -> list[bytes | memoryview]:
        """Answer a request.

        Raises:
            CheckpointCorruptError: A piece that came damaged is damaged here.
            ValueError, KeyError, TypeError: The request is malformed.
        """
        asked = json.loads(body)
        with self._lock:
            try:
                part = self._part(save, client)
            except FileNotFoundError:  # it was removed meanwhile
                part = None
        if part is None:
            return [_head(is_full=True)]
        if asked["is_suspect"]:
            try:
                part.verify()
            except CheckpointCorruptError as error:
                self._on_damage(save, error)
                raise
            return [_head()]
        if asked["pieces"] is None:
            return [_head(nbytes=len(part.index_file)), part.index_file]
        with self._lock:
            places = self._places_of(save, client)
            if not places.admit(asked["puller"], self._clock(), insists=asked["insists"]):
                return [_head(is_full=True)]
            numbers = part.some_of(asked["pieces"])
            if asked["is_all"] and len(numbers) == len(asked["pieces"]):
                places.done(asked["puller"])
        return [_head(pieces=numbers), *(part.elements(number) for number in numbers)]


def _head(**facts: object) -> bytes:
    data = json.dumps(facts).encode()
    return len(data).to_bytes(LENGTH_NBYTES, "big") + data


@dataclass(slots=True)
class PullAnswer:
    """The answer of a source.

    Args:
        is_full: Whether the source has no place, or not the part.
        index_file: The index, if it was asked for.
    """

    is_full: bool = False
    index_file: bytes = b""


@dataclass(slots=True)
class PullRequest:
    """The request of a relay."""

    puller: str
    pieces: list[int] | None
    is_all: bool = False
    insists: bool = False
    is_suspect: bool = False

    @classmethod
    def of_index(cls, puller: str) -> PullRequest:
        """Return the request for an index."""
        return cls(puller, None)

    @classmethod
    def of_lacking(cls, puller: str, lacking: Sequence[int], *, insists: bool) -> PullRequest:
        """Return the request for pieces that a part lacks."""
        return cls(puller, list(lacking[:MAX_ASKED]), len(lacking) <= MAX_ASKED, insists)

    def to_bytes(self) -> bytes:
        """Return the body of the request."""
        facts = {
            "puller": self.puller,
            "pieces": self.pieces,
            "is_all": self.is_all,
            "insists": self.insists,
            "is_suspect": self.is_suspect,
        }
        return json.dumps(facts).encode()


class PullPeer(Peer):
    """A source of a relay, with the arguments of `Peer`."""

    def pull(
        self,
        save: SaveId,
        client: int,
        request: PullRequest,
        part: HeldPart | None = None,
        admitted: Callable[[], object] = lambda: None,
    ) -> PullAnswer:
        """Make a request; the pieces that come are put into a part.

        Args:
            save: The save.
            client: The client whose part it is.
            request: The request.
            part: The part; None: the index is asked for.
            admitted: Called when the source has given a place, before pieces come.

        Raises:
            CheckpointCorruptError: A piece came damaged. Its source verifies it, and stops serving it if it is damaged
                there.
            StorageError: The source does not answer, or refuses.
        """
        try:
            with self._telling(save, client), self._errors_named("pull a part") as connection:
                connection.request("POST", _path(save, client), request.to_bytes(), self._headers)
                response = self._answer_to(connection)
                head = json.loads(response.read(int.from_bytes(response.read(LENGTH_NBYTES), "big")))
                if part is None:
                    return PullAnswer(head.get("is_full", False), index_file=response.read())
                if not head.get("is_full"):
                    admitted()
                for number in head.get("pieces", ()):
                    part.receive(number, response.readinto)
                return PullAnswer(head.get("is_full", False))
        except DtckptError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise StorageError(f"host {self.host}: its answer to a pull is malformed: {error}") from error

    @contextmanager
    def _telling(self, save: SaveId, client: int) -> Iterator[None]:
        """If a piece comes damaged, name the source, and let it verify its part."""
        try:
            yield
        except CheckpointCorruptError as error:
            body = PullRequest("", None, is_suspect=True).to_bytes()
            with suppress(DtckptError), self._errors_named("tell of a damaged piece") as connection:
                connection.request("POST", _path(save, client), body, self._headers)
                self._answer_to(connection)
            text = str(error)
            raise CheckpointCorruptError(text if self.host in text else f"host {self.host}: {text}") from error


def _path(save: SaveId, client: int) -> str:
    return f"/v1/pull/{save.name}/{client}"
