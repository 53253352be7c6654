"""`Replicator`: send the parts of this client to the hosts that hold copies of them, in the background.

A late copy does not delay the next save: of the waiting saves, a client sends only the newest. But if each client left
out different saves, no save would ever have all its copies. So the clients agree at the begin of a save. If no client
still has to send an agreed save, all clients send this save, and no newer save takes its place::

    saves       1        2        3        4        5        6        7
    client 0    agreed   waits    (left out)        agreed            ...
    client 1    agreed   sends    waits    (left out) agreed          ...

Clients still offer the next save's copies to a host that does not take copies. The log has the first failure, and then
the end of the trouble.

A host that has acknowledged a part copies from it the pieces that the next part has, too: these are not sent again.

`ExpectedCopies` are the copies that come to this host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from dtckpt.checkpoint.parts.host_folder import HostFolder, Stamp
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts
from dtckpt.comm.background_threads import begin
from dtckpt.errors import DtckptError, capped, format_nbytes

logger = logging.getLogger("dtckpt.tiers")


MIN_MEASURED_NBYTES = 16 << 20
"""The rate of smaller copies says little about the network."""
SLOW = 4
"""A host is slow if it takes copies at less than this part of the expected rate."""
MAX_PROTECTED = 8
"""Number of protected saves that a client reports to the others."""


@dataclass(frozen=True, slots=True, eq=False)
class OutgoingPart:
    """A part to copy.

    Args:
        save: The save.
        client: The client whose part it is.
        index: The index.
        data: The elements.
        peers: The servers of the hosts that get it.
        done: Called after the part was sent, or given up.
        acknowledged: Called when all the hosts have acknowledged it.
        is_agreed: Whether all clients send their parts of this save, so that a newer save does not take its place.
    """

    save: SaveId
    client: int
    index: PartIndex
    data: memoryview
    peers: Sequence[Peer]
    done: Callable[[], None]
    acknowledged: Callable[[], None]
    is_agreed: bool = True

    def is_same(self, other: OutgoingPart) -> bool:
        """Whether another copy brings the same part to the same hosts."""
        own, others = ((each.save, each.client, [peer.host for peer in each.peers]) for each in (self, other))
        return own == others


class Replicator:
    """Sends copies, one after the other, in a separate thread.

    Args:
        max_rate: Bound on the bytes per second.
        link_rate: Expected bytes per second; None: no expectation.
    """

    def __init__(self, max_rate: float | None, link_rate: float | None = None) -> None:
        self.protected: tuple[SaveId, ...] = ()
        """The newest saves that have all the copies that this client is to send, ascending."""
        self._abandoned = range(0)
        self.nbytes_sent = 0
        self.seconds = 0.0
        self._max_rate = max_rate
        self._link_rate = link_rate
        self._measured: set[str] = set()
        self._held: dict[tuple[str, int], PartIndex] = {}
        """By host and client, the part that the host acknowledged last."""
        self._waiting: deque[OutgoingPart] = deque()
        self._changed = threading.Condition()
        self._sending: OutgoingPart | None = None
        self._is_running = False
        self._troubled: set[str] = set()

    def submit(self, copy: OutgoingPart) -> None:
        """Send a part at its turn; it replaces older waiting saves, except agreed saves."""
        with self._changed:
            under_way = [*self._waiting, *([self._sending] if self._sending else [])]
            if any(each.is_same(copy) for each in under_way):
                copy.done()
                return
            # While a host takes no copies, each copy may take as long as a timeout, and waiting copies would fill
            # memory.
            kept = [each for each in self._waiting if (each.is_agreed and not self._troubled) or each.save == copy.save]
            for older in self._waiting:
                if older not in kept:
                    older.done()
            self._waiting = deque([*kept, copy])
            if not self._is_running:
                self._is_running = True
                begin(self._run, "dtckpt-tier-copies")

    @property
    def is_free(self) -> bool:
        """Whether all agreed copies were sent, or this client only waits for a host that takes no copies."""
        with self._changed:
            under_way = [*self._waiting, *([self._sending] if self._sending else [])]
            return not any(copy.is_agreed for copy in under_way) or bool(self._troubled)

    def wait(self, timeout_s: float) -> bool:
        """Wait until no copies wait; return whether this came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                copy = self._sending = self._waiting.popleft()
            try:
                self._send(copy)
            finally:
                with self._changed:
                    self._sending = None
                copy.done()

    def _send(self, copy: OutgoingPart) -> None:
        is_complete = True
        for peer in copy.peers:
            start = time.monotonic()
            try:
                nbytes = self._put(copy, peer)
            except DtckptError as error:
                is_complete = False
                if peer.host not in self._troubled:
                    self._troubled.add(peer.host)
                    logger.warning(
                        "host %s takes no copies: step %d and later steps have fewer copies until it does: %s",
                        peer.host, copy.save.step, error,
                    )  # fmt: skip
                continue
            seconds = time.monotonic() - start
            self.nbytes_sent += nbytes
            self.seconds += seconds
            self._note_rate(peer.host, nbytes, seconds)
            if peer.host in self._troubled:
                self._troubled.discard(peer.host)
                logger.warning("host %s takes copies again, from step %d on", peer.host, copy.save.step)
        if is_complete:
            copy.acknowledged()

    def _put(self, copy: OutgoingPart, peer: Peer) -> int:
        """Send a part to a host, without the pieces of the part before that the host has; return the bytes sent."""
        key, file = (peer.host, copy.client), copy.index.to_bytes()
        base = self._held.pop(key, None)
        held = [] if base is None else copy.index.ranges_in(base)
        put = partial(peer.put, copy.save, copy.client, file, copy.data, self._max_rate)
        if base is not None and held:
            try:
                nbytes = put(base=base.save, held=held)
            except DtckptError as error:
                # The host may have removed that part meanwhile, or its memory may be damaged.
                logger.info("host %s gets all of step %d: %s", peer.host, copy.save.step, error)
                nbytes = put()
        else:
            nbytes = put()
        self._held[key] = copy.index
        return nbytes

    def go_back(self, save: SaveId, newest: int) -> None:
        """Protect no save between a restored one and a number: its run was abandoned. Copies may still be under way."""
        with self._changed:
            self._abandoned = range(save.number + 1, newest + 1)
            self.protected = tuple(each for each in self.protected if each.number not in self._abandoned)

    def protect(self, save: SaveId) -> None:
        """Note that a save has all the copies that this client is to send."""
        with self._changed:
            if save.number not in self._abandoned:
                self.protected = tuple(sorted({*self.protected, save})[-MAX_PROTECTED:])

    def _note_rate(self, host: str, nbytes: int, seconds: float) -> None:
        """Log the rate at which a host took its first large copy; warn if it is far below the expected rate."""
        if host in self._measured or nbytes < MIN_MEASURED_NBYTES:
            return
        self._measured.add(host)
        rate = nbytes / max(seconds, 1e-9)
        logger.info("host %s takes copies at %s/s", host, format_nbytes(int(rate)))
        expected = min(self._link_rate or 0.0, self._max_rate or float("inf"))
        if rate < expected / SLOW:
            logger.warning(
                "host %s takes copies at %s/s, where %s/s are expected; see whether LocalTier(address=...) names the "
                "fast network on all hosts",
                host, format_nbytes(int(rate)), format_nbytes(int(expected)),
            )  # fmt: skip


