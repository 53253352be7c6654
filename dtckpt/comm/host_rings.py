"""Rings of buffers in shared memory, through which clients of one host hand data on; Linux only.

Each client has a ring. Only the owner writes to a ring's memory, and the others map this memory read-only. So a client
that is late or has given up never changes the memory of another client::

    ring of client 0                                         ring of client 1
    slots 0 ... 7         --- copied out by client 1 -->
    published: 12         --- client 1 may copy 12 spans
                              slot 4 is free again ---       consumed of client 0: 5
                          <-- copied out by client 0 ---     slots 0 ... 7

A span is the content of one slot. The producer fills slots in turn, and fills a slot again when all consumers have
counted its last span. A client always consumes the spans that it finds, so clients cannot wait in a circle.

The memory is a ``memfd`` (``man 2 memfd_create``). Peers open it below ``/proc``, by the address that the owner sent. A
host may forbid this, so `HostRings.join` is a vote: each client writes in its own ring whether it could open all other
rings. A client that can open all rings sees every refusal, and any other client refuses itself.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import platform
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from dtckpt.comm.point_to_point import host_id
from dtckpt.errors import BarrierTimeoutError, CoordinationError, from_wire, to_wire

logger = logging.getLogger("dtckpt.host_rings")

NUM_SLOTS = 8
"""Slots of a ring."""
SLOT_NBYTES = 1 << 20
"""Bytes of the largest span."""
MAX_CLIENTS = 256
"""Bound on the clients of a host that join their rings."""

_STRIDE = SLOT_NBYTES + 2 * mmap.PAGESIZE
"""Bytes from slot to slot: a span may begin anywhere in the slot's first page."""
_LINE_NBYTES = 64
"""Bytes of a line of the processor's cache."""
_HEADER_NBYTES, _ERROR_NBYTES = 4096, 16384
_TOTAL_NBYTES = _HEADER_NBYTES + _ERROR_NBYTES + NUM_SLOTS * _STRIDE
# Positions of 8-byte words in the header.
_TOKEN, _STATE, _PUBLISHED, _ERROR_SIZE, _SEEN_NS, _STARTS = 0, 1, 2, 3, 4, 8
_CONSUMED = _STARTS + NUM_SLOTS
_OPENING, _JOINED, _REFUSED, _FAILED = range(4)
_NUM_YIELDS = 20
"""So many times a waiting client gives its core to others, before it sleeps."""
_MIN_SLEEP_S, _MAX_SLEEP_S = 50e-6, 0.5e-3
_LIVENESS_PERIOD_S = 0.1
"""Seconds between two checks of a waiting client that the others live."""
_SILENT_S = 1.0
"""A client that has not waited for so long is reading, or hangs."""


class RingAddress(NamedTuple):
    """The place of a ring, for the other clients.

    Args:
        host: Equal for clients that may be able to open each other's rings.
        pid: The client's process.
        descriptor: The descriptor of the memory there.
        token: A random number that the memory holds.
    """

    host: str
    pid: int
    descriptor: int
    token: int


