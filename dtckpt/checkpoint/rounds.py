"""Collective work in rounds: each client does its part, then all agree at a barrier whether everyone's went well."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dtckpt.checkpoint.phases import BARRIER, Phases
from dtckpt.coordination import Coordination, Progress, Vote
from dtckpt.errors import CoordinationError, DtckptError, MeshError
from dtckpt.format.digest import bytes_digest
from dtckpt.threads import begin

_running = threading.Lock()


def _forget_parent() -> None:
    global _running  # noqa: PLW0603  (the thread that held it does not live in a forked process)
    _running = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)


class Rounds:
    """The rounds of one collective operation, as one client goes through them.

    Args:
        coordination: The way to the other clients.
        operation: First part of the barriers' names.
        timeout_s: Longest wait for the others, per round.
        participants: Clients that take part; default all clients of the job.

    Raises:
        MeshError: A participant is no client of the job.
    """

    def __init__(
        self, coordination: Coordination, operation: str, timeout_s: float, participants: Sequence[int] | None = None
    ) -> None:
        self._coordination = coordination
        self._operation = operation
        self._timeout_s = timeout_s
        self.client = coordination.member.client
        everyone = range(coordination.member.num_clients)
        self.participants = tuple(everyone if participants is None else sorted(participants))
        strangers = sorted(set(self.participants) - set(everyone))
        if strangers or self.client not in self.participants:
            raise MeshError(
                f"{operation} cannot run over clients {list(self.participants)} from client {self.client}; the job "
                f"{coordination.member.job!r} has clients 0 to {len(everyone) - 1}; the mesh must be made of those, "
                "and only its members take part"
            )
        # Groups of clients that share no member may save at the same time; each has barriers of its own.
        is_everyone = self.participants == tuple(everyone)
        self._group = "" if is_everyone else f"#{bytes_digest(repr(self.participants).encode()):016x}"
        self.phases = Phases(operation, self.client, coordination.heartbeat)

    @property
    def is_leader(self) -> bool:
        """Whether this client does what only one may do."""
        return self.client == self.leader

    @property
    def leader(self) -> int:
        """The client that does what only one may do: the lowest participant."""
        return min(self.participants)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads' saves and restores over several clients out, and clear the phase at the end.

        Threads that save at the same time must come in the same order on every client: rounds of one name are one.
        It may be left in another thread than the one that entered it.

        Raises:
            CoordinationError: Another thread's did not end in time.
        """
        if len(self.participants) == 1:
            yield
            return
        if not _running.acquire(timeout=self._timeout_s):
            raise CoordinationError(
                f"{self._operation} cannot begin: another thread's save or restore did not end in {self._timeout_s:g} s"
            )
        held = _running
        try:
            yield
        finally:
            held.release()
            self._coordination.heartbeat(Progress())

    def run(
        self,
        name: str,
        work: Callable[[], bytes | None],
        *,
        phase: str = "",
        meanwhile: Callable[[], object] | None = None,
    ) -> Mapping[int, bytes]:
        """Do this client's part of a round and learn how it went for all.

        Collective: Over the participants, barrier ``<operation>/<name>``. Passes for all or raises the same error
        for all, at once when any client's part fails. With a single participant there is no barrier.

        Args:
            name: Name of the round.
            work: This client's part; what it returns is handed to all participants.
            phase: What the part is measured as; default: the round's name. Waiting is measured as ``barrier``.
            meanwhile: What to do while the others are waited for, if ``work`` went well. The round does not depend on
                it, and what it raises is raised here only.

        Returns:
            What every participant's part returned.
        """
        self.phases.enter(name)
        failure: BaseException | None = None
        payload = b""
        try:
            with self.phases.measure(phase or name):
                payload = work() or b""
        except BaseException as error:
            if len(self.participants) == 1:
                raise
            failure = error
        try:
            if len(self.participants) == 1:
                if meanwhile is not None:
                    meanwhile()
                return {self.client: payload}
            vote = Vote(payload=payload) if failure is None else Vote.of_error(failure)
            met = None
            if meanwhile is not None and failure is None:
                met = begin(lambda: self._meet(name, vote), "dtckpt-round")
                meanwhile()
            with self.phases.measure(BARRIER):
                return self._meet(name, vote) if met is None else met.result()
        except DtckptError as verdict:
            if failure is not None and not isinstance(failure, Exception):
                raise failure from verdict
            raise verdict from failure

    def _meet(self, name: str, vote: Vote) -> Mapping[int, bytes]:
        return self._coordination.barrier(
            f"{self._operation}/{name}{self._group}",
            vote,
            timeout_s=self._timeout_s,
            participants=self.participants,
            collect=True,
        ).payloads
