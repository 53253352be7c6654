"""Reads by NIXL: a reader takes boxes directly from the memory of a source; the source's server only tells the address.

::

    reader                                        source
      | GET /v1/nixl/<save>/<client>, a ticket      |  registers the part with NIXL
      | <-------- agent, address of the part -------|
      | READ runs of bytes into registered memory   |  by the network card, or by a thread of NIXL
      | digest, and copy into the target            |

Both sides ask for it by ``DTCKPT_DATA_NIXL=1``. NIXL copies runs of bytes and verifies nothing, so a reader takes only
boxes that have a digest and few runs. The source's server sends all other boxes, and every box if NIXL is missing.

NIXL has no tickets, and over UCX no TLS: any program that reaches its port may read the memory of the process. So use
it only in networks that you trust. A client that asks for TLS does not use it.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import xxhash

from dtckpt.checkpoint.parts.nixl_offer import new_agent
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import PartIndex, PartPiece, SaveId
from dtckpt.checkpoint.parts.transports import BoxRequest
from dtckpt.errors import CheckpointCorruptError, StorageError

logger = logging.getLogger("dtckpt.tiers")

MAX_RUNS = 64
"""Runs of bytes of one box; a box of more runs is packed by the source's server."""
STAGING_NBYTES = 8 << 20
"""Registered memory of a reader, from which bytes are digested and copied."""
POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class _RemotePart:
    """A part in the memory of a source."""

    agent: str
    address: int
    nbytes: int
    index: PartIndex


class NixlReads:
    """A source whose memory is read by NIXL, as a `PartTransport`.

    Args:
        peer: The server of the source.
        timeout_s: Longest wait for each transfer.
    """

    kind = "nixl"

    def __init__(self, peer: Peer, timeout_s: float) -> None:
        self.host = peer.host
        self._peer, self._timeout_s = peer, timeout_s
        self._lock = threading.Lock()
        self._parts: dict[tuple[SaveId, int], _RemotePart | None] = {}

    def index_file(self, save: SaveId, client: int) -> bytes:
        """As `PartTransport.index_file`."""
        return self._peer.index_file(save, client)

    def read(self, save: SaveId, client: int, boxes: Sequence[BoxRequest]) -> int:
        """As `PartTransport.read`."""
        part = self._part(save, client)
        nbytes, others = 0, []
        for each in boxes:
            runs = None if part is None or each.seed is None else _runs(part.index.piece(each.number), each)
            if part is None or runs is None:
                others.append(each)
            else:
                self._read_box(part, client, each, runs)
                nbytes += each.nbytes
        return nbytes + (self._peer.read(save, client, others) if others else 0)

    def _part(self, save: SaveId, client: int) -> _RemotePart | None:
        """Return where a part is; None if the source does not offer it to NIXL."""
        with self._lock:
            if (save, client) not in self._parts:
                self._parts[save, client] = self._found(save, client)
            return self._parts[save, client]

    def _found(self, save: SaveId, client: int) -> _RemotePart | None:
        try:
            facts = json.loads(self._peer.nixl_offer(save, client))
            data, address, nbytes = facts
            index = PartIndex.from_bytes(self._peer.index_file(save, client))
            return _RemotePart(_reader().meet(base64.b64decode(data)), int(address), int(nbytes), index)
        except StorageError as error:
            logger.info("its server sends all, and NIXL nothing: %s", error)
            return None
        except (ValueError, TypeError) as error:
            raise StorageError(f"host {self.host}: its offer to NIXL is malformed: {error}") from error

    def _read_box(self, part: _RemotePart, client: int, box: BoxRequest, runs: Sequence[tuple[int, int]]) -> None:
        if any(not 0 <= start <= start + size <= part.nbytes for start, size in runs):
            raise CheckpointCorruptError(
                f"host {self.host}: the part of client {client} is shorter than its index says"
            )
        digest = xxhash.xxh3_64(seed=box.seed or 0)
        try:
            with box.memory() as buffer:
                at = 0
                for data in _reader().take(
                    part.agent, [(part.address + start, size) for start, size in runs], self._timeout_s
                ):
                    digest.update(data)
                    buffer[at : at + len(data)] = data
                    at += len(data)
                if digest.intdigest() != box.digest:
                    raise CheckpointCorruptError(f"host {self.host}: a piece of the part of client {client} is damaged")
        except (NixlError, OSError) as error:
            raise StorageError(f"host {self.host}: read a part by NIXL: {error}") from error

    def close(self) -> None:
        """As `PartTransport.close`. A source whose readers do not close may refuse later readers."""
        with self._lock:
            parts, self._parts = list(self._parts.values()), {}
        for part in parts:
            if part is not None:
                _reader().part_from(part.agent)


class NixlError(Exception):
    """NIXL has failed, or took too long."""


