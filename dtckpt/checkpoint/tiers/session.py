"""`TierSession`: the local tier as one client uses it: the clients' hosts, and the parts that they hold.

Before the first save, and in every restore, the clients exchange their hosts, and the parts of these hosts, in the
round ``tiers``. A `Joined` keeps these facts from then on. Saves are in `dtckpt.checkpoint.tiers.local_save`, restores
in `dtckpt.checkpoint.tiers.local_restore`.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.peers import Peer, own_address
from dtckpt.checkpoint.parts.records import UNKNOWN_ROOT, HostInfo, HostParts, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts
from dtckpt.checkpoint.tiers.holdings import HeldSave, held_saves
from dtckpt.checkpoint.tiers.options import LocalTier
from dtckpt.checkpoint.tiers.replicator import ExpectedCopies, Replicator, log_protection
from dtckpt.checkpoint.tiers.root_identity import IDENTITY_NAME, RootFacts
from dtckpt.errors import ConfigError, DtckptError
from dtckpt.format.digest import bytes_digest

logger = logging.getLogger("dtckpt.tiers")

CLOSE_S = 10.0
"""Longest wait at the end for copies under way. A copy that its sender has given up never comes."""
MAX_PARTS_CHARS = 3000
"""Bound on the text in which a client lists its host's parts: a vote has room for 4096 bytes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Joined:
    """Facts about all clients' hosts, from the time when all clients joined.

    Args:
        tier: The options.
        client: This client.
        server: This client's server.
        token: Lets the clients of this job, and no others, ask each other's servers.
        hosts: The hosts, by name.
        copy_hosts: The hosts that hold copies of each host's parts.
        held: The saves that the hosts held, the newest first.
        worn_out: The saves that were restored `LocalTier.max_restores` times, without a newer save.
        has_durable: Whether the root had checkpoints.
        newest_in_root: The number of the newest commit in the root.
    """

    tier: LocalTier
    client: int
    server: PartServer
    token: str
    hosts: Mapping[str, HostInfo]
    copy_hosts: CopyHosts
    held: Sequence[HeldSave]
    worn_out: frozenset[SaveId]
    has_durable: bool
    newest_in_root: int

    @property
    def life(self) -> str:
        """Unique name of the time from joining to closing; the same on all clients."""
        return f"{bytes_digest(self.token.encode()):016x}"

    @property
    def own_host(self) -> HostInfo:
        """The host of this client."""
        return self.hosts[self.tier.host_name]

    @property
    def is_first_on_host(self) -> bool:
        """Whether this client does the work that only one client of each host does."""
        return self.client == self.own_host.clients[0]

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The clients that share the near copies; all clients, if there are to be none."""
        hosts = [self.own_host] if self.tier.near_copies else self.hosts.values()
        return tuple(sorted(client for host in hosts for client in host.clients))

    def peer(self, host: str, client: int | None = None) -> Peer:
        """Return the server of a client on a host; by default of the client with this client's position there."""
        info = self.hosts[host]
        at = self.own_host.clients.index(self.client)
        client = info.clients[at % len(info.clients)] if client is None else client
        return Peer(info.servers[client], host, self.token, self.tier.timeout_s)

    def peer_of(self, client: int) -> Peer:
        """Return the server of a client."""
        return self.peer(next(info.name for info in self.hosts.values() if client in info.clients), client)


