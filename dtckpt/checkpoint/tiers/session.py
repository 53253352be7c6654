"""`TierSession`: this client's side of the local tier: the hosts, the parts that they hold, and saves.

A local save has three rounds. In ``local/begin`` every client copies its share into a file of its host's tier, and says
so; training waits for no more than that. In the background the clients meet in ``local/staged`` when all have copied:
digests would take the processor from a neighbour that still copies. Then they take digests, and in ``local/held`` all
learn whether all parts are whole. From then on the save counts, and the parts are copied to other hosts::

    training      | begin: copy |  next steps ...
    background                  | staged | digests | held: all parts are whole | copies to partners |  (written to root)

Before the first save, and in every restore, the clients tell each other in the round ``tiers`` which host they are on
and which parts that host holds.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving import exchange
from dtckpt.checkpoint.saving.description import described
from dtckpt.checkpoint.saving.plan import SavePlan, kept_plan
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.union import passed_by_all
from dtckpt.checkpoint.saving.votes import Agreement, Summary
from dtckpt.checkpoint.tiers.expected_copies import ExpectedCopies
from dtckpt.checkpoint.tiers.holdings import (
    HeldSave,
    PartCopy,
    copies_to_make,
    held_saves,
    hosts_to_ask,
    saves_to_keep,
)
from dtckpt.checkpoint.tiers.host_folder import HostFolder, PartFile
from dtckpt.checkpoint.tiers.local_save import BeginVote, Begun, Prepared, SaveRequest, is_on_host, part_nbytes
from dtckpt.checkpoint.tiers.near_copies import near_copies
from dtckpt.checkpoint.tiers.options import LocalTier
from dtckpt.checkpoint.tiers.part_writer import described_pieces
from dtckpt.checkpoint.tiers.peers import Peer, own_address
from dtckpt.checkpoint.tiers.placement import Placement
from dtckpt.checkpoint.tiers.records import UNKNOWN_ROOT, HostInfo, HostParts, PartIndex, SaveId
from dtckpt.checkpoint.tiers.replicator import Copy, Replicator, log_protection
from dtckpt.checkpoint.tiers.root_identity import IDENTITY_NAME, RootFacts
from dtckpt.checkpoint.tiers.server import PartServer
from dtckpt.checkpoint.tiers.tier_files import Holder, TierCheckpoint, TierFiles
from dtckpt.comm.background_threads import Pool
from dtckpt.coordination.api import Coordination
from dtckpt.errors import CheckpointCorruptError, ConfigError, DtckptError, capped
from dtckpt.format.digest import bytes_digest

logger = logging.getLogger("dtckpt.tiers")

CLOSE_S = 10.0
"""Longest wait at the end for copies under way. A copy that its sender has given up never comes."""
MAX_ASKED = 8
"""Hosts that are asked for indexes at a time."""
MAX_PARTS_CHARS = 3000
"""Bound on the text in which a client lists its host's parts: a vote has room for 4096 bytes."""


