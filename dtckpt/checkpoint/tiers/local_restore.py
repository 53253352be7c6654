"""`LocalRestore`: the bytes that a restore took from the local tier, by host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalRestore:
    """The bytes that this client took from each host, when a step was restored from the local tier.

    Args:
        age_s: Seconds since the step was saved.
        local_nbytes: Bytes from the memory of this host.
        nbytes_by_host: Bytes from other hosts.
        copies: How many hosts hold the part of the step that the fewest hold.
        passed_over: Copies that were damaged or did not come, and the reason.
        lost_steps: Newer steps of the tier that cannot be put together any more, and the parts that are missing.
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
