"""The watcher: one thread of each client, for calls of redistribution in which clients wait for each other.

Every `PATIENCE_S` it

* polls for the calls in which threads of this client wait (`dtckpt.redistribution.disagreement`);
* looks for new alarms (`dtckpt.redistribution.call_record`): somewhere, clients have waited in a call for that long.

The reaction to an alarm depends on the state of the call at this client:

    the call is in progress here        poll for it, as no thread may wait in it now (``async_op``)
    it has returned                     if others disagree in it: say so, take part with zeros, call no more
    the clients call no more            report the error of the group, take part with zeros
    it was not made yet                 if this client is *missing*: say so, take part with zeros, call no more

**Missing.** A client is missing from a call if others wait for it there for the heartbeat timeout, and its calling
thread idles all this time. ``DTCKPT_HEARTBEAT_TIMEOUT_S`` sets the timeout, 60 s by default. An idle thread uses less
than `IDLE_SHARE` of a core. A missing client waits elsewhere, perhaps for the clients that wait for it. A client that
computes is only slow. The timeout of the process group bounds the wait for a slow client.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from dtckpt.comm import observers
from dtckpt.config import Config
from dtckpt.redistribution import call_history
from dtckpt.redistribution.agreements import Group
from dtckpt.redistribution.call_history import Failure, GroupHistory
from dtckpt.redistribution.call_record import CallRecord, Planner, error_in, next_alarm

PATIENCE_S = 0.25
"""A client that has waited for so long writes its request to the record, and reads the requests of others."""
IDLE_SHARE = 0.1
"""A thread idles while it uses less than this part of the time of a core."""
_SAMPLE_S = 1.0
"""Seconds between two readings of a thread's used time; the kernel counts this time in steps of 10 ms."""
EXIT_S = 5.0
"""Longest wait for the watcher when the process exits; its calls to the store take milliseconds."""
_CLIENTS_PER_LOOK = 1000
"""Beyond this many clients, each looks for alarms less often, so that the store can answer all of them."""


class Polled(Protocol):
    """A call in which a thread waits."""

    def poll(self, now: float) -> None:
        """Do this client's part for the others. Args: ``now``: monotonic seconds."""


_numbers = itertools.count()
_waiting: dict[int, Polled] = {}
"""Calls in which a thread of this client waits now."""
_unsettled: list[CallRecord] = []
"""Records of calls that are over here, and to which other clients have yet to come."""
_watcher: threading.Thread | None = None
_exiting = threading.Event()
_lock = threading.Lock()


def ensure_running(plan: Planner) -> None:
    """Start the watcher, unless it runs; it ends with the process.

    Args:
        plan: Plans this client's participation in the requests of others.
    """
    global _watcher  # noqa: PLW0603  (one per process)
    if not _exiting.is_set() and (_watcher is None or not _watcher.is_alive()):
        with _lock:
            if _watcher is None or not _watcher.is_alive():
                _watcher = threading.Thread(target=_watch, args=(plan,), name="dtckpt-disagreement", daemon=True)
                _watcher.start()


def _end_at_exit() -> None:
    """End the watcher while the interpreter is whole.

    Before Python 3.14 the interpreter ends daemon threads as they come back from a call without the lock. The call to
    the store is C++, which must not be unwound so: the process would abort after all its work.
    """
    _exiting.set()
    if (watcher := _watcher) is not None:
        watcher.join(EXIT_S)


atexit.register(_end_at_exit)


@contextmanager
def polling(call: Polled) -> Iterator[None]:
    """Poll for a call while the body waits for other clients."""
    number = next(_numbers)
    _waiting[number] = call
    try:
        yield
    finally:
        del _waiting[number]


def settle_later(record: CallRecord) -> None:
    """Join the requests of clients that come to a record later."""
    _unsettled.append(record)
    ensure_running(record.plan)


def _watch(plan: Planner) -> None:
    seen: set[int] = set()
    alarms = _Alarms(plan)
    while not _exiting.wait(PATIENCE_S):
        # A copy, because threads enter and leave calls meanwhile.
        now = dict(_waiting)
        # A call has waited for `PATIENCE_S` only if it waited at the last look already.
        for number in seen & now.keys():
            try:
                now[number].poll(time.monotonic())
            except Exception as error:  # the store or a peer is gone: the wait itself ends with that
                _warn_if_connected("cannot look whether clients want the same: %s", error)
        seen = set(now)
        for record in list(_unsettled):
            try:
                is_over = record.is_settled()
            except Exception as error:  # as above
                _warn_if_connected("cannot look after clients that were late: %s", error)
                is_over = True
            if is_over:
                _unsettled.remove(record)
        try:
            if not alarms.is_current():
                alarms = _Alarms(plan)
            alarms.look(time.monotonic())
        except Exception as error:  # as above
            _warn_if_connected("cannot look whether other clients wait: %s", error)