class TierSession:
    """The local tier as one client of a job uses it.

    Args:
        tier: The options.
        root: The root of the durable checkpoints.
    """

    def __init__(self, tier: LocalTier, root: str) -> None:
        self.tier = tier
        self.folder = HostFolder(tier, root)
        self.hosts: dict[str, HostInfo] = {}
        self.placement = Placement({}, 1, (), ())
        self.replicator = Replicator(tier.max_rate, tier.link_rate)
        self.held: list[HeldSave] = []
        """What the hosts held when the clients joined last, the newest save first."""
        self.worn_out: frozenset[SaveId] = frozenset()
        """The saves that were restored `LocalTier.max_restores` times, without a newer one being saved."""
        self.has_durable = True
        self.newest_in_root = 0
        """The number of the newest commit in the root when the clients joined last."""
        self.root = UNKNOWN_ROOT
        """The identity of the root; if storage does not say it, that of the newest save."""
        self._server: PartServer | None = None
        self._token = ""
        self._newest = 0
        self._expected = ExpectedCopies(self.folder)
        self._client = 0

    # --- joining ------------------------------------------------------------------------------------------------

    @property
    def has_joined(self) -> bool:
        """Whether the clients know each other's hosts."""
        return bool(self.hosts)

    def join(self, collective: Collective, ask_root: Callable[[], RootFacts], *, is_save: bool) -> None:
        """Tell the others which parts this host holds, and learn which parts theirs hold.

        Collective: Over all clients of the job; round ``tiers`` of the operation.

        Args:
            collective: The operation.
            ask_root: Returns the facts about the root; called on client 0.
            is_save: Whether the clients join to save, and not to restore.

        Raises:
            ConfigError: Clients pass different options, or a host cannot listen at its address.
        """
        self._client = collective.client
        asked = ask_root if collective.is_leader else None
        payloads = collective.run_round("tiers", lambda: self._introduce(asked), phase="plan")
        facts = {client: json.loads(data) for client, data in sorted(payloads.items())}
        self._validate_same(facts)
        hosts: dict[str, list[int]] = {}
        for client, fact in facts.items():
            hosts.setdefault(fact["host"], []).append(client)
        self.hosts = {
            host: HostInfo(host, facts[clients[0]]["domain"], tuple(clients), {c: facts[c]["server"] for c in clients})
            for host, clients in hosts.items()
        }
        self._token, new = facts[min(facts)]["token"], facts[min(facts)]["new_root"]
        root = RootFacts(*facts[min(facts)]["root"])
        self.has_durable, self.newest_in_root = root.has_steps, root.newest
        assert self._server is not None  # noqa: S101  `_introduce` has started it
        self._server.open(self._token)
        placement = Placement.of({host: info.domain for host, info in self.hosts.items()}, self.tier.copies)
        if placement != self.placement and collective.is_leader:
            log_protection(placement, self.tier.copies)
        self.placement = placement
        found = held_saves({host: HostParts.from_text(facts[clients[0]]["parts"]) for host, clients in hosts.items()})
        self._newest = max([self._newest, self.newest_in_root, *(held.save.number for held in found)])
        self.root = root.identity_for([held.save for held in found], new, is_save=is_save)
        self.held = [held for held in found if held.save.belongs_to(self.root)]
        counts = [facts[clients[0]]["restores"] for clients in hosts.values()]
        self.worn_out = frozenset(
            held.save
            for held in self.held
            if self.tier.max_restores is not None
            and max(count.get(held.save.name, 0) for count in counts) >= self.tier.max_restores
        )
        if collective.is_leader:
            self._explain(found, is_root_empty=not (root.has_steps or is_save))

    @property
    def life(self) -> str:
        """Name of the time from joining to closing, which no other one has; the same on all clients."""
        return f"{bytes_digest(self._token.encode()):016x}"

    def _explain(self, found: Sequence[HeldSave], *, is_root_empty: bool) -> None:
        """Log warnings: the root is empty, or the tier has saves of a job whose root was at the same path before."""
        if self.held and is_root_empty:
            logger.warning("the root has no checkpoint; steps of the local tier are restored all the same")
        if not (saves := [held.save for held in found if not held.save.belongs_to(self.root)]):
            return
        logger.warning(
            "the local tier has %d step(s) of another job, up to step %d, whose root was at the same path before; they "
            "are neither restored nor removed: remove %s on all hosts to free their memory, or write %s to the file %s "
            "of the root and restore them",
            len(saves), max(save.step for save in saves), self.folder.path, max(saves).root, IDENTITY_NAME,
        )  # fmt: skip

    def _introduce(self, ask_root: Callable[[], RootFacts] | None) -> bytes:
        """Describe this host, and list its parts; on client 0, also the root."""
        try:
            self.folder.make()
        except DtckptError as error:
            # Other hosts may hold the parts that this one lacks. Its own saves will be refused, with the reason.
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
            "token": (self._token or secrets.token_hex(16)) if ask_root else "",
            "root": ask_root() if ask_root else None,
            "new_root": secrets.token_hex(4) if ask_root else "",
            "options": [self.tier.every_steps, self.tier.copies, self.tier.keep],
            "restores": self.folder.restores() if self.tier.max_restores is not None else {},
            "parts": self.folder.parts().to_text(MAX_PARTS_CHARS),
        }
        return json.dumps(facts).encode()

    def _validate_same(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
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

    @property
    def own_host(self) -> HostInfo:
        """The host of this client."""
        return self.hosts[self.tier.host_name]

    @property
    def _neighbours(self) -> tuple[int, ...]:
        """The clients among which near copies are shared out; all, if there shall be none."""
        hosts = [self.own_host] if self.tier.near_copies else self.hosts.values()
        return tuple(sorted(client for host in hosts for client in host.clients))

    def _peer(self, host: str, client: int | None = None) -> Peer:
        """Return the server of a client on a host; by default of the one in this client's place there."""
        info = self.hosts[host]
        at = self.own_host.clients.index(self._client)
        client = info.clients[at % len(info.clients)] if client is None else client
        return Peer(info.servers[client], host, self._token, self.tier.timeout_s)

    def close(self, *, has_failed: bool) -> None:
        """End the server, when the copies under way are made: those of this client, and those for this host.

        Args:
            has_failed: Whether the job ends by an error; then nobody waits for hosts that may be gone.
        """
        deadline = time.monotonic() + min(CLOSE_S, self.tier.timeout_s)
        server = self._server
        while not has_failed and not (
            self.replicator.wait(0) and self._expected.have_come(server.refused if server is not None else ())
        ):
            if time.monotonic() > deadline:
                logger.warning("the local tier is closed while copies are under way, or did not come")
                break
            time.sleep(0.01)
        if self._server is not None:
            self._server.close()
            self._server = None
        self.folder.close()
        self.hosts, self._token = {}, ""

    # --- saving -------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a step is saved in the tier."""
        return step % self.tier.every_steps == 0

    def save(
        self, request: SaveRequest, coordination: Coordination, then: Callable[[Begun, SaveHandle], object]
    ) -> SaveHandle:
        """Save a step in the tier; return when it is copied there, and all clients agree on it.

        Collective: Over all clients; barriers ``local/begin`` (and ``local/united`` where clients pass different things
        for the first time), ``local/staged`` and ``local/held`` in the background.

        Args:
            request: What is saved, and how.
            coordination: The connection to the other clients.
            then: Called in the background when all clients know whether the save counts.

        Raises:
            StorageError: A tier cannot be written, or is full; nothing was saved.
            DtckptError: As `dtckpt.save_async`.
        """
        start = time.monotonic()
        timeout_s = request.options.timeout_s
        collective = Collective(coordination, "local", timeout_s)
        with ExitStack() as stack:
            stack.enter_context(collective.process_lock())
            begun = self._begin(request, collective)
            locks = stack.pop_all()
        path = self.folder.path / begun.save.name
        handle = SaveHandle(path, collective.phases, timeout_s=timeout_s, blocking_s=time.monotonic() - start)

        def complete() -> SaveReport:
            self._hold(begun, collective)
            return SaveReport(path, begun.plan.nbytes, collective.phases.costs)

        handle.launch(complete, locks, lambda ended: then(begun, ended))
        return handle

    def _begin(self, request: SaveRequest, collective: Collective) -> Begun:
        """Copy this client's share into the tier, and agree with the others. Collective: as `save`."""
        clients, options = collective.participants, request.options
        collective.phases.begin(self.folder.path, is_shown=False)
        files: list[PartFile] = []

        def stage(prepared: Prepared) -> Prepared:
            """Copy the state while the others are waited for; they learn of a failure in their next round."""
            with_copies, count = request.compares_copies and is_on_host(prepared.state), collective.phases.count
            try:
                with collective.phases.measure("stage"):
                    staged = files[-1].staging.stage(
                        prepared.state,
                        prepared.plan,
                        collective.client,
                        with_copies=with_copies,
                        count=count,
                        beside=near_copies(prepared.plan, collective.client, self._neighbours),
                    )
            except Exception as error:
                return replace(prepared, staged=error)
            return replace(prepared, staged=staged)

        def prepare() -> tuple[Prepared, bytes]:
            state = request.collect()
            text, digest = described(state.specs, state.values) if len(clients) > 1 else (b"", 0)
            plan = exchange.latest_union(digest) or kept_plan(passed_by_all(state.specs, clients), options.chunk_nbytes)
            # Here, so that a tier that is full is this client's vote.
            files.append(self.folder.take(part_nbytes(plan, collective.client, self._neighbours)))
            prepared = Prepared(state, plan, digest)
            summary = Summary.of("", "", digest, state.tree, options, unions=exchange.kept_unions())
            assert self._server is not None  # noqa: S101  joined
            # Those of this save alone: the text of a tree has its plain values, so each step has another one.
            self._server.keep_texts({digest: text, summary.tree: state.tree})
            vote = BeginVote(
                self.replicator.protected,
                self.replicator.is_free,
                request.compares_copies and is_on_host(state),
                self._new_save(request, len(clients)) if collective.is_leader else None,
                summary.to_bytes(),
            )
            return prepared, vote.to_bytes()

        try:
            prepared, payloads = collective.run_first_round(
                "begin", prepare, step=request.step, phase="plan", meanwhile=stage
            )
            votes = {client: BeginVote.from_bytes(data) for client, data in payloads.items()}
            agreement = Agreement.of({client: vote.summary for client, vote in votes.items()})
            plan = self._agreed_plan(agreement, prepared, collective, options)
            if plan is not prepared.plan:
                prepared = replace(prepared, plan=plan, staged=None)
                try:
                    self.folder.give_back(files.pop())
                    files.append(self.folder.take(part_nbytes(plan, collective.client, self._neighbours)))
                except DtckptError as error:
                    prepared = replace(prepared, staged=error)
                prepared = stage(prepared) if prepared.staged is None else prepared
        except BaseException:
            for file in files:
                self.folder.give_back(file)
            raise
        save = votes[collective.leader].save
        assert save is not None  # noqa: S101  the leader names it
        self._newest = save.number
        return Begun(
            save=save,
            plan=plan,
            state=prepared.state,
            staged=prepared.staged,
            file=files[-1] if files else None,
            metrics=request.metrics,
            protected={client: vote.protected for client, vote in votes.items()},
            # By all clients or by none: if each left out other saves, none would ever have all of its copies.
            is_agreed=all(vote.is_free for vote in votes.values()),
            has_compared=all(vote.compares for vote in votes.values()),
        )

    def next_number(self) -> int:
        """Return a number for a save, in the tier or in the root: greater than those of all that are known.

        By the clock, unless it is behind that of a former job. On client 0.
        """
        self._newest = max(time.time_ns(), self._newest + 1)
        return self._newest

    def _new_save(self, request: SaveRequest, num_clients: int) -> SaveId:
        return SaveId(
            self.next_number(), request.step, num_clients, request.is_durable(), secrets.token_hex(4), self.root
        )

    def _agreed_plan(
        self, agreement: Agreement, prepared: Prepared, collective: Collective, options: SaveOptions
    ) -> SavePlan:
        """Return the plan of the tensors that all clients pass; they read each other's descriptions if it is new."""
        if agreement.is_same:
            return kept_plan(passed_by_all(prepared.state.specs, collective.participants), options.chunk_nbytes)
        if not agreement.needs_exchange:
            return exchange.take_union(agreement.union)

        def unite() -> tuple[SavePlan, bytes]:
            texts = [
                {
                    clients: self._text(number, clients[0])
                    for number, clients in sorted(groups.items(), key=lambda i: i[1])
                }
                for groups in (agreement.descriptions, agreement.trees)
            ]
            return exchange.plan_union(texts[0], texts[1], options), b""

        united, _ = collective.run_round_with_value("united", unite, phase="plan")
        exchange.keep_union(agreement.union, prepared.digest, united)
        return united

    def _text(self, digest: int, client: int) -> bytes:
        assert self._server is not None  # noqa: S101  joined
        if client == self._client:
            return self._server.texts[digest]
        host = next(info.name for info in self.hosts.values() if client in info.clients)
        return self._peer(host, client).text(digest)

    def _hold(self, begun: Begun, collective: Collective) -> None:
        """Take digests, make the part whole, vote, and begin to copy.

        Collective: Over all clients; barriers ``local/staged`` and ``local/held``.
        """
        save, client = begun.save, collective.client
        file, sent = begun.file, None

        def staged() -> None:
            assert begun.staged_state is not None  # noqa: S101  else it raises

        def put() -> None:
            nonlocal sent
            staged = begun.staged_state
            assert file is not None  # noqa: S101  else the state could not be staged
            near = near_copies(begun.plan, client, self._neighbours)
            tensors, pieces, copies = described_pieces(staged, begun.plan, file, client, near)
            index = PartIndex(save, client, file.nbytes, begun.state.tree, tensors, pieces, begun.metrics, copies)
            self.folder.put(file, index, index.to_bytes(), is_voted=False)
            sent = index.without_copies()

        try:
            # Digests would take the processor, and memory bandwidth, from clients of this machine that still copy.
            collective.run_round("staged", staged, phase="digest")
            collective.run_round("held", put, phase="digest")
        except BaseException:
            if file is not None:
                self.folder.give_back(file)
            raise
        assert file is not None  # noqa: S101  no round passes with a client that could not stage
        assert sent is not None  # noqa: S101  set before the round
        collective.phases.end()
        # The save counts, whatever becomes of this host: the other clients go on, and so does this one.
        with _noted([], self.tier.host_name):
            self.folder.note_voted(save, client)
        self._copy(sent, file, is_agreed=begun.is_agreed)
        with _noted([], self.tier.host_name):
            self._remove_old(save, begun.protected)

    def _copy(self, index: PartIndex, file: PartFile, *, is_agreed: bool) -> None:
        """Begin to send this client's part to the hosts that hold copies of it."""
        save = index.save
        senders = [info for host, info in self.hosts.items() if self.tier.host_name in self.placement.partners(host)]
        self._expected.expect(save, (client for info in senders for client in info.clients))
        unpin = self.folder.pin(save)
        peers = [self._peer(host) for host in self.placement.partners(self.tier.host_name)]
        data = file.view[: index.nbytes]
        protect = functools.partial(self.replicator.protect, save)
        self.replicator.submit(Copy(save, self._client, index.to_bytes(), data, peers, unpin, protect, is_agreed))

    def _remove_old(self, save: SaveId, protected: Mapping[int, Sequence[SaveId]]) -> None:
        voted = [each for each in self.folder.parts().voted if each <= save and each.belongs_to(save.root)]
        by_all = set.intersection(*(set(saves) for saves in protected.values()))
        kept = saves_to_keep(voted, self.tier.keep, max(by_all, default=None))
        self.folder.remove_all_but(kept, with_others=self._client == self.own_host.clients[0])

    # --- restoring ----------------------------------------------------------------------------------------------

    def open(self, held: HeldSave) -> TierCheckpoint:
        """Open a save for reading, wherever its parts are. Local; asks other hosts for the indexes of their parts.

        Raises:
            CheckpointCorruptError: No undamaged index of some part is left.
        """
        here = self.tier.host_name
        indexes: dict[int, PartIndex] = {}
        failures: list[str] = []
        damaged: set[PartCopy] = set()
        self._expected.note_present(held.save, held.holders)
        order = [here, *(host for host in sorted(self.hosts) if host != here)]
        with Pool(MAX_ASKED, "dtckpt-tier-indexes") as pool:
            asked = {
                host: pool.submit(self._peer(host).indexes, held.save)
                for host in hosts_to_ask(held, order)
                if host != here
            }
            for host in order:
                wanted = [client for client, hosts in held.holders.items() if host in hosts and client not in indexes]
                if not wanted:
                    continue
                for client, file in self._index_files(held.save, host, wanted, asked.get(host), failures):
                    with _noted(failures, host):
                        index = PartIndex.from_bytes(file)
                        if index.save != held.save or (client is not None and index.client != client):
                            raise CheckpointCorruptError("an index is that of another part")
                        # Other hosts' near copies are left out: the parts that they copy are in indexes of their own.
                        indexes.setdefault(index.client, index if host == here else index.without_copies())
                if host == here:
                    damaged.update(PartCopy(client, here) for client in wanted if client not in indexes)
        if lost := sorted(held.holders.keys() - indexes.keys()):
            raise CheckpointCorruptError(
                f"step {held.save.step} of the local tier: no index is left of the parts of clients {capped(lost)}: "
                f"{'; '.join(failures)}"
            )
        holders = {client: self._holders(hosts, client) for client, hosts in held.holders.items()}
        files = TierFiles(held.save, indexes, holders, self.folder)
        files.traffic.damaged_copies.update(damaged)
        # With near copies, clients that are where they were find everything on their host.
        is_where_it_was = self.tier.near_copies and all(
            here in held.holders.get(each, ()) for each in self.own_host.clients
        )
        is_remote = not is_where_it_was and any(here not in hosts for hosts in held.holders.values())
        return TierCheckpoint(files, self.folder.path / held.save.name, is_remote=is_remote)

    def _index_files(
        self, save: SaveId, host: str, wanted: Sequence[int], asked: Future[list[bytes]] | None, failures: list[str]
    ) -> Iterator[tuple[int | None, bytes]]:
        if host == self.tier.host_name:
            for client in wanted:
                with _noted(failures, host):
                    yield client, self.folder.index_file(save, client)
            return
        with _noted(failures, host):
            files = self._peer(host).indexes(save) if asked is None else asked.result()
            yield from ((None, file) for file in files)

    def _holders(self, hosts: Sequence[str], client: int) -> list[Holder]:
        here = self.tier.host_name
        others = [host for host in hosts if host != here]
        # Receivers spread over the hosts that hold a part.
        turn = (self._client + client) % max(1, len(others))
        own = [Holder(here, None)] if here in hosts else []
        return own + [Holder(host, self._peer(host)) for host in others[turn:] + others[:turn]]

    def note_restore(self, held: HeldSave) -> None:
        """Count a restore of a save, on the first client of each host, if `LocalTier.max_restores` asks for it."""
        if self.tier.max_restores is not None and self._client == self.own_host.clients[0]:
            with _noted([], self.tier.host_name):
                self.folder.note_restore(held.save)

    def copy_anew(self, held: HeldSave, damaged: Collection[PartCopy]) -> None:
        """Begin to make the copies that a save lacks, of the parts that this client's host is to send.

        Collective: Over all clients of the job, with the same arguments; does not communicate with them.

        Args:
            held: The save.
            damaged: The copies that were found damaged. They are replaced, if there is another one of the part.
        """
        own = self.own_host
        self.replicator.go_back(held.save, self._newest)
        copies = list(copies_to_make(held, self.placement, damaged))
        self._expected.expect(held.save, (client for client, _, receiver in copies if receiver == own.name))
        mine = [
            (client, receiver)
            for number, (client, sender, receiver) in enumerate(copies)
            if sender == own.name and own.clients[number % len(own.clients)] == self._client
        ]
        left = len(mine)

        def acknowledged() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.replicator.protect(held.save)

        if not mine:
            self.replicator.protect(held.save)
        for client, receiver in mine:
            with _noted([], own.name):
                index = PartIndex.from_bytes(self.folder.index_file(held.save, client)).without_copies()
                # The file may be longer than the part: it may have held another one, and near copies lie behind it.
                data = self.folder.open_data(held.save, client)[: index.nbytes]
                if len(data) < index.nbytes:
                    raise CheckpointCorruptError(f"the file of client {client} was cut short")
                unpin = self.folder.pin(held.save)
                peers = [self._peer(receiver)]
                self.replicator.submit(Copy(held.save, client, index.to_bytes(), data, peers, unpin, acknowledged))


@contextmanager
def _noted(failures: list[str], host: str) -> Iterator[None]:
    """Note that a part of a host cannot be read, and go on: another host may hold the same."""
    try:
        yield
    except (DtckptError, OSError, ValueError) as error:
        failures.append(f"host {host}: {error}")
        logger.warning("the local tier of host %s: %s", host, error)
