"""`Relay`: keeps versions of a feed in the memory of its host, and serves them to further readers.

::

    hold      pull each part, whole, from relays or the publisher | meanwhile serve the pieces that are here
              all parts are here: tell the registry that this client serves the version on
    then      this host's readers map the parts; other hosts ask the server

The clients of a job on one host share a folder, and pull each part once: the client that has locked the part pulls it,
and the others wait. A part is never changed. When it goes, its file is removed; a process that has mapped the file
keeps its memory. A relay that cannot pull a version reads it as a plain reader does.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dtckpt.checkpoint.live.fan_out import GIVE_UP_S, SourceChoice
from dtckpt.checkpoint.live.pulls import HeldPart, PullPeer, PullRequest, PullService
from dtckpt.checkpoint.live.sources import RELAY_TIMEOUT_S, folder_of, relays_of
from dtckpt.checkpoint.live.version_checkpoint import index_digest, save_of_lease
from dtckpt.checkpoint.live.versions import PartAddress, job_of_feed, title_of_version
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.peers import own_address
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.coordination.api import Member
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.feeds.events import Want
from dtckpt.coordination.feeds.leases import FeedLease, FeedSource
from dtckpt.coordination.identity import host_name
from dtckpt.errors import CheckpointCorruptError, DtckptError, SourceLostError, StorageError, TicketError
from dtckpt.storage.local_folder import LocalFolder

logger = logging.getLogger("dtckpt.live")

POLL_S = 0.05
"""How often a client looks whether another one of its host has pulled a part."""
ASK_S = 0.3
"""Longest wait for the answer of a registry that knows the version."""


@dataclass(slots=True)
class PullTraffic:
    """The bytes that a relay took from other hosts for its last version.

    Args:
        by_host: Bytes, by host.
        passed_over: Sources that were damaged or did not answer, and the reasons.
    """

    by_host: dict[str, int] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)

    def pass_over(self, error: BaseException) -> None:
        """Note why a source was passed over."""
        if (text := str(error)) not in self.passed_over:
            self.passed_over.append(text)
            logger.warning("another source is taken, because of %s", text)


class Relay:
    """Serves versions of a feed on. Thread-safe but for `hold` and `close`.

    Args:
        feed: Name of the feed.
        feeds: The client of feeds of this process.
        member: This client of the reader.
        folder: A directory in the memory of this host.
        keep: How many versions stay.
        address: Address at which other hosts reach this client; default: as for `Publisher`.
        timeout_s: Longest wait for each answer of the publisher.

    Attributes:
        folder: The parts that are here.
        traffic: The bytes that this client pulled for the version that was held last.
    """

    def __init__(
        self, feed: str, feeds: FeedClient, member: Member, *, folder: Path, keep: int, address: str | None,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.traffic = PullTraffic()
        self._feed, self._feeds, self._member = feed, feeds, member
        self._keep, self._timeout_s = keep, timeout_s
        self._host = host_name()
        root = f"{job_of_feed(feed, member.job)}, to be read on"
        self.folder = HostFolder(folder, root, host=self._host, title="the live versions that are read on")
        atexit.register(self.folder.free)
        self.folder.make()
        self.folder.remove_spare_of_the_dead()
        self._lock = threading.RLock()
        self._held: dict[int, SaveId] = {}
        self._pulls = PullService(self.folder, max_copies=None, on_damage=self._drop_damaged)
        self._server = PartServer(
            self.folder, address or own_address(feeds.address), timeout_s, self._check_ticket, answer_pull=self._pulls,
            is_relay=True,
        )  # fmt: skip
        self._server.open(secrets.token_hex(16))  # no other process knows it: readers show tickets
        self._endpoint = PartAddress(self._server.url, self._host, str(folder), root, self.folder.token()).to_bytes()

    def _check_ticket(self, shown: str, save: SaveId) -> None:
        try:
            ticket = bytes.fromhex(shown)
        except ValueError:
            raise TicketError("the request has no ticket") from None
        self._feeds.check(self._feed, save.number, ticket, time.time())

    # --- holding ------------------------------------------------------------------------------------------------------

    def hold(self, lease: FeedLease) -> FeedLease:
        """Pull a version, unless it is on this host, and serve it on.

        If that fails, the version is read as by a plain reader; `traffic` says why.

        Args:
            lease: A lease on the version.

        Returns:
            The lease as the registry told it last.
        """
        self.traffic = PullTraffic()
        save = save_of_lease(lease)
        pull = _VersionPull(self, lease, save)
        if pull.is_elsewhere_here():
            return lease  # a client that has the piece here serves it
        with self._lock:
            self._held[save.number] = save
        try:
            pull.run()
            self.offer(pull.lease, is_whole=True)
        except (DtckptError, OSError) as error:
            self.traffic.pass_over(error)
            self._stop(lease.number)
        self._free_old()
        return pull.lease

    def offer(self, lease: FeedLease, *, is_whole: bool) -> None:
        """Tell the registry that this client serves a version, or the parts that it has so far."""
        nbytes = sum(part.nbytes for part in lease.parts) if is_whole else 0
        self._feeds.serve(lease, endpoint=self._endpoint, is_whole=is_whole, nbytes=nbytes)
        if is_whole:
            logger.info("%s is served on", title_of_version(lease.feed, lease.number, lease.step))

    def _free_old(self) -> None:
        """Free the versions that need not stay: also versions that lost clients of this host have left."""
        with self._lock:
            kept = sorted(self._held)[-self._keep :]
            old = [number for number in self._held if number not in kept]
        for number in old:
            self._stop(number)
        if kept:
            self.folder.remove_saves_of_the_dead(before=kept[0])

    def _stop(self, number: int) -> None:
        """Serve a version no more, and remove the parts that this client has pulled."""
        with self._lock:
            save = self._held.pop(number, None)
            if save is None:
                return
            for client in range(save.num_clients):
                self.folder.remove(save, client)
            self.folder.remove_spare()
        self._pulls.forget(save)
        with suppress(DtckptError):
            self._feeds.stop_serving(self._feed, number)

    def _drop_damaged(self, save: SaveId, error: CheckpointCorruptError) -> None:
        logger.error("version %d of feed %r is served on no more: %s", save.number, self._feed, error)
        self._stop(save.number)
        self.folder.remove_save(save)  # else a client of this host that pulled it would serve it on

    def close(self) -> None:
        """Serve nothing more, and free the memory; readers under way go on at other sources."""
        for number in list(self._held):
            self._stop(number)
        self._server.close()
        self.folder.close()
        atexit.unregister(self.folder.free)


class _VersionPull:
    """How a relay pulls one version."""

    def __init__(self, relay: Relay, lease: FeedLease, save: SaveId) -> None:
        self.lease = lease
        self._relay, self._save = relay, save
        self._folder, self._pulls, self._traffic = relay.folder, relay._pulls, relay.traffic
        self._puller = secrets.token_hex(8)
        self._is_offered = False

    def is_elsewhere_here(self) -> bool:
        """Whether the publisher, or a relay of another job, holds all parts on this host."""
        relays = [address for address, holder in relays_of(self.lease) if holder.is_whole]
        for part in self.lease.parts:
            folders = map(folder_of, [PartAddress.from_bytes(part.endpoint), *relays])
            if not any(
                folder is not None and folder.path != self._folder.path and folder.has(self._save, part.client)
                for folder in folders
            ):
                return False
        return True

    def run(self) -> None:
        """Pull all parts that no client of this host has pulled.

        Raises:
            SourceLostError: No source has sent anything new for a while.
            StorageError: There is no memory.
        """
        parts = self.lease.parts
        # Clients of one host begin with different parts, and relays of different hosts too.
        first = int(len(parts) * _jitter())
        left = [*parts[first:], *parts[:first]]
        alive_at = time.monotonic()
        while left:
            count = len(left)
            left = [part for part in left if not self._is_here(part)]
            if len(left) < count:
                alive_at = time.monotonic()
            if not left:
                return
            waits = True
            for part in left:
                with self._locked(part.client) as mark:
                    if mark is not None:
                        waits = False
                        if not self._is_here(part):
                            self._pull(part, mark)
                        break
            if waits:
                alive_at = max(alive_at, *(self._marked_at(part.client) for part in left))
                if time.monotonic() - alive_at > GIVE_UP_S:
                    raise SourceLostError(f"another client of this host has pulled nothing for {GIVE_UP_S:g} s")
                time.sleep(POLL_S)

    def _is_here(self, part: FeedSource) -> bool:
        try:
            return index_digest(self._folder.index_file(self._save, part.client)) == part.digest
        except OSError:
            return False

    # --- the clients of one host --------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, client: int) -> Iterator[int | None]:
        """Lock a part among the clients of this host; yield None if another one has it."""
        descriptor = LocalFolder(self._folder.path).open_lock(_lock_name(client), to_write=True)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            try:
                yield descriptor
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
        finally:
            os.close(descriptor)

    def _marked_at(self, client: int) -> float:
        """Return when the client that has locked a part made progress, in monotonic seconds."""
        try:
            age_s = time.time() - (self._folder.path / _lock_name(client)).stat().st_mtime
        except OSError:
            return 0.0
        return time.monotonic() - max(age_s, 0.0)

    # --- pulling a part -----------------------------------------------------------------------------------------------

    def _pull(self, part: FeedSource, mark: int) -> None:
        """Pull a part into the folder. Raises: as `run`."""
        choice = SourceChoice(time.monotonic(), _jitter)
        file = self._index_of(part, choice)
        index = PartIndex.from_bytes(file)
        if (index.save, index.client) != (self._save, part.client):
            raise CheckpointCorruptError(f"client {part.client} announced the index of another part")
        with self._relay._lock:
            memory = self._folder.take(index.nbytes)
        held = HeldPart.to_fill(index, file, memory)
        self._pulls.begin(self._save, part.client, held)
        try:
            self._fill(held, part, choice, mark)
            self._folder.put(memory, index, file, is_voted=True)
        except BaseException:
            with self._relay._lock:
                self._folder.give_back(memory)
                self._folder.remove_spare()
            raise
        finally:
            self._pulls.end(self._save, part.client)

    def _index_of(self, part: FeedSource, choice: SourceChoice) -> bytes:
        for source, peer in self._sources(part, choice):
            with self._noting(choice, source):
                answer = peer.pull(self._save, part.client, PullRequest.of_index(self._puller))
                if answer.is_full:
                    choice.is_full(source, time.monotonic())
                elif index_digest(answer.index_file) == part.digest:
                    return answer.index_file
                else:
                    raise CheckpointCorruptError(
                        f"host {peer.host}: the index of a part differs from the announced index"
                    )
        raise AssertionError("sources end with an error")

    def _fill(self, held: HeldPart, part: FeedSource, choice: SourceChoice, mark: int) -> None:
        if not (lacking := held.lacking()):
            return
        for source, peer in self._sources(part, choice):
            before, now = held.nbytes, time.monotonic()
            request = PullRequest.of_lacking(self._puller, lacking, insists=choice.insists(now))
            with self._noting(choice, source):
                answer = peer.pull(self._save, part.client, request, held, self._offer_early)
                if answer.is_full:
                    choice.is_full(source, time.monotonic())
                elif held.nbytes == before:
                    choice.has_nothing(source, time.monotonic())
                else:
                    choice.took(source, time.monotonic())
            if held.nbytes > before:
                os.utime(mark)
                self._traffic.by_host[peer.host] = self._traffic.by_host.get(peer.host, 0) + held.nbytes - before
                if not (lacking := held.lacking()):
                    return

    @contextmanager
    def _noting(self, choice: SourceChoice, source: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointCorruptError, StorageError) as error:
            self._traffic.pass_over(error)
            choice.failed(source, time.monotonic(), is_damaged=isinstance(error, CheckpointCorruptError))

    def _offer_early(self) -> None:
        """Let other relays pull from this one the pieces that it has so far."""
        if not self._is_offered:
            self._is_offered = True
            with suppress(DtckptError):
                self._relay.offer(self.lease, is_whole=False)

    def _sources(self, part: FeedSource, choice: SourceChoice) -> Iterator[tuple[str, PullPeer]]:
        """Yield the sources to ask, and wait between them. Raises: SourceLostError: None has sent anything new."""
        peers = self._known(part, choice)
        while True:
            now = time.monotonic()
            if choice.is_over(now):
                raise SourceLostError(
                    f"no source has sent a new piece of client {part.client}'s part for {GIVE_UP_S:g} s"
                )
            if choice.wants_news(now):
                self._ask_registry()
                peers = self._known(part, choice)
            source = choice.choose(now)
            if source is not None:
                yield source, peers[source]
            else:
                time.sleep(choice.pause_s(now))

    def _ask_registry(self) -> None:
        """Learn of relays that have begun, or have gone."""
        lease = self.lease
        with suppress(DtckptError):
            self.lease = self._relay._feeds.subscribe(
                lease.feed, want=Want(number=lease.number), group=lease.group, lease_id=lease.lease_id, timeout_s=ASK_S
            )

    def _known(self, part: FeedSource, choice: SourceChoice) -> Mapping[str, PullPeer]:
        """Return the sources of a part, and tell the choice of them."""
        own, timeout_s = self._relay._member.job, self._relay._timeout_s
        publisher = PartAddress.from_bytes(part.endpoint)
        relays = {
            address.url: PullPeer(address.url, address.host, holder.ticket.hex(), min(RELAY_TIMEOUT_S, timeout_s))
            for address, holder in relays_of(self.lease)
            if address.host != self._relay._host or holder.job != own
        }
        choice.tell(list(relays), publisher.url, time.monotonic())
        return {
            **relays,
            publisher.url: PullPeer(publisher.url, publisher.host, part.ticket.hex(), timeout_s),
        }


def _lock_name(client: int) -> str:
    return f"{client}.lock"


def _jitter() -> float:
    """Return a random number from 0 to 1, so that relays do not all ask at one time."""
    return random.random()  # noqa: S311  nothing secret depends on it