class TierSession:
    """The local tier as one client of a job uses it.

    Args:
        tier: The options.
        root: The root of the durable checkpoints.

    Attributes:
        folder: The parts of this host.
        replicator: Sends copies of this client's parts.
        expected: The copies that come to this host.
        root: The identity of the root; if storage does not give it, the newest save's root.
        newest: The number of the newest known save.
    """

    def __init__(self, tier: LocalTier, root: str) -> None:
        self.tier = tier
        self.folder = HostFolder(tier.folder, root, host=tier.host_name, max_nbytes=tier.max_nbytes)
        self.replicator = Replicator(tier.max_rate, tier.link_rate)
        self.expected = ExpectedCopies(self.folder)
        self.root = UNKNOWN_ROOT
        self._server: PartServer | None = None
        self._joined: Joined | None = None
        self._logged_copy_hosts: CopyHosts | None = None
        self.newest = 0

    @property
    def has_joined(self) -> bool:
        """Whether the clients know each other's hosts."""
        return self._joined is not None

    @property
    def joined(self) -> Joined:
        """The facts about all clients' hosts; only after `join`, and until `close`."""
        assert self._joined is not None  # noqa: S101  the manager joins before anything else
        return self._joined

    def join(self, collective: Collective, ask_root: Callable[[], RootFacts], *, is_save: bool) -> None:
        """Exchange the parts that the hosts hold with the other clients.

        Collective: Over all clients of the job; round ``tiers`` of the operation.

        Args:
            collective: The operation.
            ask_root: Returns the facts about the root; called on client 0.
            is_save: Whether the clients join to save, and not to restore.

        Raises:
            ConfigError: Clients pass different options, or a host cannot listen at its address.
        """
        asked = ask_root if collective.is_leader else None
        server, payloads = collective.run_round_with_value("tiers", lambda: self._introduce(asked), phase="plan")
        facts = {client: json.loads(data) for client, data in sorted(payloads.items())}
        _validate_same(facts)
        by_host: dict[str, list[int]] = {}
        for client, fact in facts.items():
            by_host.setdefault(fact["host"], []).append(client)
        of_host = {host: facts[clients[0]] for host, clients in by_host.items()}
        of_leader = facts[min(facts)]
        root = RootFacts(*of_leader["root"])
        server.open(of_leader["token"])
        found = held_saves({host: HostParts.from_text(fact["parts"]) for host, fact in of_host.items()})
        self.root = root.identity_for([held.save for held in found], of_leader["new_root"], is_save=is_save)
        self.newest = max([self.newest, root.newest, *(held.save.number for held in found)])
        held = [each for each in found if each.save.belongs_to(self.root)]
        self._joined = Joined(
            tier=self.tier,
            client=collective.client,
            server=server,
            token=of_leader["token"],
            hosts={
                host: HostInfo(host, of_host[host]["domain"], tuple(clients), {c: facts[c]["server"] for c in clients})
                for host, clients in by_host.items()
            },
            copy_hosts=CopyHosts.of({host: fact["domain"] for host, fact in of_host.items()}, self.tier.copies),
            held=held,
            worn_out=self._worn_out(held, [fact["restores"] for fact in of_host.values()]),
            has_durable=root.has_steps,
            newest_in_root=root.newest,
        )
        if collective.is_leader:
            self._explain(self._joined, found, is_root_empty=not (root.has_steps or is_save))

    def _worn_out(self, held: Sequence[HeldSave], counts: Sequence[Mapping[str, int]]) -> frozenset[SaveId]:
        """Return the saves that were restored too often. ``counts``: for each host, the number of restores by save."""
        most = self.tier.max_restores
        if most is None:
            return frozenset()
        return frozenset(each.save for each in held if max(count.get(each.save.name, 0) for count in counts) >= most)

    def _explain(self, joined: Joined, found: Sequence[HeldSave], *, is_root_empty: bool) -> None:
        """Log the protection of saves, if it is new, and warn of odd saves in the tier.

        Saves are odd if the root is empty, or if they belong to a former job whose root was at the same path.
        """
        if joined.copy_hosts != self._logged_copy_hosts:
            log_protection(joined.copy_hosts, self.tier.copies)
        self._logged_copy_hosts = joined.copy_hosts
        if joined.held and is_root_empty:
            logger.warning("the root has no checkpoint; steps of the local tier are restored all the same")
        if not (saves := [held.save for held in found if not held.save.belongs_to(self.root)]):
            return
        logger.warning(
            "the local tier has %d step(s) of another job, up to step %d, whose root was at the same path before; they "
            "are neither restored nor removed: remove %s on all hosts to free their memory, or write %s to the file %s "
            "of the root and restore them",
            len(saves), max(save.step for save in saves), self.folder.path, max(saves).root, IDENTITY_NAME,
        )  # fmt: skip

    def _introduce(self, ask_root: Callable[[], RootFacts] | None) -> tuple[PartServer, bytes]:
        """Describe this host, and list its parts; on client 0, also the root. Return this client's server, too."""
        try:
            self.folder.make()
        except DtckptError as error:
            # Other hosts may hold the parts that this host lacks. The tier will refuse this host's saves, with the
            # reason.
            logger.warning("host %s: %s", self.tier.host_name, error)
        self.folder.remove_spare_of_the_dead()
        address = self.tier.address or own_address()
        if self._server is None:
            try:
                self._server = PartServer(self.folder, address, self.tier.timeout_s)
            except OSError as error:
                raise ConfigError(
                    f"LocalTier: host {self.tier.host_name!r} cannot listen at {address!r}: {error}"
                ) from error
        facts = {
            "host": self.tier.host_name,
            "domain": self.tier.domain_name,
            "server": self._server.url,
            "place": [bytes_digest(str(self.folder.path).encode("utf-8", "backslashreplace")), self.folder.token()],
            "token": (self._joined.token if self._joined else secrets.token_hex(16)) if ask_root else "",
            "root": ask_root() if ask_root else None,
            "new_root": secrets.token_hex(4) if ask_root else "",
            "options": [self.tier.every_steps, self.tier.copies, self.tier.keep],
            "restores": self.folder.restores() if self.tier.max_restores is not None else {},
            "parts": self.folder.parts().to_text(MAX_PARTS_CHARS),
        }
        return self._server, json.dumps(facts).encode()

    def next_number(self) -> int:
        """Return a number for a save, in the tier or in the root: greater than all known numbers of saves.

        By the clock, unless it is behind the clock of a former job. On client 0.
        """
        self.newest = max(time.time_ns(), self.newest + 1)
        return self.newest

    def close(self, *, has_failed: bool) -> None:
        """End the server, after all copies under way from this client and to this host.

        Args:
            has_failed: Whether the job ends by an error; then this client does not wait for hosts that may be gone.
        """
        deadline = time.monotonic() + min(CLOSE_S, self.tier.timeout_s)
        server = self._server
        while not has_failed and not (
            self.replicator.wait(0) and self.expected.have_come(server.refused if server is not None else ())
        ):
            if time.monotonic() > deadline:
                logger.warning("the local tier is closed while copies are under way, or did not come")
                break
            time.sleep(0.01)
        if self._server is not None:
            self._server.close()
            self._server = None
        self.folder.close()
        self._joined = None


def _validate_same(facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that clients pass the same options, and clients of one host the same path."""
    first = min(facts)
    places: dict[str, tuple[int, list[Any]]] = {}
    for client, fact in facts.items():
        if fact["options"] != facts[first]["options"]:
            raise ConfigError(
                f"client {client} and client {first} pass different options of LocalTier; got every_steps, copies, "
                f"keep {fact['options']} and {facts[first]['options']}"
            )
        other, place = places.setdefault(fact["host"], (client, fact["place"]))
        if place != fact["place"]:
            what = "find another directory at the path" if place[0] == fact["place"][0] else "pass different paths"
            raise ConfigError(
                f"client {client} and client {other} are on host {fact['host']!r}, and {what} of LocalTier; "
                "pass one path on all clients of a host, or name hosts by LocalTier(host=...)"
            )


@contextmanager
def noted(host: str, failures: list[str] | None = None) -> Iterator[None]:
    """Note that a part of a host cannot be read or written, and go on: another host may hold the same part."""
    try:
        yield
    except (DtckptError, OSError, ValueError) as error:
        if failures is not None:
            failures.append(f"host {host}: {error}")
        logger.warning("the local tier of host %s: %s", host, error)
