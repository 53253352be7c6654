"""Checkpoints on an object store: they appear whole, or not at all, without a rename.

Every attempt to save has a folder of its own below the target, and two objects in the target's register, which lies
beside it. The first, its claim, says that it is there, and that its leader lives. The second, its decision, is made
once, by the first who tries: by its leader, who thereby commits it, or by whoever gives it up. So an attempt that was
given up can never be committed, and what it wrote may be removed, although it may still be running.

Attempts are numbered by time. One that finds a newer one when it begins takes a new number, so whoever goes on was the
newest, and every newer one sees it. One that is about to be committed first gives all older ones up. So attempts are
committed in their order, and the newest one that was committed is the checkpoint.

Until then a newer attempt leaves an older one alone that lives: rivals build side by side. A leader that gives a living
rival up has written everything, and decides for itself in its next step; so of rivals that live one is committed. An
attempt whose leader was silent for long is given up by the next one that begins.

All this needs of a store is that a list shows what was written before, and that of several who make one object only
one succeeds.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dtckpt.comm.background_threads import begin
from dtckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.failures import taken_over, translated
from dtckpt.storage.folder import ObjectFolder
from dtckpt.storage.location import Url

logger = logging.getLogger("dtckpt.storage")

REGISTER = ".dtckpt"
"""The folder of the registers, beside the checkpoints; each has its checkpoint's name."""
COMMITTED, GIVEN_UP = b"committed", b"given up"
RENEW_S = 60.0
"""How often a leader says that it lives."""
SILENT_AFTER_S = 3 * RENEW_S
"""How long after the last sign of life a leader that begins takes an older attempt for dead."""
FORGET_AFTER_S = 7 * 86400.0
"""How long after the last sign of life the decision to give an attempt up is removed: nothing then still runs."""
MAX_LOOKS = 5
"""How often a reader looks anew when what it looks for is being replaced, and a leader when a newer one just began."""

_DECISION = ".decision"
_TOLD_NBYTES = min(len(COMMITTED), len(GIVEN_UP))
"""No more is read of a decision, whatever it is: so many bytes tell which."""
Clock = Callable[[], float]
"""Seconds since the epoch."""


