"""Fall back from a coordinator that is gone to the store of `torch.distributed`, all clients together.

A client that cannot reach the coordinator must not go to the store alone, and no two clients may decide differently. So
the decision to leave the coordinator is itself a key of the store. The first client that gives up the coordinator
writes this key, at most once per attempt of the job. No client removes the key. Every client looks for the key at
intervals, and when it gives up itself. A client that finds the key leaves the coordinator for good, even if the
coordinator answers::

    client 0   barrier at the coordinator ... no answer for two timeouts: writes "fallback"   barrier at the store
    client 1   barrier at the coordinator ...... finds "fallback" at its next look            barrier at the store

A barrier that is open at that time goes on at the store. If the coordinator has already decided the barrier, the
verdict stays: a client that got it records it at the store, for the clients that did not get it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from dtckpt import errors
from dtckpt.comm.torch_private import HashStore
from dtckpt.coordination import barrier_texts, verdicts
from dtckpt.coordination.api import (
    BEGIN,
    NO_POSITION,
    YES,
    Coordination,
    JobStatus,
    Member,
    Operation,
    Position,
    Progress,
    Verdict,
    Vote,
)
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.identity import calls_of
from dtckpt.coordination.torch_store import TorchStoreCoordination, from_environment
from dtckpt.coordination.verdicts import Decision

logger = logging.getLogger("dtckpt.coordination")

FALLBACKS = ("process_group",)
KEPT_DECISIONS = 16
"""Number of verdicts that a client keeps for others: the latest of each name, because no client is further behind."""
GIVE_UP_TIMEOUTS = 2
"""A client gives up the coordinator after so many heartbeat timeouts without an answer."""
_KEY = "fallback"


class FallbackCoordination:
    """Clients that meet at a coordinator, and at a store once it is gone for good.

    Args:
        primary: The way to the coordinator.
        secondary: The way to the store, of the same member.
    """

    def __init__(self, primary: GrpcCoordination, secondary: TorchStoreCoordination) -> None:
        self.member: Member = primary.member
        self._primary = primary
        self._secondary = secondary
        self._calls = calls_of(primary.member)
        self._reason = ""
        self._lock = threading.Lock()
        self._decisions: OrderedDict[tuple[str, str | None, tuple[int, ...]], Decision] = OrderedDict()
        self._progress = Progress()
        self._watching: threading.Thread | None = None
        self._leaving = threading.Event()
        primary.on_decision = self._note
        primary.give_up_s = GIVE_UP_TIMEOUTS * primary.heartbeat_timeout_s
        # No call waits at the coordinator for longer than an interval, so a barrier there soon learns that the clients
        # have left.
        primary.max_wait_s = min(primary.max_wait_s, self._interval_s)

    @property
    def primary(self) -> GrpcCoordination:
        """The connection to the coordinator, which has the feeds even if barriers use the store."""
        return self._primary

    @property
    def _interval_s(self) -> float:
        return self._primary.heartbeat_timeout_s / 6

    @property
    def _current(self) -> Coordination:
        return self._secondary if self._reason else self._primary

    @property
    def has_fallen_back(self) -> bool:
        """Whether the clients meet at the store."""
        return bool(self._reason)

    @property
    def heartbeat_timeout_s(self) -> float:
        return self._current.heartbeat_timeout_s

    # --- the decision to leave the coordinator ------------------------------------------------------------------

    def _look(self) -> None:
        """Follow the decision, if there is one."""
        # Asked at the store even while the coordinator answers this client: another client may be cut off from it.
        if not self._reason and (reason := self._secondary.recorded(_KEY)):
            self._switch(reason)

    def _give_up(self, error: errors.CoordinatorUnavailableError) -> None:
        """Decide for all clients to leave the coordinator, unless another client was faster."""
        who = barrier_texts.task_name(self.member.job, self.member.client)
        try:
            reason = self._secondary.record_once(_KEY, f"{who} gave it up: {error.message}")
        except errors.CoordinationError as other:
            text = f"{error.message}; and there is nothing to fall back to: {other.message}"
            raise errors.CoordinatorUnavailableError(text) from error
        self._switch(reason)

    def _switch(self, reason: str) -> None:
        """Leave the coordinator.

        Invariant: this client publishes all verdicts that it got before it makes its first call at the store. So a
        client that waits at the store for one of these verdicts gets it before a call of the next operation can join.
        """
        with self._lock:
            if self._reason:
                return
            logger.warning("from now on all clients meet at the store of torch.distributed: %s", reason)
            self._primary.abandon(f"the clients have left the coordinator: {reason}")
            for decision in self._decisions.values():
                self._publish(decision)
            self._reason = reason
        self._secondary.heartbeat(self._progress)
        self._secondary.register()

    def _note(self, decision: Decision) -> None:
        key = decision.name, decision.operation, decision.participants
        with self._lock:
            # Move it to the end: names with the oldest use are dropped first.
            self._decisions.pop(key, None)
            self._decisions[key] = decision
            while len(self._decisions) > KEPT_DECISIONS:
                self._decisions.popitem(last=False)
            # The verdict came while this client switched: `_switch` did not have it yet.
            if self._reason:
                self._publish(decision)

    def _publish(self, decision: Decision) -> None:
        try:
            self._secondary.publish(decision)
        except errors.CoordinationError as error:
            logger.warning("the verdict of barrier %r could not be written down: %s", decision.name, error)

    def _watch(self) -> None:
        is_silent = False
        while not self._reason and not self._leaving.wait(self._interval_s):
            try:
                self._look()
                is_silent = False
            except errors.CoordinationError as error:
                if not is_silent:
                    logger.warning("could not look whether the others have left the coordinator: %s", error)
                is_silent = True

    # --- the Protocol -------------------------------------------------------------------------------------------

    def register(self) -> None:
        if self._reason:
            self._secondary.register()
            return
        # The job may have left the coordinator before this process began.
        if self._watching is None:
            self._look()
        try:
            self._current.register()
        except errors.CoordinatorUnavailableError as error:
            if self._reason:
                raise
            self._give_up(error)
        with self._lock:
            if self._watching is None:
                self._leaving.clear()
                self._watching = threading.Thread(target=self._watch, daemon=True, name="dtckpt-fallback")
                self._watching.start()

    def heartbeat(self, progress: Progress) -> None:
        self._progress = progress
        self._current.heartbeat(progress)

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
        operation: Operation | None = None,
        position: Position = NO_POSITION,
    ) -> Verdict:
        """Wait at a barrier as `Coordination.barrier` does.

        Blocks: For up to ``timeout_s`` once more, if the clients give up the coordinator during the barrier.
        """
        members = verdicts.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        # One call at both places: between the coordinator and the store the client has not given it up.
        call = self._calls.begin(of_operation=operation is not None)
        if operation == BEGIN:
            self._calls.wait_at(name)
        begun = BEGIN
        options: dict[str, Any] = {
            "timeout_s": timeout_s,
            "participants": participants,
            "collect": collect,
            "operation": operation,
            "position": position,
            "call": call,
        }
        try:
            verdict = self._wait_at_either(name, vote, members, options)
            begun = verdict.operation
            return verdict
        finally:
            if operation is not None:
                self._calls.end(call, operation.id or begun.id)

    def _wait_at_either(self, name: str, vote: Vote, members: tuple[int, ...], options: dict[str, Any]) -> Verdict:
        operation: Operation | None = options["operation"]
        moved_from: str | None = None
        if not self._reason:
            try:
                return self._primary.barrier(name, vote, **options)
            except errors.CoordinatorUnavailableError as error:
                if getattr(error, "is_verdict", False):
                    raise  # another client voted so
                if not self._reason:
                    self._give_up(error)
                # The coordinator may have decided this round already. So the store must know the last round whose
                # verdict this client got: if the published round is another, the client joins that.
                latest = self._decisions.get((name, None if operation is None else operation.id, members))
                moved_from = "" if latest is None else latest.round_id
        return self._secondary.barrier(name, vote, **options, moved_from=moved_from)

    def leave(self) -> None:
        with self._lock:
            watching, self._watching = self._watching, None
        self._leaving.set()
        if watching is not None:
            watching.join(self._interval_s)
        self._primary.leave()
        self._secondary.leave()

    def status(self) -> JobStatus:
        return self._current.status()


def with_fallback(primary: GrpcCoordination) -> FallbackCoordination:
    """Return a coordination that falls back to the store of `torch.distributed` when ``primary`` gives up.

    Raises:
        ConfigError: The environment names no store.
        CoordinatorUnavailableError: The store cannot be reached.
    """
    member, timeout_s = primary.member, primary.heartbeat_timeout_s
    if member.num_clients == 1:
        return FallbackCoordination(primary, TorchStoreCoordination(HashStore(), member))
    return FallbackCoordination(primary, from_environment(member, heartbeat_timeout_s=timeout_s))
