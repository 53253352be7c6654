"""`SaveHandle`: the save that goes on in the background of this process; at most one at a time.

More would bring nothing: the saves of a job run one after the other anyway, and share one block of staging memory.

A failure that the caller has not seen is not lost. The next save raises it inside its first round, so that all clients
raise it together, also clients whose callers have seen it. When the process exits, the failure is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.timing import Phases
from dtckpt.comm import fork_guard
from dtckpt.comm.background_threads import keep_reserve
from dtckpt.errors import CoordinationError, SaveTimeoutError
from dtckpt.format.manifest import PhaseCost
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """The progress of a save on this client.

    Args:
        phase: The round that it is in: ``begin``, ``edges``, ``written``, ``merged``; then ``done`` or ``failed``.
        nbytes_done: Bytes that were handed to storage.
        nbytes_total: Bytes that this client writes.
    """

    phase: str
    nbytes_done: int
    nbytes_total: int


@dataclass(frozen=True, slots=True)
class SaveStats:
    """The cost of a save on this client so far.

    Args:
        phases: Cost of each phase so far; as in `SaveReport`, and ``stage``: the copy to the staging memory.
        blocking_s: Seconds until the call returned.
    """

    phases: Mapping[str, PhaseCost]
    blocking_s: float


class SaveHandle:
    """A save that goes on in the background.

    Args:
        path: The checkpoint.
        phases: The measured phases of the save.
        timeout_s: Longest wait for the others, in seconds, per round.
        blocking_s: Seconds until the call returned.
    """

    def __init__(self, path: Location, phases: Phases, *, timeout_s: float, blocking_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._phases = phases
        self.blocking_s = blocking_s
        self._ended = threading.Event()
        self._report: SaveReport | None = None
        self._failure: BaseException | None = None
        self._has_unseen_failure = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, {self.progress.phase})"

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Return the save's report when it is committed.

        Blocks: On the save, at most ``timeout_s`` seconds; by default until it ends, which its own
        timeouts ensure.

        Raises:
            SaveTimeoutError: The save takes longer; it goes on.
            DtckptError: The error of the save, the same on all clients; see `dtckpt.save`.
            ForkedProcessError: This process was forked while the save was in flight; it goes on in the parent.
        """
        fork_guard.validate_process()
        if not self._ended.wait(timeout_s):
            # The timeout is the caller's patience only; it ends nothing, and `result` may be called again.
            progress = self.progress
            raise SaveTimeoutError(
                f"the save of {self.path} did not end in {timeout_s:g} s and goes on: phase {progress.phase!r}, "
                f"{progress.nbytes_done} of {progress.nbytes_total} bytes written; ask again later"
            )
        self._has_unseen_failure = False
        if self._failure is not None:
            raise self._failure
        assert self._report is not None  # noqa: S101  (an ended save has one or the other)
        return self._report

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether the save, or the call that follows it (see `launch`), goes on."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_committed(self) -> bool:
        """Whether the save has ended well."""
        return self._report is not None

    def raise_unseen_failure(self) -> None:
        """Raise the save's error, if it failed and the caller has not seen the error yet."""
        if self._has_unseen_failure:
            self.result()

    @property
    def failure(self) -> BaseException | None:
        """The error of the save, if it failed. To look at it here does not count: it is still raised later."""
        return self._failure

    def forgive(self) -> None:
        """Mark the save's error as seen: `raise_unseen_failure` does not raise it any more."""
        self._has_unseen_failure = False

    @property
    def progress(self) -> SaveProgress:
        """The progress of the save."""
        phase = self._phases.round if not self.done() else "failed" if self._failure else "done"
        return SaveProgress(phase, *self._phases.progress)

    @property
    def stats(self) -> SaveStats:
        """The cost of the save so far."""
        return SaveStats(self._phases.costs, self.blocking_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save and for the call that follows it (see `launch`); return whether the save has ended.

        Raises:
            ForkedProcessError: As `result`. The save's own error is not raised.
        """
        fork_guard.validate_process()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.done()

    def _run(self, work: Callable[[], SaveReport]) -> None:
        """Do the save's work in this thread, and keep its report or its error."""
        try:
            self._report = work()
        except BaseException as error:
            # The traceback begins in this thread and does not show the call that began the save.
            error.add_note(f"This is what the save of {self.path} failed with, in the background.")
            self._failure, self._has_unseen_failure = error, True
        # Last: a thread that sees the end of the save must see its report or its error, too.
        self._ended.set()

    def launch(self, work: Callable[[], SaveReport], locks: ExitStack, then: Callable[[SaveHandle], object]) -> None:
        """Do the save's work in a new thread, then release the locks, then call ``then``.

        Args:
            work: Writes and commits.
            locks: Released when the outcome is known here: the thread that saves next must see a failure.
            then: Called with this handle, whether the save went well or not.
        """
        global _latest  # noqa: PLW0603  (one save at a time in a process)

        def run() -> None:
            nonlocal work
            with locks:
                self._run(work)
                del work  # and with it the staged state, before the next save may stage its own
            try:
                # Without the locks: other saves need not wait for later work, such as the removal of old checkpoints.
                then(self)
            finally:
                _under_way.discard(self)

        keep_reserve()
        self._thread = threading.Thread(target=run, daemon=True, name="dtckpt-save")
        # Before the thread starts: if the process ends at once, `_wait_at_exit` must find this save.
        before, _latest = _latest, self
        _under_way.add(self)
        try:
            self._thread.start()
        except BaseException:
            _latest = before
            _under_way.discard(self)
            locks.close()
            raise


# Not an RLock: the thread that releases it is not the thread that took it.
_turn = threading.Lock()
"""Held while a save is in flight, from its call to its end in the background."""
_latest: SaveHandle | None = None
"""The save that was launched last, in flight or ended."""
_under_way: set[SaveHandle] = set()
"""Saves in flight, and ended saves whose later work still runs, such as a write of the tier to the root."""


def take_turn(timeout_s: float) -> threading.Lock:
    """Wait until no save is in flight, and keep others from starting one until the lock is released.

    Raises:
        CoordinationError: The save in flight did not end in time.
        ForkedProcessError: The parent of this forked process uses checkpoints.
    """
    fork_guard.claim_process()
    if not _turn.acquire(timeout=timeout_s):
        where = "" if _latest is None else f" of {_latest.path}"
        raise CoordinationError(
            f"this save cannot begin: the save in flight{where} did not end in {timeout_s:g} s; wait for its result()"
        )
    return _turn


def wait_until_free(timeout_s: float) -> None:
    """Wait until no save is in flight. Raises: as `take_turn`."""
    take_turn(timeout_s).release()


def raise_unseen_failure() -> None:
    """Raise the error of the latest save, if it failed and the caller has not seen the error yet."""
    if _latest is not None:
        _latest.raise_unseen_failure()


def _wait_at_exit() -> None:
    """Let saves in flight commit before the process ends; log failures that the caller has not seen."""
    if _latest is None or fork_guard.is_forked():  # the save of a forked process goes on in its parent only
        return
    waited = {_latest}
    while (handle := next(iter(_under_way - waited), None)) is not None:
        waited.add(handle)
        handle.wait(handle.timeout_s)
    for handle in waited:
        if not handle.wait(handle.timeout_s):
            logger.error("the process ends before the save of %s, which is given up", handle.path)
        elif handle._has_unseen_failure:
            logger.error("the save of %s failed, and its result was never read: %s", handle.path, handle._failure)


# Not `atexit`: before that runs, `concurrent.futures` refuses work. Threads come from the reserve by then.
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
