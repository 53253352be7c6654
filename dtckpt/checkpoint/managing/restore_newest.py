"""Restore the newest step that all clients can read.

Client 0 proposes the newest step that was not tried yet (barrier ``manager/chosen``), and all clients restore it
(barrier ``manager/restored``). If any client finds the step damaged, all pass it over, and the next older one is tried.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.coordination.api import wire_text
from dtckpt.errors import (
    BarrierConflictError,
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    DtckptError,
    StorageError,
    capped,
)

logger = logging.getLogger("dtckpt.checkpoint")

MAX_REASON_CHARS = 500
DAMAGE = (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    StorageError,
)
"""Errors that say that a checkpoint cannot be read, not that the caller asked for the wrong thing."""


@dataclass(frozen=True, slots=True)
class RestoredStep:
    """The result of `CheckpointManager.restore`.

    Args:
        step: The step that was restored.
        tree: The target, or the new tree.
        skipped: Newer steps that could not be restored, and the reason.
    """

    step: int
    tree: Any
    skipped: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of an attempt to restore a step on this client: a tree, or the damage that was found."""

    tree: Any = None
    failure: DtckptError | None = None

    @property
    def reason(self) -> bytes:
        """The damage in words, as a payload for the other clients; empty if there is none."""
        if self.failure is None:
            return b""
        return wire_text(f"{type(self.failure).__name__}: {self.failure}")[:MAX_REASON_CHARS].encode()


def restore_newest_valid(
    folders: StepFolders,
    collective: Collective,
    step: int | None,
    read: Callable[[int], Any],
    pin: Callable[[int], AbstractContextManager[None]],
) -> RestoredStep:
    """Restore a step, or the newest that is not damaged.

    Collective: Over the participants; barriers ``<operation>/chosen``, ``<operation>/restored``, and those of ``read``.

    Args:
        folders: The steps that there are.
        collective: The operation that the rounds belong to.
        step: The step; default the newest. A step that is named is not replaced by another.
        read: Restores a step.
        pin: Keeps a step from being removed while it is read.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none that is valid.
        BarrierConflictError: Clients name different steps.
        DtckptError: As for `dtckpt.restore`, where it is not about damage, or the step was named.
    """
    skipped: dict[int, str] = {}
    while (chosen := _choose(folders, collective, step, skipped)) is not None:
        with collective.as_parent():
            work = functools.partial(_try, chosen, read, pin(chosen))
            outcome, answers = collective.run_round_with_value("restored", work)
        reasons = [f"client {client}: {text.decode()}" for client, text in sorted(answers.items()) if text]
        if not reasons:
            return RestoredStep(chosen, outcome.tree, skipped)
        if step is not None:
            raise outcome.failure or CheckpointCorruptError(f"step {step} cannot be restored: {reasons[0]}")
        logger.error("step %d cannot be restored, trying the one before: %s", chosen, reasons[0])
        skipped[chosen] = reasons[0]
    told = "".join(f"; step {step}: {reason}" for step, reason in skipped.items())
    raise CheckpointNotFoundError(f"there is no valid checkpoint in {folders.root}{told}")


def _choose(folders: StepFolders, collective: Collective, step: int | None, skipped: Mapping[int, str]) -> int | None:
    """Return the step to restore next: the one that was named, or client 0's newest that was not passed over."""

    def propose() -> bytes:
        if step is not None:
            folders.path(step)
            return json.dumps([step, step]).encode()
        newest = max((each for each in folders.all_steps() if each not in skipped), default=None)
        return json.dumps([None, newest]).encode()

    proposals = {client: json.loads(data) for client, data in sorted(collective.run_round("chosen", propose).items())}
    named = {client: proposal[0] for client, proposal in proposals.items()}
    if len(set(named.values())) > 1:
        raise BarrierConflictError(f"clients restore different steps; got {capped(named.items())}")
    chosen: int | None = proposals[0][1]
    return chosen


def _try(step: int, read: Callable[[int], Any], pinned: AbstractContextManager[None]) -> tuple[_Outcome, bytes]:
    """Restore a step. Damage is an outcome that all clients hear of; any other error fails the round."""
    try:
        with pinned:
            outcome = _Outcome(tree=read(step))
    except DAMAGE as error:
        outcome = _Outcome(failure=error)
    return outcome, outcome.reason