class _Ring:
    """The memory of a ring."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.words = np.frombuffer(memory, np.int64, _HEADER_NBYTES // 8)
        self.error = np.frombuffer(memory, np.uint8, _ERROR_NBYTES, _HEADER_NBYTES)
        self.slots = np.frombuffer(memory, np.uint8, NUM_SLOTS * _STRIDE, _HEADER_NBYTES + _ERROR_NBYTES)

    @property
    def state(self) -> int:
        return int(self.words[_STATE])


class OwnRing(_Ring):
    """This client's ring.

    Raises:
        OSError: The system forbids it, or lacks it.
    """

    def __init__(self) -> None:
        # Without order between stores of different clients, a count could be seen before the bytes that it counts.
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise OSError(f"not on {sys.platform} {platform.machine()}")
        host = host_id()
        if not any(host):
            raise OSError("DTCKPT_HOST_TRANSPORT turns it off, or /proc cannot be read")
        os.close(os.pidfd_open(os.getpid()))  # raises where liveness cannot be told
        self._descriptor = os.memfd_create("dtckpt-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(self._descriptor, _TOTAL_NBYTES)
            # A process that maps a file dies if the file then shrinks.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            super().__init__(mmap.mmap(self._descriptor, _TOTAL_NBYTES))
        except BaseException:
            os.close(self._descriptor)
            raise
        self.words[_TOKEN] = secrets.randbits(62) + 1
        self.address = RingAddress(host.hex(), os.getpid(), self._descriptor, int(self.words[_TOKEN]))

    def close(self) -> None:
        """Give up the memory; it stays unchanged for clients that have mapped it."""
        if self._descriptor < 0:
            return
        if self.state == _OPENING:
            self.words[_STATE] = _REFUSED
        os.close(self._descriptor)
        self._descriptor = -1
        # The memory is unmapped with the last array that refers to it.
        del self.words, self.error, self.slots

    def fail(self, error: BaseException) -> None:
        """Tell the other clients of an error; they raise it, too."""
        text = "\n".join(to_wire(error)).encode("utf-8", "backslashreplace")[:_ERROR_NBYTES]
        self.error[: len(text)] = np.frombuffer(text, np.uint8)
        self.words[_ERROR_SIZE] = len(text)
        self.words[_STATE] = _FAILED


class _PeerRing(_Ring):
    """The ring of another client of this host.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, address: RingAddress) -> None:
        # The process first: it still lives when its memory is found below, so no other process has its number.
        self.process = os.pidfd_open(address.pid)
        try:
            # Not blocking: if the owner has closed it, the descriptor may belong to another file.
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_NONBLOCK)
            try:
                if os.fstat(descriptor).st_size != _TOTAL_NBYTES:
                    raise OSError("it is closed")
                super().__init__(mmap.mmap(descriptor, _TOTAL_NBYTES, prot=mmap.PROT_READ))
            finally:
                os.close(descriptor)
            if self.words[_TOKEN] != address.token:
                raise OSError("it is closed")
        except BaseException:
            os.close(self.process)
            raise

    def is_alive(self) -> bool:
        return not select.select([self.process], [], [], 0)[0]

    def failure(self) -> Exception | None:
        """Return the error that the client has told, if it has failed."""
        if self.state != _FAILED:
            return None
        text = self.error[: self.words[_ERROR_SIZE]].tobytes().decode("utf-8", "replace")
        code, _, message = text.partition("\n")
        return from_wire(code, message)


