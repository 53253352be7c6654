"""Order the steps that can be restored, of the root and of the local tier, the newest first; pure.

Saves are compared by their numbers, not by their steps, since a run may go back. A save whose run went back to an
older step is abandoned: it is restored by its step only::

    local saves, by number    1: step 4    2: step 5    3: step 6    4: step 5       newest: step 5 of number 4
                                           abandoned    abandoned                    the one before it: step 4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dtckpt.checkpoint.managing.lineage import Saved, current_steps
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.tiers.holdings import HeldSave


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that can be restored, and where from.

    Args:
        step: The step.
        local: The name of the save in the local tier; empty: the checkpoint in the root, or in the mirror.
        is_mirrored: Whether it is the copy in the mirror.
        is_abandoned: Whether its run went back to an older step.
    """

    step: int
    local: str = ""
    is_mirrored: bool = False
    is_abandoned: bool = field(default=False, compare=False)

    @property
    def number(self) -> int:
        """The number of the save in the local tier."""
        return SaveId.parse(self.local).number

    @property
    def facts(self) -> tuple[int, str, bool]:
        """The first arguments, without the arguments that depend on other steps."""
        return self.step, self.local, self.is_mirrored

    def __str__(self) -> str:
        place = " of the local tier" if self.local else " of the mirror" if self.is_mirrored else ""
        return f"step {self.step}{place}"


def newest_first(saved: Saved, held: Collection[HeldSave]) -> list[Candidate]:
    """Return the steps that can be restored, the newest first, a step of the tier before the same step of the root.

    Args:
        saved: The steps of the root.
        held: The saves that the hosts hold.
    """
    local = deque(sorted((each for each in held if each.is_voted), key=lambda each: each.save, reverse=True))
    found: list[Candidate] = []
    smallest: int | None = None

    def add(step: int, save: HeldSave | None) -> None:
        nonlocal smallest
        is_abandoned = smallest is not None and step >= smallest and (save is not None or step > smallest)
        smallest = step if smallest is None else min(step, smallest)
        # A save that is lost still tells that its run went back.
        if save is None or save.is_restorable:
            found.append(Candidate(step, save.save.name if save else "", is_abandoned=is_abandoned))

    for step in sorted(current_steps(saved), reverse=True):
        number = saved[step].number
        while local and (local[0].save.number >= number if number else local[0].save.step >= step):
            add(local[0].save.step, local.popleft())
        add(step, None)
    while local:
        add(local[0].save.step, local.popleft())
    return found


def nearest_first(saved: Saved, mirrored: Saved, held: Collection[HeldSave]) -> list[Candidate]:
    """Return the steps that can be restored, the newest first; of each, the root's before the copy in the mirror.

    A copy of another save of the step, which the root has replaced since, is left out.

    Args:
        saved: The steps of the root.
        mirrored: The steps of the mirror.
        held: The saves that the hosts hold.
    """
    found: list[Candidate] = []
    for each in newest_first({**mirrored, **saved}, held):
        if each.local or each.step in saved:
            found.append(each)
        copy = None if each.local else mirrored.get(each.step)
        if copy is not None and copy == saved.get(each.step, copy):
            found.append(replace(each, is_mirrored=True))
    return found
