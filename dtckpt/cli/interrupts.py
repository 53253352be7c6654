"""`Interrupts`: SIGINT and SIGTERM end a command at any instant, with their exit code, and its cleaning-up is done.

A signal raises `Interrupt` in the main thread, and unfinished output is removed on the way out. Three things would be
in its way:

* Amid an import, a library may take the exception for a failed import, or, in C++, abort the process. So the signal
  comes again until no import is under way. While the command's own modules are imported there is no output yet, so the
  process ends at once.
* Python drops exceptions in ``__del__`` and in callbacks. So the signal comes again.
* A second signal, as of a terminal or ``timeout``, would interrupt the removal. So it is passed over.

This module imports little, because a signal that comes before its handler is there ends the process in Python's way.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 0.02
"""Seconds after which a signal comes again."""


class Interrupt(SystemExit):
    """The end of the command by a signal; its code is 128 and the signal's number."""


class Interrupts:
    """A context in whose body signals raise `Interrupt`, once. In other threads than the main one it does nothing.

    Args:
        end: Ends the process with an exit code, if a signal comes while ``beginners`` import. None: the process is the
            caller's, and goes on after the context, with its former handlers.
        beginners: How the names of the modules begin whose imports come before a command's work.
    """

    def __init__(self, end: Callable[[int], object] | None, beginners: tuple[str, ...]) -> None:
        self.code = 0
        """Exit code by the signal that came; 0: no signal has come."""
        self._end = end
        self._beginners = beginners
        self._is_over = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        found = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
        # Signals that the parent has set to be ignored stay so, such as SIGINT for background jobs of scripts.
        self._former = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
        self._former_hook = sys.unraisablehook
        if self._former:
            self._former_alarm = signal.signal(signal.SIGALRM, self._deliver)
            sys.unraisablehook = self._note_dropped
        for number in self._former:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._end is None and self._former:
            for number, handler in self._former.items():
                signal.signal(number, handler)
            signal.signal(signal.SIGALRM, self._former_alarm)
            sys.unraisablehook = self._former_hook

    def stop(self) -> None:
        """Pass over all signals from now on: the command is done."""
        self._is_over = True
        for number in (*self._former, signal.SIGALRM) if self._former else ():
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.code:
            self.code = 128 + number
            self._deliver(number, frame)

    def _deliver(self, _: int, frame: FrameType | None) -> None:
        if self._is_over:
            return
        importer = _first_importer(frame)
        if importer.startswith(self._beginners) and self._end is not None:
            self._end(self.code)
        elif importer:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            raise Interrupt(self.code)

    def _note_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, Interrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            self._former_hook(dropped)


def _first_importer(frame: FrameType | None) -> str:
    """Return the module whose import statement began the imports that are under way; empty if there are none."""
    importer, is_machinery = "", False
    while frame is not None:
        is_import_module = is_machinery and frame.f_globals.get("__name__") == "importlib"
        if is_import_module or frame.f_code.co_filename.startswith("<frozen importlib"):
            is_machinery = True
        elif is_machinery:
            importer, is_machinery = frame.f_globals.get("__name__", "?"), False
        frame = frame.f_back
    return importer