class HostRings:
    """The rings of clients of one host, as one of the clients uses them. A context manager: an error reaches all.

    Args:
        own: This client's ring; closed at exit.
        addresses: The addresses of all rings, by client.
        client: This client.
        timeout_s: How long a wait for the others may take, in seconds.
    """

    def __init__(self, own: OwnRing, addresses: Mapping[int, RingAddress], client: int, timeout_s: float) -> None:
        self._own = own
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._clients = sorted(addresses)
        self._position = self._clients.index(client)
        self._client = client
        self._peers: dict[int, _PeerRing] = {}
        self._num_taken = self._num_published = 0
        # Take the slot that was freed last: it is most likely in the processor's cache.
        self._free = list(range(NUM_SLOTS))
        self._taken: deque[int] = deque()
        """Slots in use, in order: taken, and not yet consumed by all clients."""
        self._num_consumed = dict.fromkeys(self._clients, 0)
        self._ended: set[int] = set()
        self._num_waits = 0
        self._moved_at = self._looked_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._own.fail(error)
        self._own.close()
        for peer in self._peers.values():
            os.close(peer.process)
        self._peers.clear()

    def join(self) -> bool:
        """Open the rings of the others; return whether all clients could. The result is the same on all clients.

        Collective: Over the clients of the addresses.

        Raises:
            CoordinationError: Another client ended, or did not come in time; or the error of another client.
        """
        for client in self._clients:
            if client == self._client:
                continue
            try:
                self._peers[client] = _PeerRing(self._addresses[client])
            except OSError as error:
                logger.info("the ring of client %d, on this host, cannot be opened: %s", client, error)
                return False
        self._own.words[_STATE] = _JOINED
        while opening := [client for client, peer in self._peers.items() if peer.state == _OPENING]:
            self.wait(opening)
        return all(peer.state != _REFUSED for peer in self._peers.values())

    # --- the producer's side ------------------------------------------------------------------------------------------

    def take_slot(self, nbytes: int, position: int, limit: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Return a buffer in a free slot; None if a client has still to consume the span in the slot.

        Args:
            nbytes: Bytes of the span.
            position: Where the span begins in its file: the buffer's address is aligned to it.
            limit: How many slots may be in use. Few slots stay in the processor's cache.
        """
        num_kept = self._num_taken - min(self._consumed_of_own().values())
        while len(self._taken) > num_kept:
            self._free.append(self._taken.popleft())
        if len(self._taken) >= min(limit, NUM_SLOTS):
            return None
        slot = self._free.pop()
        self._taken.append(slot)
        start = slot * _STRIDE + position % mmap.PAGESIZE // _LINE_NBYTES * _LINE_NBYTES
        self._own.words[_STARTS + self._num_taken % NUM_SLOTS] = start
        self._num_taken += 1
        return self._own.slots[start : start + nbytes]

    def publish(self) -> None:
        """Hand the oldest taken slot on to the other clients."""
        self._num_published += 1
        self._own.words[_PUBLISHED] = self._num_published

    def slow_consumers(self) -> list[int]:
        """Return the clients that have consumed least of this client's spans."""
        consumed = self._consumed_of_own()
        return [client for client, count in consumed.items() if count == min(consumed.values())]

    def _consumed_of_own(self) -> dict[int, int]:
        return {client: int(peer.words[_CONSUMED + self._position]) for client, peer in self._peers.items()}

    # --- the consumer's side ------------------------------------------------------------------------------------------

    def next_span(self, client: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Return the oldest span of a client that this client has not consumed; None if there is none yet."""
        peer, number = self._peers[client], self._num_consumed[client]
        if number >= peer.words[_PUBLISHED]:
            return None
        start = int(peer.words[_STARTS + number % NUM_SLOTS])
        return peer.slots[start : start + nbytes]

    def consume(self, client: int) -> None:
        """Let a client fill the slot of the `next_span` again."""
        self._num_consumed[client] += 1
        self._own.words[_CONSUMED + self._clients.index(client)] = self._num_consumed[client]

    # --- waits --------------------------------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Begin the next wait anew."""
        self._num_waits = 0
        self._moved_at = time.monotonic()

    def wait(self, clients: Iterable[int], sleep: Callable[[float], bool] = lambda _: False) -> None:
        """Sleep for a moment, as this client waits for some others.

        Args:
            clients: The others.
            sleep: Sleeps for so many seconds at most, if it has work to wait for; returns whether it had.

        Raises:
            CoordinationError: One of them has ended, or the timeout is over since the last progress.
            DtckptError: A client has failed; this is its error.
        """
        for peer in self._peers.values():
            if (failure := peer.failure()) is not None:
                raise failure
        now = time.monotonic()
        if now - self._looked_at >= _LIVENESS_PERIOD_S:
            self._looked_at = now
            clients = sorted(clients)
            for client in clients:
                # At the second look: before the first look, the client may have handed on all its spans, and then
                # ended.
                if client in self._ended:
                    raise CoordinationError(
                        f"client {client} has ended while it read tensors together with the other clients of its host; "
                        "restore again"
                    )
                if not self._peers[client].is_alive():
                    self._ended.add(client)
            self._own.words[_SEEN_NS] = time.monotonic_ns()
            if clients and now - self._moved_at >= self._timeout_s:
                # A client that waits, too, is not the cause.
                seen_s = {client: now - self._peers[client].words[_SEEN_NS] / 1e9 for client in clients}
                clients = [client for client in clients if seen_s[client] > _SILENT_S] or clients
                raise BarrierTimeoutError(
                    f"clients {clients} of this host did not hand on, or take, rows of tensors in "
                    f"{self._timeout_s:g} s; look for a stopped process, or restore with read_once=False",
                    missing=clients,
                )
        if sleep(_MAX_SLEEP_S):
            return
        self._num_waits += 1
        if self._num_waits <= _NUM_YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(_MIN_SLEEP_S * (self._num_waits - _NUM_YIELDS), _MAX_SLEEP_S))
