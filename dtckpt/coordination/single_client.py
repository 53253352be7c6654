"""Coordination of a job with one client: every barrier passes at once, because there is no other client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dtckpt.config import DEFAULT_HEARTBEAT_TIMEOUT_S
from dtckpt.coordination import identity
from dtckpt.coordination.api import (
    BEGIN,
    NO_POSITION,
    YES,
    JobStatus,
    Member,
    Operation,
    Position,
    Progress,
    TaskStatus,
    Verdict,
    Vote,
)
from dtckpt.coordination.verdicts import validate_barrier, voted_no
from dtckpt.errors import ConfigError


class SingleClientCoordination:
    """One client, so a barrier passes at once or raises the caller's own no-vote."""

    def __init__(self, member: Member | None = None) -> None:
        self.member = member or Member(job="local", client=0, num_clients=1, incarnation=identity.incarnation())
        if self.member.num_clients != 1:
            raise ConfigError(f"SingleClientCoordination is for one client; got {self.member}")
        self.heartbeat_timeout_s = DEFAULT_HEARTBEAT_TIMEOUT_S
        self._progress = Progress()
        self._state = "unknown"
        self._num_rounds: Counter[str] = Counter()

    def register(self) -> None:
        self._state = "registered"

    def heartbeat(self, progress: Progress) -> None:
        self._progress = progress

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
        operation: Operation | None = None,
        position: Position = NO_POSITION,  # noqa: ARG002  no client can be late
    ) -> Verdict:
        validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        generation = self._num_rounds[name]
        self._num_rounds[name] += 1
        if not vote.ok:
            voted_no(self.member.client, vote).raise_failure()
        if operation is not None and not operation.id:
            operation = Operation(f"{self.member.incarnation:x}-{name}-{generation}")
        payloads = {self.member.client: vote.payload} if collect else {}
        return Verdict(name, generation, payloads, operation or BEGIN)

    def leave(self) -> None:
        self._state = "left"

    def status(self) -> JobStatus:
        member = self.member
        name = member.full_task_name()
        task = TaskStatus(member.client, self._state, member.incarnation, 0.0, self._progress, name=name)
        return JobStatus(self.member.job, self.member.num_clients, (task,), ())
