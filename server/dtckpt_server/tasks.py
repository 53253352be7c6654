"""The tasks of one job, by number and by state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from dtckpt_server.events import Progress, Report

if TYPE_CHECKING:
    from dtckpt_server.state import Barrier

REGISTERED, SUSPECT, LOST, LEFT, FENCED = "REGISTERED", "SUSPECT", "LOST", "LEFT", "FENCED"
ALIVE = (REGISTERED, SUSPECT)
GONE = (LOST, LEFT)
STATES = (*ALIVE, *GONE, FENCED)
KEPT_CALLS = 16
"""Of each task: calls that may be repeated and then get the round that they had joined."""


@dataclass(slots=True)
class Task:
    """One place in a job and the process that has it."""

    number: int
    incarnation: int
    attempt: int
    host: str
    heard_at: float
    state: str = REGISTERED
    progress: Progress = Progress()  # noqa: RUF009  immutable
    progressed_at: float = 0.0  # when it last reported another progress
    rival: tuple[int, float] = (0, 0.0)  # incarnation that wants this place, and since when
    report: Report = Report()  # noqa: RUF009  immutable
    calls: dict[int, Barrier] = field(default_factory=dict)  # oldest first

    def note_call(self, call: int, barrier: Barrier) -> None:
        """Keep which round a call joined."""
        self.calls[call] = barrier
        if len(self.calls) > KEPT_CALLS:
            del self.calls[next(iter(self.calls))]


class Tasks(dict[int, Task]):
    """The tasks of a job by number; ``by_state`` holds the same tasks, in the order in which they came into the state.

    A task that is heard comes into its state anew, so those that are alive are in the order in which they were heard:
    no method looks at tasks that it does not return.
    """

    def __init__(self) -> None:
        super().__init__()
        # An OrderedDict finds its first entry at once; a plain dict only after all that have been taken out before it.
        self.by_state: dict[str, dict[int, Task]] = {state: OrderedDict() if state in ALIVE else {} for state in STATES}

    def place(self, task: Task, state: str) -> None:
        """Put a task into a state, as the last one there, in the place of any other of its number."""
        before = self.get(task.number)
        if before is not None:
            del self.by_state[before.state][task.number]
        task.state = state
        self[task.number] = self.by_state[state][task.number] = task

    def fence(self, num_places: int) -> None:
        """Fence all tasks, and forget those beyond the first places."""
        kept = [task for task in self.values() if task.number < num_places]
        self.clear()
        for tasks in self.by_state.values():
            tasks.clear()
        for task in kept:
            task.state = FENCED
            self[task.number] = self.by_state[FENCED][task.number] = task

    @property
    def num_alive(self) -> int:
        return sum(len(self.by_state[state]) for state in ALIVE)

    def longest_silent(self) -> Iterator[Task]:
        """Return the tasks that are alive, each before those that were heard later."""
        return chain.from_iterable(self.by_state[state].values() for state in (SUSPECT, REGISTERED))

    def silent_since(self, when: float, state: str, limit: int) -> list[Task]:
        """Return the first tasks of a state of `ALIVE` that were not heard since, at most ``limit``."""
        silent: Iterable[Task] = takewhile(lambda task: task.heard_at < when, self.by_state[state].values())
        return list(islice(silent, limit))

    def gone_among(self, participants: Sequence[int], limit: int) -> list[int]:
        """Return participants that are lost or have left, sorted, at most ``limit``."""
        lost, left = (self.by_state[state] for state in GONE)
        everyone = isinstance(participants, range)
        gone = chain(lost, left) if everyone else (each for each in participants if each in lost or each in left)
        return sorted(islice(gone, limit))
