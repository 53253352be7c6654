"""Choose the hosts that hold copies, and compute how likely a step is lost; pure.

A group has as many hosts as there are copies, and each host holds the parts of its whole group. Hosts are sorted by
domain and dealt into rows, and a column is a group. So hosts of one domain, such as a rack, never form a group, unless
the domain has more hosts than a row. If the number of copies does not divide the number of hosts, the last hosts form a
ring, in which each host holds the parts of the hosts before it::

    hosts 0 1 2 3 4 5, two copies            hosts 0 1 2 3 4, two copies
        row      0 1 2                           row      0 1 2
        row      3 4 5                           row      3 4
        groups   {0, 3} {1, 4} {2, 5}            group    {0, 3}      ring 1 -> 4 -> 2 -> 1

Groups lose a step half as often as one ring of all hosts does with two copies, because fewer sets of hosts are fatal.

Source: Wang et al., GEMINI (SOSP 2023), section 4, for groups and the mixed placement; Cidon et al., Copysets (ATC
2013), for why few sets are better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce

Polynomial = list[int]
"""Coefficients of the powers of x, from 0 on. Here: in how many ways so many hosts of a group can fail harmlessly."""


@dataclass(frozen=True, slots=True)
class CopyHosts:
    """The hosts that hold copies of each host's parts.

    Args:
        domains: The hosts, and the domain of each.
        copies: How many hosts hold each part, the host that saved it among them.
        groups: Groups of that many hosts.
        ring: The hosts that form the ring; empty if there is none.
    """

    domains: Mapping[str, str]
    copies: int
    groups: tuple[tuple[str, ...], ...]
    ring: tuple[str, ...]

    @classmethod
    def of(cls, domains: Mapping[str, str], copies: int) -> CopyHosts:
        """Place copies on hosts.

        Args:
            domains: The hosts, and the domain of each.
            copies: Number of hosts that hold each part. With fewer hosts, all hosts hold it.
        """
        sizes = Counter(domains.values())
        hosts = sorted(domains, key=lambda host: (-sizes[domains[host]], domains[host], host))
        copies = max(1, min(copies, len(hosts)))
        width = -(-len(hosts) // copies)
        rows = [hosts[start : start + width] for start in range(0, len(hosts), width)]
        by_column = [row[column] for column in range(width) for row in rows if column < len(row)]
        rest = len(hosts) % copies
        num_grouped = len(hosts) - (copies + rest if rest else 0)
        groups = tuple(tuple(by_column[start : start + copies]) for start in range(0, num_grouped, copies))
        return cls(domains, copies, groups, tuple(by_column[num_grouped:]))

    def partners(self, host: str) -> tuple[str, ...]:
        """Return the other hosts that hold copies of a host's parts, the nearest first."""
        for group in self.groups:
            if host in group:
                at = group.index(host)
                return (*group[at + 1 :], *group[:at])
        at = self.ring.index(host)
        return tuple(self.ring[(at + step) % len(self.ring)] for step in range(1, self.copies))

    @property
    def in_one_domain(self) -> list[str]:
        """The hosts whose parts and copies are all lost with one domain; none if there is only one domain."""
        if len(set(self.domains.values())) == 1:
            return []
        return sorted(
            host
            for host in self.domains
            if len({self.domains[each] for each in (host, *self.partners(host))}) == 1 < self.copies
        )

    def survives(self, lost: Collection[str]) -> bool:
        """Tell whether each part is still on some host after hosts are lost, if all copies had been made."""
        return not any({host, *self.partners(host)} <= set(lost) for host in self.domains)

    def loss_probability(self, num_lost: int) -> float:
        """Return how likely a step is lost if so many hosts fail at once, each set of them equally likely."""
        if not 0 < num_lost <= len(self.domains):
            return 0.0
        group: Polynomial = [math.comb(self.copies, lost) for lost in range(self.copies)]  # not all of them
        harmless = reduce(_product, [group] * len(self.groups), [1])
        if self.ring:
            harmless = _product(harmless, _harmless_in_ring(len(self.ring), self.copies))
        ways = harmless[num_lost] if num_lost < len(harmless) else 0
        return 1 - ways / math.comb(len(self.domains), num_lost)


def _harmless_in_ring(size: int, run: int) -> Polynomial:
    """Return the number of ways in which so many hosts of a ring fail without ``run`` neighbours among them."""
    ways: Polynomial = []
    for lost in range(size):
        # After each living host come 0 to run - 1 failed hosts.
        runs = reduce(_product, [[1] * run] * (size - lost), [1])
        ways.append(size * (runs[lost] if lost < len(runs) else 0) // (size - lost))
    return ways


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    product = [0] * (len(one) + len(other) - 1)
    for power, factor in enumerate(one):
        for other_power, other_factor in enumerate(other):
            product[power + other_power] += factor * other_factor
    return product
