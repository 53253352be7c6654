"""Restore a step from the local tier: open it on the hosts of its parts, and make missing copies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.mapped_folder import MappedFolder
from dtckpt.checkpoint.parts.part_files import PartCheckpoint, PartFiles, PartHolder
from dtckpt.checkpoint.parts.records import PartCopy, PartIndex, SaveId
from dtckpt.checkpoint.tiers.holdings import HeldSave, copies_to_make, hosts_to_ask
from dtckpt.checkpoint.tiers.replicator import OutgoingPart
from dtckpt.checkpoint.tiers.session import Joined, TierSession, noted
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointCorruptError, capped

KIND = "local tier"
MAX_ASKED = 8
"""Hosts that are asked for indexes at a time."""


@dataclass(frozen=True, slots=True)
class LocalRestore:
    """The bytes that this client took from each host, when a step was restored from the local tier.

    Args:
        age_s: Seconds since the step was saved.
        local_nbytes: Bytes from the memory of this host.
        nbytes_by_host: Bytes from other hosts.
        copies: Smallest number of hosts that hold a part of the step.
        passed_over: Copies that were damaged or did not come, and the reason.
        lost_steps: Newer steps of the tier that lack parts, and the missing parts.
    """

    age_s: float
    local_nbytes: int
    nbytes_by_host: Mapping[str, int]
    copies: int
    passed_over: Sequence[str]
    lost_steps: Mapping[int, str]

    @property
    def received_nbytes(self) -> int:
        """Bytes from other hosts."""
        return sum(self.nbytes_by_host.values())


def open_held(session: TierSession, held: HeldSave) -> PartCheckpoint:
    """Open a save for reading, on the hosts of its parts. Local; asks other hosts for the indexes of their parts.

    Raises:
        CheckpointCorruptError: No undamaged index of some part is left.
    """
    joined, here = session.joined, session.tier.host_name
    session.expected.note_present(held.save, held.holders)
    indexes, failures, damaged = _indexes_of(session, held)
    if lost := sorted(held.holders.keys() - indexes.keys()):
        raise CheckpointCorruptError(
            f"step {held.save.step} of the local tier: no index is left of the parts of clients {capped(lost)}: "
            f"{'; '.join(failures)}"
        )
    holders = {client: _holders(joined, session.folder, hosts, client) for client, hosts in held.holders.items()}
    files = PartFiles(held.save, indexes, holders, kind=KIND, title=f"step {held.save.step} of the local tier")
    files.traffic.damaged_copies.update(damaged)
    # With near copies, clients on their old hosts find all parts there.
    is_where_it_was = session.tier.near_copies and all(
        here in held.holders.get(each, ()) for each in joined.own_host.clients
    )
    is_remote = not is_where_it_was and any(here not in hosts for hosts in held.holders.values())
    return PartCheckpoint(files, session.folder.path / held.save.name, is_remote=is_remote)


def _indexes_of(session: TierSession, held: HeldSave) -> tuple[dict[int, PartIndex], list[str], set[PartCopy]]:
    """Return the indexes of a save's parts, by client; the failures to read some; and this host's damaged copies."""
    joined, here = session.joined, session.tier.host_name
    indexes: dict[int, PartIndex] = {}
    failures: list[str] = []
    damaged: set[PartCopy] = set()
    order = [here, *(host for host in sorted(joined.hosts) if host != here)]
    with Pool(MAX_ASKED, "dtckpt-tier-indexes") as pool:
        asked = {
            host: pool.submit(joined.peer(host).indexes, held.save)
            for host in hosts_to_ask(held, order)
            if host != here
        }
        for host in order:
            wanted = [client for client, hosts in held.holders.items() if host in hosts and client not in indexes]
            if not wanted:
                continue
            for client, file in _index_files(
                session, held.save, host, wanted, asked=asked.get(host), failures=failures
            ):
                with noted(host, failures):
                    index = PartIndex.from_bytes(file)
                    if index.save != held.save or (client is not None and index.client != client):
                        raise CheckpointCorruptError("an index belongs to another part")
                    # Other hosts' near copies are left out: the parts that they copy have separate indexes.
                    indexes.setdefault(index.client, index if host == here else index.without_copies())
            if host == here:
                damaged.update(PartCopy(client, here) for client in wanted if client not in indexes)
    return indexes, failures, damaged


def _index_files(
    session: TierSession,
    save: SaveId,
    host: str,
    wanted: Sequence[int],
    *,
    asked: Future[list[bytes]] | None,
    failures: list[str],
) -> Iterator[tuple[int | None, bytes]]:
    """Yield the files of a host's indexes, each with its client if it is known before the read."""
    if host == session.tier.host_name:
        for client in wanted:
            with noted(host, failures):
                yield client, session.folder.index_file(save, client)
        return
    with noted(host, failures):
        files = session.joined.peer(host).indexes(save) if asked is None else asked.result()
        yield from ((None, file) for file in files)


def _holders(joined: Joined, folder: HostFolder, hosts: Sequence[str], client: int) -> list[PartHolder]:
    here = joined.tier.host_name
    others = [host for host in hosts if host != here]
    # Receivers spread over the hosts that hold a part.
    turn = (joined.client + client) % max(1, len(others))
    own = [PartHolder(here, MappedFolder(folder, here))] if here in hosts else []
    return own + [PartHolder(host, joined.peer(host)) for host in others[turn:] + others[:turn]]


def note_restore(session: TierSession, held: HeldSave) -> None:
    """Count a restore of a save, on the first client of each host, if `LocalTier.max_restores` asks for it."""
    if session.tier.max_restores is not None and session.joined.is_first_on_host:
        with noted(session.tier.host_name):
            session.folder.note_restore(held.save)


def copy_anew(session: TierSession, held: HeldSave, damaged: Collection[PartCopy]) -> None:
    """Begin to make the copies that a save lacks, of the parts that this client's host is to send.

    Collective: Over all clients of the job, with the same arguments; does not communicate with them.

    Args:
        session: The tier.
        held: The save.
        damaged: The damaged copies. Another copy of the part, if there is one, replaces a damaged copy.
    """
    joined, folder, replicator, save = session.joined, session.folder, session.replicator, held.save
    own = joined.own_host
    replicator.go_back(save, session.newest)
    copies = list(copies_to_make(held, joined.copy_hosts, damaged))
    session.expected.expect(save, (client for client, _, receiver in copies if receiver == own.name))
    mine = [
        (client, receiver)
        for number, (client, sender, receiver) in enumerate(copies)
        if sender == own.name and own.clients[number % len(own.clients)] == joined.client
    ]
    missing = set(mine)

    def acknowledged(copy: tuple[int, str]) -> None:
        missing.discard(copy)
        if not missing:
            replicator.protect(save)

    if not mine:
        replicator.protect(save)
    for client, receiver in mine:
        with noted(own.name):
            index = PartIndex.from_bytes(folder.index_file(save, client)).without_copies()
            # The file may be longer than the part: it may have held another part, and near copies follow the part.
            data = folder.open_data(save, client)[: index.nbytes]
            if len(data) < index.nbytes:
                raise CheckpointCorruptError(f"the file of client {client} was cut short")
            unpin, peers = folder.pin(save), [joined.peer(receiver)]
            done = partial(acknowledged, (client, receiver))
            replicator.submit(OutgoingPart(save, client, index, data, peers, unpin, done))
