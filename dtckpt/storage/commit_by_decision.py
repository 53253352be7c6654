"""The commit by decision: a checkpoint on an object store appears whole, or not at all, without a rename.

Every attempt to save has a folder below the target, and two objects in the target's register, a folder beside it::

    run/step_10/<attempt>/...                  the files of one attempt
    run/.dtckpt/step_10/<attempt>              its claim: written and renewed by the leader while it lives
    run/.dtckpt/step_10/<attempt>.decision     `committed` or `given up`: created once, by the first who tries

The leader decides ``committed``; a client that gives the attempt up decides ``given up``. The decision is created if
absent, so an attempt that was given up can never be committed, and its files may be removed although it may still be
running. The checkpoint is the newest attempt whose decision is ``committed``.

Attempts are numbered by time. A leader that finds a newer attempt when it begins takes a new number. So an attempt
that goes on was the newest when it began, and every newer one sees it. A leader that is about to commit first gives
all older attempts up. So attempts are committed in the order of their numbers.

Until then a newer attempt does not touch an older one whose leader is alive: rivals build side by side. A leader that
gives a living rival up has written everything, and decides for itself in its next step; so of several living rivals one
is committed. An attempt whose leader was silent for long is given up by the next leader that begins.

All this needs two guarantees of a store: a list shows all objects that were written before it, and if several clients
create one object, only the first succeeds.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

from typing_extensions import override

from dtckpt.comm.background_threads import begin
from dtckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from dtckpt.format import json_facts
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.format.names import DCP_METADATA_NAME
from dtckpt.storage.commit_target import CommitAttempt, CommitTarget
from dtckpt.storage.failures import taken_over_error, translate_errors
from dtckpt.storage.folder import ObjectFolder
from dtckpt.storage.url import Url

logger = logging.getLogger("dtckpt.storage")

REGISTER_FOLDER = ".dtckpt"
"""The folder of the registers, beside the checkpoints; a register has its checkpoint's name."""
MARKER_NAMES = (DCP_METADATA_NAME,)
"""Files at a target itself by which other programs find a checkpoint there."""
COMMITTED, GIVEN_UP = b"committed", b"given up"
RENEW_S = 60.0
"""Seconds between two renewals of a leader's claim."""
SILENT_AFTER_S = 3 * RENEW_S
"""Seconds without a renewal after which a leader that begins takes an older attempt for dead."""
FORGET_AFTER_S = 7 * 86400.0
"""Seconds without a renewal after which the register forgets an attempt that was given up: nothing of it still runs."""
MAX_TRIES = 5
"""How often a reader tries to find a checkpoint that is being replaced, and a leader to be the newest one."""

MAX_CLAIM_NBYTES = 1 << 12
_DECISION = ".decision"
_DECISION_NBYTES = min(len(COMMITTED), len(GIVEN_UP))
"""Bytes that are read of a decision, however long the object is: they tell which it is."""
Clock = Callable[[], float]
"""Seconds since the epoch."""


