"""A simulation of relays that pull one part: the rules of the choice and of the places, and the registry's own rules.

Each host has a link of one piece per second of simulated time, in either direction. A source sends one answer after the
other, of one piece. The clients of a host share what one of them pulls.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dtckpt.checkpoint.live.fan_out import MAX_COPIES, Places, SourceChoice
from dtckpt.coordination.feeds import events as feeds
from dtckpt.coordination.feeds.rules import FeedRules, MemoryLimit
from dtckpt.coordination.task_identity import Identity

PUBLISHER = "publisher"
LATENCY_S = 0.005


@dataclass(eq=False)
class Host:
    """A relay, or the publisher."""

    name: str
    places: Places
    choice: SourceChoice | None = None
    has: set[int] = field(default_factory=set)
    free_at: float = 0.0
    slowness: float = 1.0
    is_alive: bool = True
    is_offered: bool = False
    has_given_up: bool = False
    ended_at: float | None = None
    asks_registry: int = 0


class Simulation:
    """Hosts that pull `num_pieces` pieces, whose transfer takes `copy_s` seconds over one free link."""

    def __init__(self, num_hosts: int, *, num_pieces: int = 24, copy_s: float = 8.0, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now, self.num_pieces, self.piece_s = 0.0, num_pieces, copy_s / num_pieces
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.sent: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.rules = FeedRules(10.0, MemoryLimit(1 << 30))
        trainer = Identity("trainer", 0, 1)
        self.rules.accept(feeds.OpenFeed(trainer, "f", 0, 2, 1000, b"s" * 32), 0.0)
        self.rules.accept(feeds.Announce(trainer, "f", 0, 1000, 1, 1, b"tree", 60.0), 0.0)
        self.rules.accept(feeds.PutPart(trainer, "f", 0, 1000, b"publisher", b"digest", 1), 0.0)
        self.hosts = {PUBLISHER: Host(PUBLISHER, Places(MAX_COPIES), has=set(range(num_pieces)))}
        for number in range(num_hosts):
            self.hosts[f"host{number}"] = Host(f"host{number}", Places())

    def at(self, when: float, happen: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens."""
        return not self._events

    @property
    def relays(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.name != PUBLISHER]

    def copies_of_source(self) -> float:
        return self.sent.get(PUBLISHER, 0) / self.num_pieces

    # --- steps of a host ----------------------------------------------------------------------------------------------

    def begin(self, host: Host) -> None:
        host.choice = SourceChoice(self.now, self.random.random)
        self._ask_registry(host)
        self._step(host)

    def kill(self, host: Host, *, known_after_s: float = 10.0) -> None:
        host.is_alive = False
        self.at(self.now + known_after_s, lambda: self.rules.gone(host.name, None, "lost"))

    def _ask_registry(self, host: Host) -> None:
        assert host.choice is not None
        host.asks_registry += 1
        lease = feeds.Subscribe(Identity(host.name, 0, 1), "f", "", hash_of(host.name), feeds.NEWEST, host.name)
        answer = self.rules.accept(lease, self.now)
        assert isinstance(answer, feeds.Leased)
        host.choice.tell([holder.job for holder in answer.holders if holder.job != host.name], PUBLISHER, self.now)

    def _offer(self, host: Host, *, is_whole: bool) -> None:
        who = Identity(host.name, 0, 1)
        self.rules.accept(feeds.Serve(who, "f", 1000, b"tree", b"h", b"", is_whole, 1, host.name), self.now)

    def _step(self, host: Host) -> None:
        choice = host.choice
        if not host.is_alive or choice is None:
            return
        if choice.is_over(self.now):
            host.has_given_up = True
            return
        if choice.wants_news(self.now):
            self._ask_registry(host)
        name = choice.choose(self.now)
        if name is None:
            self.at(self.now + choice.pause_s(self.now), lambda: self._step(host))
            return
        source = self.hosts[name]
        self.at(self.now + LATENCY_S, lambda: self._serve(host, source))

    def _serve(self, host: Host, source: Host) -> None:
        """Let a source answer a request."""
        choice, puller = host.choice, host.name
        assert choice is not None
        self.asked[source.name] = self.asked.get(source.name, 0) + 1
        if not source.is_alive:
            choice.failed(source.name, self.now, is_damaged=False)
        elif not source.places.admit(puller, self.now, insists=choice.insists(self.now)):
            choice.is_full(source.name, self.now)
        else:
            if not host.is_offered:
                host.is_offered = True
                self._offer(host, is_whole=False)
            lacking = [piece for piece in range(self.num_pieces) if piece not in host.has]
            given = [piece for piece in lacking if piece in source.has][:1]
            if len(given) == len(lacking):
                source.places.done(puller)
            if given:
                begin = max(self.now, source.free_at)
                source.free_at = begin + len(given) * self.piece_s * max(source.slowness, host.slowness)
                self.at(source.free_at, lambda: self._receive(host, source, given))
                return
            choice.has_nothing(source.name, self.now)
        self._step(host)

    def _receive(self, host: Host, source: Host, given: list[int]) -> None:
        assert host.choice is not None
        if not host.is_alive:
            return
        if not source.is_alive:
            host.choice.failed(source.name, self.now, is_damaged=False)
        else:
            self.sent[source.name] = self.sent.get(source.name, 0) + len(given)
            host.has.update(given)
            host.choice.took(source.name, self.now)
        if len(host.has) == self.num_pieces:
            host.ended_at = self.now
            self._offer(host, is_whole=True)
            return
        self._step(host)


def hash_of(name: str) -> int:
    return random.Random(name).getrandbits(62) or 1