class Register:
    """The attempts at one checkpoint.

    Args:
        where: The checkpoint.
        parent: The folder that it lies in.
        clock: See `Clock`.
    """

    def __init__(self, where: Url, parent: ObjectFolder, clock: Clock = time.time) -> None:
        self.where = where
        self._folder = parent / REGISTER / where.name
        self.data = parent / where.name
        self._clock = clock

    def attempts(self) -> list[str]:
        """Return all attempts that the store knows of, the oldest first."""
        return sorted({name.removesuffix(_DECISION) for name in self._folder.names()})

    def decision(self, attempt: str) -> bytes:
        """Return what was decided about an attempt; nothing if nothing was."""
        try:
            found = self._folder.read(attempt + _DECISION, 0, _TOLD_NBYTES)
        except FileNotFoundError:
            return b""
        return next((known for known in (COMMITTED, GIVEN_UP) if found and known.startswith(found)), found)

    def decide(self, attempt: str, decision: bytes) -> bool:
        """Decide about an attempt; return whether that is what was decided, now or before.

        Raises:
            StorageError: The store neither took the decision nor has another one.
        """
        if self._folder.create(attempt + _DECISION, decision):
            return True
        found = self.decision(attempt)  # an answer may be lost: then it is this very decision
        if not found:
            raise StorageError(f"{self.where}: the store did not take a conditional write; does it know them?")
        return found == decision

    def claim(self, token: str) -> str:
        """Make a new attempt, newer than all others, and return its name."""
        newest = max((_started(attempt) for attempt in self.attempts()), default=0)
        attempt = f"{max(int(self._clock() * 1e9), newest + 1):020d}-{token}"
        self.renew(attempt)
        return attempt

    def renew(self, attempt: str) -> None:
        """Say that an attempt lives."""
        holder = {"renewed_s": self._clock(), "process": os.getpid(), "host": os.uname().nodename}
        self._folder.write(attempt, json.dumps(holder).encode())

    def is_claimed(self, attempt: str) -> bool:
        """Whether an attempt has not been forgotten."""
        return attempt in self._folder.names(attempt)

    def is_silent(self, attempt: str, for_s: float) -> bool:
        """Whether a leader has given no sign of life for so many seconds."""
        return self._clock() - self._last_sign_s(attempt) > for_s

    def _last_sign_s(self, attempt: str) -> float:
        """Return when an attempt was last known to live."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            return float(json.loads(self._folder.read(attempt))["renewed_s"])
        return _started(attempt) / 1e9

    def current(self) -> str | None:
        """Return the attempt that is the checkpoint."""
        return next((name for name in reversed(self.attempts()) if self.decision(name) == COMMITTED), None)

    def remove(self, attempt: str) -> None:
        """Remove an attempt that was committed; in one step as far as readers are concerned."""
        self._folder.write(attempt + _DECISION, GIVEN_UP)
        (self.data / attempt).clear()
        self.forget(attempt)

    def forget(self, attempt: str) -> None:
        """Remove what the register has on an attempt."""
        self._folder.remove([attempt, attempt + _DECISION])

    def give_up_older(self, attempt: str) -> None:
        """Give up all attempts before one, so that none of them is committed any more."""
        for other in self.attempts():
            if other < attempt and not self.decision(other):
                self.decide(other, GIVEN_UP)

    def collect(
        self, *, silent_for_s: float = FORGET_AFTER_S, before: str | None = None, is_replaced: bool = False
    ) -> list[str]:
        """Give up what is dead, and remove what it and all that was replaced has left.

        Args:
            silent_for_s: After how long without a sign of life an attempt about which nothing was decided is dead.
            before: Only what is older than this attempt.
            is_replaced: Whether no attempt among these is the checkpoint any more.

        Returns:
            The attempts that were removed or given up.
        """
        collected = []
        attempts = [attempt for attempt in self.attempts() if before is None or attempt < before]
        decisions = {attempt: self.decision(attempt) for attempt in attempts}
        newest = max((attempt for attempt in attempts if decisions[attempt] == COMMITTED), default="")
        # The oldest goes first: a reader that no longer finds the one after it must not take it for the newest.
        for attempt, decision in decisions.items():
            if not decision and self.is_silent(attempt, silent_for_s) and self.decide(attempt, GIVEN_UP):
                decision = GIVEN_UP  # noqa: PLW2901  (as if it had been read)
                collected.append(attempt)
            if decision == COMMITTED and (is_replaced or attempt != newest):
                self.remove(attempt)
                collected.append(attempt)
            elif decision == GIVEN_UP:
                (self.data / attempt).clear()  # again and again: its clients may have written meanwhile
                if self.is_silent(attempt, FORGET_AFTER_S):
                    self.forget(attempt)
        return collected


def _started(attempt: str) -> int:
    """Return when an attempt began, in nanoseconds since the epoch."""
    number = attempt.partition("-")[0]
    return int(number) if number.isdecimal() else 0


class ObjectPlace:
    """A checkpoint on an object store; see `dtckpt.storage.commit.Place`."""

    def __init__(self, register: Register) -> None:
        self.where = register.where
        self.folder: ObjectFolder = register.data
        self._register = register

    def check_target(self, *, overwrite: bool) -> None:
        """As `Place.check_target`."""
        with translated("look at the target", self.where):
            if self._register.current() is not None:
                if not overwrite:
                    raise _exists(self.where)
            elif self._is_copy():
                raise CheckpointExistsError(
                    f"the checkpoint at {self.where} was copied there, and is left alone; remove it, or save elsewhere"
                )

    def _is_copy(self) -> bool:
        """Whether there is a checkpoint that was not saved here: it has no register, but a manifest."""
        try:
            self._register.data.read(MANIFEST_NAME, 0, 1)
        except FileNotFoundError:
            return False
        return True

    def locate(self) -> ObjectFolder:
        """As `Place.locate`."""
        with translated("open the checkpoint", self.where):
            before: list[str] = []
            for _ in range(MAX_LOOKS):
                attempt = self._register.current()
                if attempt is not None:
                    return self._register.data / attempt
                attempts = self._register.attempts()
                if attempts == before:
                    break  # nothing was replaced while the decisions were read
                before = attempts
            if self._is_copy():
                return self._register.data
            hint = "; a save to it did not complete" if before else ""
            raise CheckpointNotFoundError(f"there is no checkpoint at {self.where}{hint}")

    def begin(self, token: str) -> ObjectAttempt:
        """As `Place.begin`."""
        with translated("begin the checkpoint", self.where):
            for _ in range(MAX_LOOKS):
                mine = self._register.claim(token)
                if all(other <= mine for other in self._register.attempts()):
                    self._register.collect(silent_for_s=SILENT_AFTER_S, before=mine)
                    return ObjectAttempt(self._register, mine)
                self._register.forget(mine)
            raise taken_over(self.where)

    def join(self, token: str) -> ObjectAttempt:
        """As `Place.join`."""
        return ObjectAttempt(self._register, token)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """As `Place.pinned`: there are no locks; a reader from whom it is taken away is told so."""
        yield

    def remove(self) -> None:
        """As `Place.remove`."""
        with translated("remove the checkpoint", self.where):
            for attempt in self._register.attempts():
                if self._register.decision(attempt) == COMMITTED:
                    self._register.remove(attempt)


class ObjectAttempt:
    """An attempt to save to an object store; see `dtckpt.storage.commit.Attempt`."""

    def __init__(self, register: Register, name: str) -> None:
        self.token = name
        self.folder: ObjectFolder = register.data / name
        self._register = register

    @contextmanager
    def alive(self) -> Iterator[None]:
        """As `Attempt.alive`: a thread renews the claim."""
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

    def validate(self, client: int) -> None:
        """As `Attempt.validate`."""
        where = self._register.where
        with translated("look for the attempt", where):
            if not self._register.is_claimed(self.token):
                raise StorageError(
                    f"client {client} does not see the attempt to save {where} that the leader made; every client must "
                    "use one object store"
                )

    def commit(self, *, overwrite: bool, is_durable: bool = True) -> None:  # noqa: ARG002  (always is)
        """As `Attempt.commit`."""
        register = self._register
        with translated("commit the checkpoint", register.where):
            register.give_up_older(self.token)
            if not overwrite and register.current() is not None:
                raise _exists(register.where)
            if not register.is_claimed(self.token) or not register.decide(self.token, COMMITTED):
                raise taken_over(register.where)
        try:
            register.collect(before=self.token, is_replaced=True)
        except Exception as error:  # it is committed, whatever becomes of the old one
            logger.warning("what was at %s before could not all be removed: %s", register.where, error)

    def is_taken_over(self) -> bool:
        """As `Attempt.is_taken_over`."""
        with suppress(StorageError), translated("look for the attempt", self._register.where):
            return self._register.decision(self.token) == GIVEN_UP
        return False

    def abandon(self) -> None:
        """As `Attempt.abandon`."""
        try:
            if self._register.decide(self.token, GIVEN_UP):
                self.folder.clear()
        except Exception as error:  # another one is on its way; the next attempt does it
            logger.warning("what a failed save of %s left could not be removed: %s", self._register.where, error)

    def sweep(self) -> None:
        """As `Attempt.sweep`."""
        try:
            if self._register.decision(self.token) == GIVEN_UP:
                self.folder.clear()
        except Exception as error:
            logger.warning("what a failed save of %s left could not be removed: %s", self._register.where, error)


def _exists(where: Url) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"there is a checkpoint at {where} already; pass overwrite=True to replace it, or save elsewhere"
    )