class AttemptRegister:
    """The register of one checkpoint: its attempts, with their claims and decisions.

    Args:
        where: The checkpoint's URL.
        parent: The folder that has the checkpoint.
        clock: See `Clock`.

    Attributes:
        data: The folder of the checkpoint; each attempt has a folder in it.
    """

    def __init__(self, where: Url, parent: ObjectFolder, clock: Clock = time.time) -> None:
        self.where = where
        self._folder = parent / REGISTER_FOLDER / where.name
        self.data = parent / where.name
        self._clock = clock
        self._seen: list[str] | None = None

    def attempts(self) -> list[str]:
        """Return the names of all attempts, the oldest first."""
        self._seen = _attempts(self._folder.names())
        return self._seen

    def decision(self, attempt: str) -> bytes:
        """Return the decision about an attempt; empty if there is none yet."""
        try:
            start = self._folder.read(attempt + _DECISION, 0, _DECISION_NBYTES)
        except FileNotFoundError:
            return b""
        # Anything else comes back as it is: the attempt counts as decided, but neither as committed nor as given up.
        return next((decision for decision in (COMMITTED, GIVEN_UP) if start and decision.startswith(start)), start)

    def decide(self, attempt: str, decision: bytes) -> bool:
        """Decide about an attempt; return whether this is the decision, made now or before.

        Raises:
            StorageError: The store did not take the decision, and has no other one.
        """
        if self._folder.create(attempt + _DECISION, decision):
            return True
        stored = self.decision(attempt)  # maybe this very one: the store's first answer may have been lost
        if not stored:
            raise StorageError(f"{self.where}: the store did not take a conditional write; does it know them?")
        return stored == decision

    def claim(self, token: str) -> str:
        """Claim a new attempt, newer than all others; return its name."""
        # More than the newest number: a host whose clock is behind would otherwise claim an attempt that is old at
        # once. An old list will do: an attempt that claims looks again afterwards.
        seen = self.attempts() if self._seen is None else self._seen
        newest = max((start_ns(attempt) for attempt in seen), default=0)
        attempt = f"{max(int(self._clock() * 1e9), newest + 1):020d}-{token}"
        self.renew(attempt)
        return attempt

    def renew(self, attempt: str) -> None:
        """Renew the claim of an attempt: its leader lives."""
        holder = {"renewed_s": self._clock(), "process": os.getpid(), "host": os.uname().nodename}
        self._folder.write(attempt, json.dumps(holder).encode())

    def is_claimed(self, attempt: str) -> bool:
        """Whether the register holds the claim of an attempt; `forget` removes it."""
        return attempt in self._folder.names(attempt)

    def is_silent(self, attempt: str, for_s: float) -> bool:
        """Whether the leader of an attempt has not renewed its claim for so many seconds."""
        return self._clock() - self._last_renewal_s(attempt) > for_s

    def _last_renewal_s(self, attempt: str) -> float:
        """Return when the claim of an attempt was last renewed, or else when the attempt began."""
        with suppress(FileNotFoundError, ValueError):
            claim = json_facts.parse_object(self._folder.read_whole(attempt, MAX_CLAIM_NBYTES))
            return json_facts.amount(claim.get("renewed_s"))
        return start_ns(attempt) / 1e9

    def newest_committed(self) -> str | None:
        """Return the attempt that is the checkpoint; None if there is none."""
        return next((name for name in reversed(self.attempts()) if self.decision(name) == COMMITTED), None)

    def remove(self, attempt: str) -> None:
        """Remove an attempt that was committed; for readers it is gone in one step, with its decision."""
        # First the decision, then the data, then the entries: a removal that stops halfway leaves an attempt that was
        # given up, and the next `collect` removes the rest.
        self._folder.write(attempt + _DECISION, GIVEN_UP)
        (self.data / attempt).clear()
        self.forget(attempt)

    def forget(self, attempt: str) -> None:
        """Remove the claim and the decision of an attempt."""
        self._folder.remove([attempt, attempt + _DECISION])

    def give_up_older(self, attempt: str) -> Others:
        """Give up all earlier attempts, so that they can no longer be committed.

        Returns:
            The content of the register, from one list. The list may lack a newer attempt, which gives this attempt up
            before its own decision.
        """
        entries = self._folder.names()
        decisions = {other: self.decision(other) for other in _attempts(entries) if other != attempt}
        for other, decision in decisions.items():
            if other < attempt and not decision:
                decisions[other] = GIVEN_UP if self.decide(other, GIVEN_UP) else self.decision(other)
        return Others(decisions, is_claimed=attempt in entries)

    def collect(
        self,
        *,
        silent_for_s: float = FORGET_AFTER_S,
        before: str | None = None,
        is_replaced: bool = False,
        attempts: Iterable[str] | None = None,
    ) -> list[str]:
        """Give dead attempts up, and remove the files of attempts that were given up or replaced.

        Args:
            silent_for_s: Seconds without a renewal after which an attempt without a decision is dead.
            before: Only attempts older than this one are looked at.
            is_replaced: Whether a newer checkpoint has replaced all of these; else the newest committed one is kept.
            attempts: The attempts, in order, if the caller has listed them already.

        Returns:
            The attempts that were removed or given up.
        """
        collected = []
        found = self.attempts() if attempts is None else attempts
        attempts = [attempt for attempt in found if before is None or attempt < before]
        decisions = {attempt: self.decision(attempt) for attempt in attempts}
        newest = max((attempt for attempt in attempts if decisions[attempt] == COMMITTED), default="")
        # The oldest goes first: else a reader that no longer finds its successor would take it for the newest.
        for attempt, decision in decisions.items():
            if not decision and self.is_silent(attempt, silent_for_s) and self.decide(attempt, GIVEN_UP):
                decision = GIVEN_UP  # noqa: PLW2901  (as if it had been read so)
                collected.append(attempt)
            if decision == COMMITTED and (is_replaced or attempt != newest):
                self.remove(attempt)
                collected.append(attempt)
            elif decision == GIVEN_UP:
                (self.data / attempt).clear()  # every time: its clients may have written since
                if self.is_silent(attempt, FORGET_AFTER_S):
                    self.forget(attempt)
        return collected


