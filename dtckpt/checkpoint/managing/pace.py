"""`Pace`: the interval of a manager with ``every="auto"``, from the cost of its saves and the failures of its runs."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtckpt.checkpoint.managing.interval import AutoInterval, Costs, PastRun, estimate_mtbf, optimal_interval
from dtckpt.checkpoint.managing.run_history import RunHistory
from dtckpt.errors import DtckptError
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

NUM_MEASURED = 8
"""Saves whose costs count: the newest ones."""
NOTABLE = 0.2
"""Relative change of the interval that is logged."""


class Pace:
    """The interval between saves. Client 0 asks its `Pace` and decides; the other clients do not ask theirs.

    Args:
        auto: The user's part.
        history: The runs of the root.
        where: The root, for messages.
        now: Returns seconds since the epoch.
    """

    def __init__(
        self, auto: AutoInterval, history: RunHistory, where: Location, now: Callable[[], float] = time.time
    ) -> None:
        self._auto = auto
        self._history = history
        self._where = where
        self._num_hosts = 1
        self._now = now
        self._past: tuple[PastRun, ...] = ()
        self._former_costs: Costs | None = None
        self._blocking: deque[float] = deque(maxlen=NUM_MEASURED)
        self._lags: deque[float] = deque(maxlen=NUM_MEASURED)
        self._logged: float | None = None
        self._lock = threading.Lock()  # a commit is noted by the thread of the save
        self._has_begun = False

    def begin(self, num_hosts: int) -> None:
        """Note that this run saves, on so many hosts. Idempotent; only for the process with the right to the root."""
        if not self._has_begun:
            self._has_begun, self._num_hosts = True, num_hosts
            with self._tolerated():
                past, self._former_costs = self._history.begin(self._now())
                self._past = tuple(past)

    def note_returned(self, blocking_s: float) -> None:
        """Note for how long the call of a save stopped training."""
        with self._lock:
            self._blocking.append(blocking_s)

    def note_committed(self, lag_s: float) -> None:
        """Note how long after its begin a save was committed."""
        with self._lock:
            self._lags.append(lag_s)
        with self._tolerated():
            self._history.note(self._now(), self.costs, has_ended=False)

    def end(self) -> None:
        """Note that this run has not failed."""
        with self._tolerated():
            self._history.note(self._now(), self.costs, has_ended=True)
            self._has_begun = False

    @property
    def costs(self) -> Costs | None:
        """Costs of the newest saves: the median stop and the longest lag; before there are any, of the last run."""
        with self._lock:
            if not self._blocking or not self._lags:
                return self._former_costs
            return Costs(statistics.median(self._blocking), max(self._lags))

    def interval_s(self) -> float:
        """Return the interval in seconds; 0 while no cost is known, so that the first save measures it."""
        costs, auto = self.costs, self._auto
        if costs is None:
            return auto.min_s
        mtbf_s = auto.mtbf_s or estimate_mtbf(self._past, self._history.uptime_s, self._num_hosts)
        interval = optimal_interval(costs.blocking_s, mtbf_s, lag_s=costs.lag_s)
        interval = min(max(interval, auto.min_s), auto.max_s)
        if self._logged is None or abs(interval - self._logged) > NOTABLE * self._logged:
            self._logged = interval
            reason = f"a save stops training for {costs.blocking_s:.3f} s and is complete after {costs.lag_s:.1f} s"
            failures = f"a failure is expected every {mtbf_s / 3600:.2f} h ({self._reason()})"
            logger.info("saves every %.1f s: %s; %s", interval, reason, failures)
        return interval

    def _reason(self) -> str:
        if self._auto.mtbf_s is not None:
            return "given by mtbf_s"
        failures = sum(run.has_failed for run in self._past)
        return f"earlier runs: {len(self._past)}, failed: {failures}; hosts: {self._num_hosts}"

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Log a warning if the history cannot be read or written: saves do not depend on it."""
        try:
            with translate_errors("keep the history of runs", self._where):
                yield
        except DtckptError as error:
            logger.warning("the history of runs, which every='auto' estimates failures by, is not available: %s", error)
