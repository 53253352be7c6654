"""The status of a job's local tier, as client 0 keeps it in the root for people: ``.dtckpt-tiers.json``.

The file names all hosts and, for each save, the hosts that hold each part. So every reader of the root can find
out which step a restore would return if some hosts were lost, also while these hosts are down.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtckpt.checkpoint.parts.records import HostParts, SaveId
from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts
from dtckpt.checkpoint.tiers.holdings import HeldSave, held_saves
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format import json_facts
from dtckpt.storage.folder import Folder

if TYPE_CHECKING:
    from dtckpt.checkpoint.tiers.local_save import Begun
    from dtckpt.checkpoint.tiers.session import TierSession

STATUS_NAME = ".dtckpt-tiers.json"
MAX_STATUS_NBYTES = 64 << 20
MAX_CLIENTS = 1 << 20
"""Clients of all saves together."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The local tier of a job at one time.

    Args:
        at_s: When, in seconds since the epoch.
        domains: The hosts, and the domain of each.
        clients: By host, its clients.
        copies: Number of hosts that hold each part, once all copies are made.
        saves: The saves, the newest first, each with the hosts that held its parts then.
        nbytes: Bytes of one save, over all parts.
        rate: Measured bytes per second from one host to another; 0: no host has sent any.
    """

    at_s: float
    domains: Mapping[str, str]
    clients: Mapping[str, tuple[int, ...]]
    copies: int
    saves: tuple[HeldSave, ...]
    nbytes: int
    rate: float

    @property
    def copy_hosts(self) -> CopyHosts:
        """The hosts that hold copies of each host's parts."""
        return CopyHosts.of(self.domains, self.copies)

    def to_bytes(self) -> bytes:
        """Return the file."""
        facts = {
            "at_s": self.at_s,
            "hosts": {host: [self.domains[host], list(self.clients[host])] for host in self.domains},
            "copies": self.copies,
            "saves": [
                [held.save.name, {str(c): list(hosts) for c, hosts in held.holders.items()}] for held in self.saves
            ],
            "nbytes": self.nbytes,
            "rate": self.rate,
        }
        return json.dumps(facts).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> TierStatus:
        """Read the file. Raises: CheckpointCorruptError: The file is malformed."""
        try:
            facts = json_facts.parse_object(data)
            saves = tuple(_held_of_json(*json_facts.items(row)) for row in json_facts.items(facts["saves"]))
            hosts = json_facts.fields(facts["hosts"])
            if not hosts or sum(held.save.num_clients for held in saves) > MAX_CLIENTS:
                raise ValueError(f"it names no host, or saves of more than {MAX_CLIENTS} clients")
            rows = {host: json_facts.items(row) for host, row in hosts.items()}
            return cls(
                json_facts.amount(facts["at_s"]),
                {host: json_facts.text(domain) for host, (domain, _) in rows.items()},
                {host: tuple(map(json_facts.whole, json_facts.items(clients))) for host, (_, clients) in rows.items()},
                json_facts.whole(facts["copies"]),
                saves,
                json_facts.whole(facts["nbytes"]),
                json_facts.amount(facts["rate"]),
            )
        except (ValueError, KeyError, TypeError) as error:  # TypeError: a row of another length
            raise CheckpointCorruptError(f"{STATUS_NAME} cannot be read: {error}") from error

    def newest_without(self, lost: frozenset[str]) -> HeldSave | None:
        """Return the newest save of which the other hosts hold all parts."""
        return next((left for held in self.saves if (left := held.without(lost)).is_restorable), None)


def _held_of_json(name: Any, holders: Any) -> HeldSave:
    by_client = {
        int(client): tuple(map(json_facts.text, json_facts.items(hosts)))
        for client, hosts in json_facts.fields(holders).items()
    }
    return HeldSave(SaveId.parse(json_facts.text(name)), by_client, is_voted=True)


def read_status(folder: Folder) -> TierStatus | None:
    """Return the status in a root; None if there is none. Raises: CheckpointCorruptError: The file is malformed."""
    try:
        return TierStatus.from_bytes(folder.read_whole(STATUS_NAME, MAX_STATUS_NBYTES))
    except FileNotFoundError:
        return None


def write_status(folder: Folder, session: TierSession, begun: Begun) -> None:
    """Write the status after a save. On client 0, in the background. Raises: OSError: Storage refused."""
    joined = begun.joined
    voted: dict[str, dict[SaveId, set[int]]] = {host: {} for host in joined.hosts}
    voted_here = session.folder.parts().voted
    saves = {begun.save, *(save for save in voted_here if save <= begun.save and save.belongs_to(session.root))}
    for host, info in joined.hosts.items():
        for client in info.clients:
            protected = begun.protected.get(client, ())
            for save in saves:
                # The other hosts have acknowledged the copies of protected saves.
                holders = (host, *joined.copy_hosts.partners(host)) if save in protected else (host,)
                for holder in holders:
                    voted[holder].setdefault(save, set()).add(client)
    parts = {host: HostParts({s: frozenset(c) for s, c in of_host.items()}, {}) for host, of_host in voted.items()}
    sender = session.replicator
    status = TierStatus(
        at_s=time.time(),
        domains={host: info.domain for host, info in joined.hosts.items()},
        clients={host: info.clients for host, info in joined.hosts.items()},
        copies=joined.copy_hosts.copies,
        saves=tuple(held_saves(parts)),
        nbytes=begun.agreed.plan.nbytes,
        rate=sender.nbytes_sent / sender.seconds if sender.seconds else 0.0,
    )
    folder.make()  # again, if a user has removed it
    folder.replace(STATUS_NAME, status.to_bytes())