@dataclass(frozen=True, slots=True)
class Others:
    """What an attempt finds in the register before it is committed.

    Args:
        decisions: The decision about each other attempt, the oldest first.
        is_claimed: Whether the register holds the claim of the attempt itself; `AttemptRegister.forget` removes it.
    """

    decisions: Mapping[str, bytes]
    is_claimed: bool


def _attempts(entries: Iterable[str]) -> list[str]:
    return sorted({name.removesuffix(_DECISION) for name in entries})


def start_ns(attempt: str) -> int:
    """Return when an attempt began, in nanoseconds since the epoch: the first part of its name."""
    number = attempt.partition("-")[0]
    return int(number) if number.isdecimal() else 0


class ObjectStoreTarget(CommitTarget):
    """The commit target of a URL."""

    def __init__(self, register: AttemptRegister) -> None:
        self.where = register.where
        self.folder: ObjectFolder = register.data
        self._register = register

    @override
    def check_target(self, *, overwrite: bool) -> None:
        with translate_errors("look at the target", self.where):
            copy = begin(self._is_copy, "dtckpt-look")  # meanwhile: each look takes a round trip to the store
            try:
                newest = self._register.newest_committed()
            finally:
                copy.exception()
            if newest is not None:
                if not overwrite:
                    raise _exists_error(self.where)
            elif copy.result():
                raise CheckpointExistsError(
                    f"the checkpoint at {self.where} was copied there, and is left alone; remove it, or save elsewhere"
                )

    def _is_copy(self) -> bool:
        """Whether a checkpoint was copied to the target itself: its manifest is then in no attempt's folder."""
        try:
            self._register.data.read(MANIFEST_NAME, 0, 1)
        except FileNotFoundError:
            return False
        return True

    @override
    def locate(self) -> ObjectFolder:
        with translate_errors("open the checkpoint", self.where):
            before: list[str] = []
            for _ in range(MAX_TRIES):
                attempt = self._register.newest_committed()
                if attempt is not None:
                    return self._register.data / attempt
                attempts = self._register.attempts()
                if attempts == before:
                    break  # no attempt came or went while the decisions were read
                before = attempts
            if self._is_copy():
                return self._register.data
            hint = "; a save to it did not complete" if before else ""
            raise CheckpointNotFoundError(f"there is no checkpoint at {self.where}{hint}")

    @override
    def begin(self, token: str) -> ObjectStoreAttempt:
        with translate_errors("begin the checkpoint", self.where):
            for _ in range(MAX_TRIES):
                # Claim first, look then: of two leaders that begin at once, the last to write sees the other's
                # claim. So the older one of them goes on only if the newer one sees it, and gives it up before it
                # commits:
                #     older:  claim 7 . look: {7}     . goes on
                #     newer:            claim 8 . look: {7, 8} . goes on
                attempt = self._register.claim(token)
                attempts = self._register.attempts()
                if all(other <= attempt for other in attempts):
                    self._register.collect(silent_for_s=SILENT_AFTER_S, before=attempt, attempts=attempts)
                    return ObjectStoreAttempt(self._register, attempt, is_seen=attempt in attempts)
                self._register.forget(attempt)
            raise taken_over_error(self.where)

    @override
    @contextmanager
    def resume(self, token: str) -> Iterator[ObjectStoreAttempt]:
        # Several processes may go on with one attempt: they write the same objects, and the commit counts once.
        attempt = self._left_attempt(token) or self.begin(token)
        with attempt.keep_alive():
            yield attempt

    def _left_attempt(self, token: str) -> ObjectStoreAttempt | None:
        """Return the newest attempt if it has this token and is neither committed nor given up."""
        with translate_errors("look for an earlier attempt", self.where):
            newest = max(self._register.attempts(), default="")
            # Not an older one: a newer one has given it up, or will.
            if newest.partition("-")[2] != token or self._register.decision(newest):
                return None
            self._register.renew(newest)
            return ObjectStoreAttempt(self._register, newest, is_seen=True)

    @override
    def join(self, token: str) -> ObjectStoreAttempt:
        return ObjectStoreAttempt(self._register, token)

    @override
    @contextmanager
    def pin(self) -> Iterator[None]:
        """As `CommitTarget.pin`: there are no locks; a reader whose checkpoint is removed gets an error."""
        yield

    @override
    def remove(self) -> None:
        with translate_errors("remove the checkpoint", self.where):
            self._register.data.remove(MARKER_NAMES)  # first: markers lead only to a committed checkpoint
            for attempt in self._register.attempts():
                if self._register.decision(attempt) == COMMITTED:
                    self._register.remove(attempt)


