"""Quotas: how much of the coordinator one owner may have, so that enough is left for the other owners.

The owner of a job is the job that its token is for; without tokens, the part of its name before the first ``#``.
Pure: no clock, no I/O.

Half of each resource is reserved, in equal shares for so many owners as are expected. The first owners to ask get the
other half. So an owner that has no more than its share is never refused because of others, whatever they do, unless
there are more owners than were expected.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dtckpt import errors
from dtckpt.coordination.barrier_texts import BESIDE

FEWEST_OWNERS = 16
"""For at least so many owners shares are reserved."""
BURST_S = 3.0
"""An owner that was silent may do the requests of so many seconds at once."""
_SERVE = "dtckpt-coordinator serve"


class LimitError(errors.CoordinationError):
    """A limit of the coordinator is reached."""


class BusyError(errors.CoordinatorUnavailableError):
    """An owner has as many calls under way as it may have; a later call succeeds."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits for one owner at one time.

    Args:
        jobs: Jobs, counting those beside others.
        barriers: Open barriers of all its jobs.
        nbytes: Bytes of all its jobs, as `dtckpt_server.memory` estimates them. The default has room for as many
            clients as a job may have, all of which wait at two barriers.
        streams: Heartbeat streams.
        calls: Calls under way; a client that waits at a barrier is one.
        requests_per_s: Calls and messages on streams in a second.
    """

    jobs: int = 64
    barriers: int = 1000
    nbytes: int = 192 << 20
    streams: int = 30_000
    calls: int = 30_000
    requests_per_s: int = 10_000


DEFAULTS = Quotas()


def owner_by_name(job: str) -> str:
    """Return the owner of a job where no tokens tell the owners apart."""
    return job.partition(BESIDE)[0] or job


class Shares:
    """How much of one resource each owner has.

    Args:
        what: Name of the resource, in the plural.
        quota: How much one owner may have.
        total: How much there is.
        option: The option that sets the quota.
        cure: Advice to an owner that has no room.
        error: Raised then.
    """

    def __init__(
        self,
        what: str,
        quota: int,
        total: int,
        option: str,
        *,
        cure: str,
        error: type[errors.CoordinationError] = LimitError,
    ) -> None:
        self._what, self._quota, self._total = what, quota, total
        self._option, self._cure, self._error = option, cure, error
        self._of: dict[str, int] = {}
        self.taken = self._pooled = 0  # by all; beyond their shares
        self.reserve_for(FEWEST_OWNERS)

    def reserve_for(self, num_owners: int) -> None:
        """Reserve shares for so many owners."""
        self.share = self._total // 2 // max(num_owners, FEWEST_OWNERS)
        self._pooled = sum(map(self._beyond, self._of.values()))

    def _beyond(self, amount: int) -> int:
        """Return how much of an owner's amount comes from the half that is not reserved."""
        return max(0, amount - self.share)

    def of(self, owner: str) -> int:
        """Return how much an owner has."""
        return self._of.get(owner, 0)

    def only(self, owner: str) -> bool:
        """Whether no other owner has any."""
        return len(self._of) == (owner in self._of)

    def note(self, owner: str, change: int) -> None:
        """Count more of an owner, or less."""
        before = self.of(owner)
        after = before + change
        self._pooled += self._beyond(after) - self._beyond(before)
        self.taken += change
        if after:
            self._of[owner] = after
        else:
            self._of.pop(owner, None)

    def room(self, owner: str) -> int:
        """Return how much more an owner may have."""
        has = self.of(owner)
        pool = self._total - self._total // 2 - (self._pooled - self._beyond(has))
        return min(self._quota - has, self._total - self.taken, self.share + max(0, pool) - has)

    def check(self, owner: str, more: int, of_what: str) -> None:
        """Refuse an amount for which an owner has no room.

        Args:
            owner: The owner.
            more: How much it wants.
            of_what: The object that needs it, for the message.

        Raises:
            CoordinationError: There is no room; of the class that was given.
        """
        if self.room(owner) >= more:
            return
        has = self.of(owner)
        if has + more > self._quota:
            why = f"its quota is {self._quota} ({self._option} of {_SERVE})"
        else:
            why = f"more would be taken from the shares of other owners: all have {self.taken} of {self._total}"
        raise self._error(
            f"no room for {of_what} at the coordinator: owner {owner!r} has {has} {self._what}, wants {more} more, and "
            f"{why}; {self._cure}",
            quota=self._what,
        )


class Rates:
    """How many requests each owner makes in a second.

    Args:
        per_s: Requests that an owner may make in a second; after a pause, the requests of `BURST_S` at once.
    """

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._due: OrderedDict[str, float] = OrderedDict()  # when an owner would have done all, one by one

    def wait_s(self, owner: str, now: float) -> float:
        """Return after how many seconds an owner may make its next request; 0.0: it makes it now."""
        due = max(self._due.pop(owner, now), now)
        wait_s = max(0.0, due - now - BURST_S)
        self._due[owner] = due if wait_s else due + self._interval_s
        first, done_at = next(iter(self._due.items()))
        if done_at <= now:  # such an owner counts like a new one
            del self._due[first]
        return wait_s
