"""The tasks of one job, by number and by state: registered, suspect, lost, left or fenced.

How a task changes its state::

    REGISTERED --silent for half the timeout--> SUSPECT --silent for all of it--> LOST
        ^                                          |                               |
        +----------------- heartbeat --------------+-------------------------------+
    each of these --Leave--> LEFT      all tasks --a higher attempt registers--> FENCED
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from dtckpt_server.events import TaskProgress, TaskReport

if TYPE_CHECKING:
    from dtckpt_server.state import Barrier

REGISTERED, SUSPECT, LOST, LEFT, FENCED = "REGISTERED", "SUSPECT", "LOST", "LEFT", "FENCED"
ALIVE = (REGISTERED, SUSPECT)
GONE = (LOST, LEFT)
STATES = (*ALIVE, *GONE, FENCED)
KEPT_CALLS = 16
"""How many calls of each task are kept. A kept call that is repeated gets the round that it had joined."""


@dataclass(slots=True)
class Task:
    """One place in a job and the process that has it."""

    number: int
    incarnation: int
    attempt: int
    host: str
    heard_at: float
    state: str = REGISTERED
    progress: TaskProgress = TaskProgress()  # noqa: RUF009  immutable
    progressed_at: float = 0.0  # when it last reported another progress
    rival: tuple[int, float] = (0, 0.0)  # incarnation that wants this place, and since when
    report: TaskReport = TaskReport()  # noqa: RUF009  immutable
    calls: dict[int, Barrier] = field(default_factory=dict)  # oldest first

    def note_call(self, call: int, barrier: Barrier) -> None:
        """Keep which round a call joined."""
        self.calls[call] = barrier
        if len(self.calls) > KEPT_CALLS:
            del self.calls[next(iter(self.calls))]


class Tasks(dict[int, Task]):
    """The tasks of a job by number; ``by_state`` holds the same tasks, in the order in which they came into the state.

    A task that is heard is placed anew. So the tasks of a living state are in the order in which they were last heard,
    and the silent ones are found without a look at the others.
    """

    def __init__(self) -> None:
        super().__init__()
        # An OrderedDict finds its first entry at once; a plain dict first skips all entries removed before it.
        self.by_state: dict[str, dict[int, Task]] = {state: OrderedDict() if state in ALIVE else {} for state in STATES}

    def place(self, task: Task, state: str) -> None:
        """Put a task into a state, as the last one there; replace any other task of its number."""
        before = self.get(task.number)
        if before is not None:
            del self.by_state[before.state][task.number]
        task.state = state
        self[task.number] = self.by_state[state][task.number] = task

    def fence(self, num_places: int) -> None:
        """Fence all tasks; forget tasks with a number of ``num_places`` or more."""
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
        """Return the tasks that are alive, in the order in which they were last heard."""
        return chain.from_iterable(self.by_state[state].values() for state in (SUSPECT, REGISTERED))

    def silent_since(self, when: float, state: str, limit: int) -> list[Task]:
        """Return the tasks of a state of `ALIVE` that were not heard since ``when``, longest silent first.

        Args:
            when: Seconds of the rules' clock.
            state: REGISTERED or SUSPECT.
            limit: How many to return, at most.
        """
        silent: Iterable[Task] = takewhile(lambda task: task.heard_at < when, self.by_state[state].values())
        return list(islice(silent, limit))

    def gone_among(self, participants: Sequence[int], limit: int) -> list[int]:
        """Return participants that are lost or have left, sorted, at most ``limit``."""
        lost, left = (self.by_state[state] for state in GONE)
        everyone = isinstance(participants, range)
        gone = chain(lost, left) if everyone else (each for each in participants if each in lost or each in left)
        return sorted(islice(gone, limit))
