"""Tell which of the steps below a root belong to the run that saved last, and which to abandoned runs; pure.

A run may go back to an older step and train on. The newer steps then belong to an abandoned run::

    saved   10 -> 20 -> 30           steps of the run: 10 20 30
    restore 10, save 15
            10 -> 15                 steps of the run: 10 15      abandoned: 20 30
              `-> 20 -> 30           step 15 says: "set aside 20, 30"

Nothing is moved or marked for that. Every checkpoint says, in the file ``lineage.json`` that is committed with it,
which other steps it does not descend from. The newest commit alone decides, so each commit moves all readers at once
from one view to the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dtckpt.errors import CheckpointCorruptError
from dtckpt.format import json_facts
from dtckpt.format.digest import bytes_digest
from dtckpt.format.hash_work import validate_hashes

LINEAGE_NAME = "lineage.json"
MAX_NBYTES = 16 << 20
MAX_STEP = 10**18
"""Steps are below this."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The statement of one checkpoint about the other steps of its root.

    Args:
        number: Number of the commit, which grows from commit to commit. The number is 0, unknown, if another program
            put the checkpoint there, an older version saved it, or the file is damaged.
        aside: The steps that existed at the save and that the checkpoint does not descend from.
    """

    number: int = 0
    aside: frozenset[int] = frozenset()

    def to_bytes(self) -> bytes:
        """Return the file."""
        data = json.dumps({"number": self.number, "aside": sorted(self.aside)}).encode()
        return b"%s\n%016x\n" % (data, bytes_digest(data))

    @classmethod
    def from_bytes(cls, file: bytes) -> Lineage:
        """Read the file.

        Raises:
            ValueError: The file is damaged.
        """
        data, digest, _ = file.split(b"\n")
        if digest != b"%016x" % bytes_digest(data):
            raise ValueError("its digest differs")
        facts = json_facts.parse_object(data)
        aside = [json_facts.whole(step, MAX_STEP) for step in json_facts.items(facts.get("aside"))]
        validate_hashes(aside)
        return cls(json_facts.whole(facts.get("number")), frozenset(aside))


UNKNOWN = Lineage()
Saved = Mapping[int, Lineage]
"""The lineages of all steps that have a finished checkpoint."""


def current_steps(saved: Saved) -> frozenset[int]:
    """Return the steps of the run that saved last.

    A step of unknown lineage is one of them unless the newest commit has set it aside.
    """
    newest = max(saved, key=lambda step: (saved[step].number, step), default=0)
    if not saved or not saved[newest].number:
        return frozenset(saved)
    unknown = {step for step in saved if not saved[step].number} - saved[newest].aside
    return ancestry(saved, newest) | unknown


def ancestry(saved: Saved, step: int) -> frozenset[int]:
    """Return a step and the steps that it descends from, as far as they are still there.

    A checkpoint descends from smaller steps only, which existed when it was saved. A save that replaced one of them
    later has a greater number, by which it is told apart. A step of unknown lineage is taken to descend from the
    smaller steps of the run that saved last.
    """
    own = saved.get(step, UNKNOWN)
    if not own.number:
        return frozenset(other for other in current_steps(saved) if other < step) | (saved.keys() & {step})
    older = {other for other, lineage in saved.items() if other < step and lineage.number <= own.number}
    return frozenset(older - own.aside) | {step}


@dataclass(frozen=True, slots=True)
class Run:
    """The saves that a training state descends from, as steps with the numbers of their commits.

    Args:
        saves: The saves that are known to be committed.
        begun: The save that was begun last. As it may have failed, it counts only if it is found on storage.
    """

    saves: frozenset[tuple[int, int]]
    begun: tuple[int, int] | None = None

    @classmethod
    def at(cls, saved: Saved, steps: frozenset[int]) -> Run:
        """Return the run that saved these steps."""
        return cls(frozenset((step, saved[step].number) for step in steps))

    def save(self, step: int, saved: Saved, now_ns: int) -> tuple[Run, Lineage]:
        """Return the run that begins a further save, and the lineage that the save's checkpoint states.

        A run that saves a smaller step has gone back: it loses the greater steps.

        Args:
            step: The step that is to be saved.
            saved: The steps on storage.
            now_ns: Nanoseconds since the epoch. The clock numbers commits, because two managers that do not see each
                other's commits must not take the same number; where the clock is behind, numbers count on by one.

        Raises:
            CheckpointCorruptError: A step has the last number that there is, so no save can come after it.
        """
        # A lineage that cannot be read at the moment has number 0; its step still is one of this run.
        mine = {save for save in self.saves if save[0] in saved and saved[save[0]].number in (save[1], 0)}
        if self.begun and saved.get(self.begun[0], UNKNOWN).number == self.begun[1]:
            mine.add(self.begun)
        mine = {save for save in mine if save[0] <= step}
        number = max(now_ns, 1 + max((lineage.number for lineage in saved.values()), default=0))
        if number >= json_facts.MAX_NUMBER:
            last = max(saved, key=lambda other: saved[other].number)
            raise CheckpointCorruptError(
                f"no save can come after step {last}: the number of its commit is {saved[last].number}, expected "
                "nanoseconds since the epoch; its lineage was made by another program: remove the step or move it away"
            )
        aside = saved.keys() - {other for other, _ in mine} - {step}
        return Run(frozenset(mine), (step, number)), Lineage(number, frozenset(aside))