class ObjectStoreAttempt(CommitAttempt):
    """An attempt to save to an object store.

    Args:
        register: The register.
        name: The attempt.
        is_seen: Whether this client has found the attempt's claim already.
    """

    def __init__(self, register: AttemptRegister, name: str, *, is_seen: bool = False) -> None:
        self.token = name
        self.folder: ObjectFolder = register.data / name
        self._register = register
        self._is_seen = is_seen

    @override
    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """As `CommitAttempt.keep_alive`: a thread renews the claim."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(RENEW_S):
                try:
                    self._register.renew(self.token)
                except Exception as error:
                    logger.warning("cannot say that the save of %s goes on: %s", self._register.where, error)

        renewing = begin(renew, "dtckpt-claim")
        try:
            yield
        finally:
            ended.set()
            renewing.result()

    @override
    def validate(self, client: int) -> None:
        where = self._register.where
        with translate_errors("look for the attempt", where):
            self._is_seen = self._is_seen or self._register.is_claimed(self.token)
            if not self._is_seen:
                raise StorageError(
                    f"client {client} does not see the attempt to save {where} that the leader made; every client must "
                    "use one object store"
                )

    @override
    def commit(
        self,
        *,
        overwrite: bool,
        is_durable: bool = True,  # without effect: writes are durable
        markers: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        register = self._register
        with translate_errors("commit the checkpoint", register.where):
            # Before its own decision: an older attempt that decided after it would report a commit that no reader looks
            # at.
            others = register.give_up_older(self.token)
            if not overwrite and COMMITTED in others.decisions.values():
                raise _exists_error(register.where)
            # A forgotten attempt has lost the decision that would refuse it, but its claim is gone, too.
            if not others.is_claimed or not register.decide(self.token, COMMITTED):
                raise taken_over_error(register.where)
        try:
            for name, data in markers.items():
                register.data.write(name, data)
        except Exception as error:  # this attempt is committed, whether it can be marked or not
            logger.warning("cannot mark the checkpoint at %s by %s: %s", register.where, ", ".join(markers), error)
        try:
            register.collect(before=self.token, is_replaced=True, attempts=others.decisions)
        except Exception as error:  # this attempt is committed, whether the old ones can be removed or not
            logger.warning("the old checkpoint at %s could not be removed whole: %s", register.where, error)

    @override
    def is_taken_over(self) -> bool:
        with suppress(StorageError), translate_errors("look for the attempt", self._register.where):
            return self._register.decision(self.token) == GIVEN_UP
        return False

    @override
    def abandon(self) -> None:
        try:
            # False if the attempt is committed after all: the answer to that write was lost, and the files are the
            # checkpoint.
            if self._register.decide(self.token, GIVEN_UP):
                self.folder.clear()
        except Exception as error:  # the caller has an error to report already; the next attempt removes it
            logger.warning("what a failed save of %s left could not be removed: %s", self._register.where, error)

    @override
    def sweep(self) -> None:
        try:
            # A sweep only looks at the decision: as long as there is none, the leader may still commit these files.
            if self._register.decision(self.token) == GIVEN_UP:
                self.folder.clear()
        except Exception as error:
            logger.warning("what a failed save of %s left could not be removed: %s", self._register.where, error)


def _exists_error(where: Url) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"there is a checkpoint at {where} already; pass SaveOptions(overwrite=True) to replace it, or save elsewhere"
    )