def log_protection(copy_hosts: CopyHosts, wanted: int) -> None:
    """Log how well a step is protected."""
    num_hosts = len(copy_hosts.domains)
    if copy_hosts.copies < wanted:
        logger.warning(
            "the local tier has %d host(s), so each part is on %d of them, not %d", num_hosts, copy_hosts.copies, wanted
        )
    if together := copy_hosts.in_one_domain:
        logger.warning("all copies of the parts of hosts %s are in one domain", capped(together))
    odds = ", ".join(
        f"{copy_hosts.loss_probability(lost):.2g} if {lost} fail at once" for lost in (1, 2, 3, 4) if lost <= num_hosts
    )
    logger.info(
        "local tier: %d hosts, %d copies; a step is lost with probability %s", num_hosts, copy_hosts.copies, odds
    )


class ExpectedCopies:
    """The copies of one save that other hosts send to this host; a client that leaves waits for them.

    Args:
        folder: The parts of this host.
    """

    def __init__(self, folder: HostFolder) -> None:
        self._folder = folder
        self._stamps: dict[tuple[SaveId, int], Stamp] = {}
        self._replaced: dict[tuple[SaveId, int], Stamp] = {}

    def note_present(self, save: SaveId, clients: Iterable[int]) -> None:
        """Note the copies that are here now, before any client can find a damaged copy and replace it."""
        self._stamps = {(save, client): self._folder.stamp(save, client) for client in clients}

    def expect(self, save: SaveId, clients: Iterable[int]) -> None:
        """Expect copies of the parts of clients; a copy that was noted before does not count."""
        self._replaced = {(save, client): self._stamps.get((save, client)) for client in clients}

    def have_come(self, refused: Collection[tuple[SaveId, int]]) -> bool:
        """Whether all copies have come, or were refused."""
        return all(
            part in refused or self._folder.stamp(*part) not in (None, former)
            for part, former in self._replaced.items()
        )
