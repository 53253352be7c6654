"""Coordination of a single client: nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.coordination import process
from dtckpt.coordination.protocol import (
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    YES,
    JobStatus,
    Member,
    Progress,
    TaskStatus,
    Verdict,
    Vote,
)
from dtckpt.coordination.rules import validate_barrier, voted_no
from dtckpt.errors import ConfigError


class LocalCoordination:
    """One client, so a barrier passes at once or raises the caller's own no-vote."""

    def __init__(self, member: Member | None = None) -> None:
        self.member = member or Member(job="local", client=0, num_clients=1, incarnation=process.incarnation())
        if self.member.num_clients != 1:
            raise ConfigError(f"LocalCoordination is for one client; got {self.member}")
        self.heartbeat_timeout_s = DEFAULT_HEARTBEAT_TIMEOUT_S
        self._progress = Progress()
        self._state = "unknown"

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
    ) -> Verdict:
        validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        members = (self.member.client,)
        generation = process.generation(self.member, name, members)
        process.end_generation(self.member, name, members, generation)
        if not vote.ok:
            voted_no(self.member.client, vote).raise_failure()
        return Verdict(name, generation, {self.member.client: vote.payload} if collect else {})

    def leave(self) -> None:
        self._state = "left"

    def status(self) -> JobStatus:
        member = self.member
        name = member.full_task_name()
        task = TaskStatus(member.client, self._state, member.incarnation, 0.0, self._progress, name=name)
        return JobStatus(self.member.job, self.member.num_clients, (task,), ())