class _NixlReader:
    """The agent of this process that reads, and its registered memory. Thread-safe: one transfer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent = new_agent()
        self._known: dict[str, int] = {}
        self._lost: list[tuple[Any, Any, Any]] = []
        """Transfers that did not end in time, each with the memory that it may still write to, and its registration."""
        self._make_staging()

    def _make_staging(self) -> None:
        self._staging = np.empty(STAGING_NBYTES, np.uint8)
        self._registered = self._agent.register_memory([(self._staging.ctypes.data, STAGING_NBYTES, 0, "")], "DRAM")

    def _find_lost(self) -> None:
        """Free the memory of transfers that have ended since."""
        for each in list(self._lost):
            handle, _, registered = each
            try:
                if self._agent.check_xfer_state(handle) == "PROC":
                    continue
            except Exception as error:
                logger.info("a transfer of NIXL has ended late: %s", error)
            _named(self._agent.deregister_memory, registered)
            self._lost.remove(each)

    def meet(self, metadata: bytes) -> str:
        """Learn of an agent; return its name."""
        with self._lock:
            name = _named(self._agent.add_remote_agent, metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._known[name] = self._known.get(name, 0) + 1
            return name

    def part_from(self, agent: str) -> None:
        """Forget an agent."""
        with self._lock:
            self._known[agent] = self._known.get(agent, 1) - 1
            if self._known[agent] <= 0:
                del self._known[agent]
                try:
                    self._agent.remove_remote_agent(agent)
                except Exception as error:
                    logger.info("NIXL does not forget %s: %s", agent, error)

    def take(self, agent: str, runs: Sequence[tuple[int, int]], timeout_s: float) -> Iterator[memoryview]:
        """Yield the bytes of runs of an agent's memory, in order; each is valid until the next."""
        for some in _fitting(runs, STAGING_NBYTES):
            with self._lock:
                self._transfer(agent, some, timeout_s)
                yield self._staging.data[: sum(size for _, size in some)]

    def _transfer(self, agent: str, runs: Sequence[tuple[int, int]], timeout_s: float) -> None:
        if self._lost:
            self._find_lost()
        own, at = [], self._staging.ctypes.data
        for _, size in runs:
            own.append((at, size, 0))
            at += size
        local = self._agent.get_xfer_descs(own, "DRAM")
        remote = self._agent.get_xfer_descs([(address, size, 0) for address, size in runs], "DRAM")
        handle = _named(self._agent.initialize_xfer, "READ", local, remote, agent, b"")
        state, deadline = _named(self._agent.transfer, handle), time.monotonic() + timeout_s
        try:
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(POLL_S)
                state = _named(self._agent.check_xfer_state, handle)
        finally:
            if state == "PROC":
                # Bytes may still come, so the memory must stay; no other transfer uses it.
                self._lost.append((handle, self._staging, self._registered))
                self._make_staging()
            else:
                _named(self._agent.release_xfer_handle, handle)
        if state == "PROC":
            raise NixlError(f"no answer within {timeout_s:g} s")
        if state != "DONE":
            raise NixlError(f"the transfer ended as {state}")


def _named(call: Any, *args: Any) -> Any:
    """Make a call to NIXL, whose errors have no common class. Raises: NixlError: The call fails."""
    try:
        return call(*args)
    except Exception as error:
        raise NixlError(f"{type(error).__name__}: {error}") from error


def _reader() -> _NixlReader:
    return _reader_of(os.getpid())


@functools.cache
def _reader_of(_pid: int) -> _NixlReader:
    return _NixlReader()


def _runs(piece: PartPiece, box: BoxRequest) -> list[tuple[int, int]] | None:
    """Return the runs of bytes of a box in its part's memory, each with its start; None if there are too many."""
    region, itemsize = box.box, box.dtype.itemsize
    run, dim = 1, region.ndim - 1
    while dim >= 0 and (region.shape[dim] == 1 or piece.strides[dim] == run):
        run *= region.shape[dim]
        dim -= 1
    outer = region.shape[: dim + 1]
    if math.prod(outer) > MAX_RUNS:
        return None
    first = piece.offset + itemsize * sum(at * step for at, step in zip(region.offset, piece.strides, strict=True))
    return [
        (first + itemsize * sum(at * step for at, step in zip(index, piece.strides, strict=False)), run * itemsize)
        for index in product(*map(range, outer))
    ]


def _fitting(runs: Sequence[tuple[int, int]], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Yield runs in groups of at most so many bytes; a longer run is cut."""
    some: list[tuple[int, int]] = []
    room = limit
    for start, nbytes in runs:
        at, left = start, nbytes
        while left:
            size = min(left, room)
            some.append((at, size))
            at, left, room = at + size, left - size, room - size
            if not room:
                yield some
                some, room = [], limit
    if some:
        yield some
