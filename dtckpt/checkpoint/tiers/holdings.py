"""Decide which local saves can be restored from the parts that hosts hold, and which parts lack copies; pure.

A save *counts* if some host knows that all clients voted it complete; a save is *whole* if each of its parts is on some
host. The decision does not depend on the clients' numbers or hosts: parts name their save, and their indexes name boxes
of tensors. So hosts may come back in another order, fewer or more::

    host a   save 7: parts 0 1        save 6: parts 0 1
    host b   (new and empty)
    host c   save 7: parts 2 3 0 1    save 6: parts 2 3 0 1       7 is whole, with part 0 on a and c, part 2 on c alone
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dtckpt.checkpoint.parts.records import HostParts, PartCopy, SaveId
from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts


@dataclass(frozen=True, slots=True)
class HeldSave:
    """A local save, and the hosts that hold its parts.

    Args:
        save: The save.
        holders: By client whose part it is, the hosts that hold the part, ascending.
        is_voted: Whether some host knows that all clients voted it complete.
    """

    save: SaveId
    holders: Mapping[int, tuple[str, ...]]
    is_voted: bool

    @property
    def missing(self) -> tuple[int, ...]:
        """The clients whose parts no host holds."""
        return tuple(client for client in range(self.save.num_clients) if client not in self.holders)

    @property
    def is_restorable(self) -> bool:
        """Whether the save counts and is whole."""
        return self.is_voted and not self.missing

    @property
    def num_copies(self) -> int:
        """Smallest number of hosts that hold a part."""
        return min((len(self.holders.get(client, ())) for client in range(self.save.num_clients)), default=0)

    def without(self, lost: Collection[str]) -> HeldSave:
        """Return the save as the remaining hosts hold it after some are lost."""
        left = {client: tuple(host for host in hosts if host not in lost) for client, hosts in self.holders.items()}
        return HeldSave(self.save, {client: hosts for client, hosts in left.items() if hosts}, self.is_voted)


def held_saves(parts: Mapping[str, HostParts]) -> list[HeldSave]:
    """Return the saves of which any host holds a part, the newest first.

    Args:
        parts: The parts that each host holds.
    """
    holders: dict[SaveId, dict[int, list[str]]] = {}
    voted: set[SaveId] = set()
    for host in sorted(parts):
        for held, is_voted in ((parts[host].voted, True), (parts[host].written, False)):
            for save, clients in held.items():
                of_save = holders.setdefault(save, {})
                if is_voted and clients:
                    voted.add(save)
                for client in clients:
                    if client < save.num_clients and host not in of_save.setdefault(client, []):
                        of_save[client].append(host)
    return [
        HeldSave(save, {client: tuple(hosts) for client, hosts in holders[save].items() if hosts}, save in voted)
        for save in sorted(holders, reverse=True)
    ]


def hosts_to_ask(held: HeldSave, order: Sequence[str]) -> list[str]:
    """Return hosts that together hold all parts of a save, in an order, without hosts that add no part."""
    left, asked = set(held.holders), []
    for host in order:
        found = {client for client in left if host in held.holders[client]}
        if found:
            left -= found
            asked.append(host)
    return asked


def copies_to_make(
    held: HeldSave, copy_hosts: CopyHosts, damaged: Collection[PartCopy] = ()
) -> Iterator[tuple[int, str, str]]:
    """Yield the missing copies of a save: the client of the part, the sending host and the receiving host.

    Damaged copies come first, if there is another copy of the part.

    The saver of a part may be gone, or have another number now. Then the first host that holds the part takes the
    saver's place, and the partners of that host get the part.
    """
    for client, hosts in sorted(held.holders.items()):
        here = [host for host in hosts if host in copy_hosts.domains]
        present = [host for host in here if (client, host) not in damaged]
        if not present:
            continue
        candidates = [*here, *copy_hosts.partners(present[0]), *sorted(copy_hosts.domains)]
        for host in dict.fromkeys(candidates):
            if len(present) >= copy_hosts.copies:
                break
            if host not in present:
                yield client, present[0], host
                present.append(host)


def saves_to_keep(saves: Collection[SaveId], keep: int, protected: SaveId | None) -> frozenset[SaveId]:
    """Return the saves that a host keeps: the newest, and the newest that has all copies with everything since."""
    newest = sorted(saves, reverse=True)
    return frozenset(newest[:keep]) | frozenset(save for save in newest if protected is not None and save == protected)