class _Alarms:
    """The alarms under the present default process group."""

    def __init__(self, plan: Planner) -> None:
        self._plan = plan
        # Weakly, so that the connections of a group end with it.
        self._world = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
        self._num_seen = 0
        self._open: dict[tuple[Group, int], _Alarm] = {}
        self._next_look = 0.0

    def is_current(self) -> bool:
        if self._world is None:
            return not dist.is_initialized()
        return dist.is_initialized() and self._world() is dist.group.WORLD

    def look(self, now: float) -> None:
        """Read new alarms, and react to all alarms, also earlier ones."""
        if self._world is None or not call_history.has_calls() or now < self._next_look:
            return
        self._next_look = now + PATIENCE_S * (dist.get_world_size() // _CLIENTS_PER_LOOK)
        while (named := next_alarm(self._num_seen)) is not None:
            self._num_seen += 1
            if dist.get_rank() in named[0]:
                self._open.setdefault(named, _Alarm(*named, self._plan))
        for named, alarm in list(self._open.items()):
            if alarm.is_over(now):
                del self._open[named]


class _Alarm:
    """An alarm: clients wait in a call.

    Args:
        group: The clients of the call.
        number: Its number among them.
        plan: Plans this client's participation in the requests of others.
    """

    def __init__(self, group: Group, number: int, plan: Planner) -> None:
        self._group, self._number = group, number
        self._record = CallRecord(group, number, plan)
        self._has_said = False
        self._idle: _IdleTime | None = None

    def is_over(self, now: float) -> bool:
        """Do this client's part; return whether this part is complete."""
        history = call_history.history_of(self._group)
        if not self._has_said:
            if (call := history.call(self._number)) is not None:
                return bool(call.is_answered(now))
            if history.failure is not None:
                self._record.add_error(history.failure.error_so_far())
            elif not self._is_missing(history, now):
                return self._record.is_left()
            self._has_said = True
        return self._record.is_settled()

    def _is_missing(self, history: GroupHistory, now: float) -> bool:
        if history.count > self._number:  # it has returned from the call long ago
            reason = "had returned from this call long ago"
            return call_history.fail(self._group, self._failure(reason)) and self._say(reason)
        if self._idle is None:
            self._idle = _IdleTime(now, history.caller)
        timeout_s = Config.from_environ().heartbeat_timeout_s
        if self._idle.seconds(now) < timeout_s or not self._record.read()["requests"]:
            return False
        reason = f"has not come for {timeout_s:g} s, and waits {_place_of(history.caller)}"
        if not call_history.fail(self._group, self._failure(reason), unless=lambda: history.count > self._number):
            return False
        return self._say(reason)

    def _failure(self, reason: str) -> Failure:
        state = self._record.read()
        state["astray"][str(dist.get_rank())] = reason
        error = error_in(state)
        assert error is not None  # noqa: S101  (this client is astray)
        return Failure(error, self._record)

    def _say(self, reason: str) -> bool:
        self._record.add_astray(reason)
        return True


class _IdleTime:
    """Measures for how long a thread has idled."""

    def __init__(self, now: float, thread: threading.Thread) -> None:
        self._thread = thread
        self._since = self._sampled = now
        self._used_s = _used_s(thread)

    def seconds(self, now: float) -> float:
        if now - self._sampled >= _SAMPLE_S:
            used_s = _used_s(self._thread)
            if used_s - self._used_s > IDLE_SHARE * (now - self._sampled):
                self._since = now
            self._sampled, self._used_s = now, used_s
        return self._sampled - self._since


def _used_s(thread: threading.Thread) -> float:
    """Return the seconds of a core that a thread has used."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except FileNotFoundError:
        return 0.0  # it has ended, and calls no more
    # The second field, the name in parentheses, may contain spaces. The 14th and 15th are user and system time.
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _place_of(thread: threading.Thread) -> str:
    """Return the place in the program where a thread is, outside of this library and PyTorch."""
    frame: Any = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "dtckpt"):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"


def _warn_if_connected(text: str, error: Exception) -> None:
    """Log a warning, unless the process group has ended meanwhile: then no client waits any more."""
    if dist.is_initialized():
        observers.LOG.warning(text, error)
