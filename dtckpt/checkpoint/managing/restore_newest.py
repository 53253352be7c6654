"""Restore the newest step that all clients can read.

Client 0 proposes the newest step that was not tried yet (barrier ``manager/chosen``), and all clients restore it
(barrier ``manager/restored``). If any client finds the step damaged, all pass it over, and try the next older step.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.managing.candidates import Candidate
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.parts.records import PartCopy
from dtckpt.checkpoint.tiers.local_restore import LocalRestore
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
MAX_DAMAGED_CHARS = 3000
"""Bounds on the texts that a client tells the others: a vote has room for 4096 bytes."""
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
        local: The bytes by host, if the step came from the local tier; None if it came from the root or the mirror.
        is_mirrored: Whether the step came from the mirror.
    """

    step: int
    tree: Any
    skipped: Mapping[int, str]
    local: LocalRestore | None = None
    is_mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore that went well on all clients.

    Args:
        chosen: The candidate.
        tree: The result of ``read``.
        skipped: The steps that were passed over, and the reason.
        damaged: The copies of parts in the local tier that clients found damaged.
    """

    chosen: Candidate
    tree: Any
    skipped: dict[int, str]
    damaged: frozenset[PartCopy]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of an attempt to restore a step on this client: a tree, or the damage that was found."""

    tree: Any = None
    failure: DtckptError | None = None
    damaged: tuple[PartCopy, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the payload for the other clients: why the step cannot be restored, or which copies are damaged."""
        reason = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
        damaged = self.damaged
        while len(json.dumps(damaged)) > MAX_DAMAGED_CHARS:
            damaged = damaged[:-1]  # the next restore finds the others
        return json.dumps([wire_text(reason)[:MAX_REASON_CHARS], damaged], ensure_ascii=False).encode()


def restore_newest_valid(
    candidates: Callable[[], Sequence[Candidate]],
    collective: Collective,
    step: int | None,
    read: Callable[[Candidate], Any],
    pin: Callable[[Candidate], AbstractContextManager[None]],
    *,
    damaged: Callable[[], Collection[PartCopy]],
    folders: StepFolders,
) -> Restored:
    """Restore a step, or the newest that is not damaged.

    Collective: Over the participants; barriers ``<operation>/chosen``, ``<operation>/restored``; and as ``read``.

    Args:
        candidates: Returns the steps that can be restored, the newest first; called on client 0.
        collective: The operation that the rounds belong to.
        step: The step; default the newest. A step that is named is not replaced by another.
        read: Restores a candidate.
        pin: Keeps a candidate from being removed while it is read.
        damaged: Returns the copies of the candidate that ``read`` found damaged on this client.
        folders: The steps of the root.

    Raises:
        CheckpointNotFoundError: There is no valid checkpoint.
        BarrierConflictError: Clients name different steps.
        DtckptError: As for `dtckpt.restore`, where it is not about damage, or the step was named.
    """
    tried: set[Candidate] = set()
    skipped: dict[int, str] = {}
    failure: DtckptError | None = None
    while (chosen := _choose(candidates, folders, collective, step, tried)) is not None:
        with collective.as_parent():
            work = functools.partial(_try, chosen, read, pin(chosen), damaged)
            outcome, answers = collective.run_round_with_value("restored", work)
        told = {client: json.loads(answer) for client, answer in sorted(answers.items())}
        reasons = [f"client {client}: {reason}" for client, (reason, _) in told.items() if reason]
        if not reasons:
            skipped.pop(chosen.step, None)  # from one tier it was damaged, from another it was not
            found = frozenset(PartCopy(*copy) for _, copies in told.values() for copy in copies)
            return Restored(chosen, outcome.tree, skipped, found)
        failure = outcome.failure or CheckpointCorruptError(f"{chosen} cannot be restored: {reasons[0]}")
        tried.add(chosen)
        skipped[chosen.step] = reasons[0]
        if step is None or chosen.local or chosen.is_mirrored:
            logger.error("%s cannot be restored, trying the step before it: %s", chosen, reasons[0])
    if step is not None and failure is not None:
        raise failure
    reasons = [f"; step {step}: {reason}" for step, reason in skipped.items()]
    raise CheckpointNotFoundError(f"there is no valid checkpoint in {folders.root}{''.join(reasons)}")


def _choose(
    candidates: Callable[[], Sequence[Candidate]],
    folders: StepFolders,
    collective: Collective,
    step: int | None,
    tried: Collection[Candidate],
) -> Candidate | None:
    """Return the candidate to restore next: the newest on client 0 that was not tried; only of ``step`` if it is named.

    A step that is named is restored from the root even if nothing is listed there, so that the error says why not.
    """

    def propose() -> bytes:
        if step is not None:
            folders.path(step)  # raises: it is no step
        if not collective.is_leader:
            return json.dumps([step, None]).encode()
        left = [
            each
            for each in candidates()
            if each not in tried and (not each.is_abandoned if step is None else each.step == step)
        ]
        if step is not None and not left and Candidate(step) not in tried:
            left = [Candidate(step)]
        first = left[0].facts if left else None
        return json.dumps([step, first]).encode()

    proposals = {client: json.loads(data) for client, data in sorted(collective.run_round("chosen", propose).items())}
    named = {client: proposal[0] for client, proposal in proposals.items()}
    if len(set(named.values())) > 1:
        raise BarrierConflictError(f"clients restore different steps; got {capped(named.items())}")
    chosen = proposals[0][1]
    return None if chosen is None else Candidate(*chosen)


def _try(
    chosen: Candidate,
    read: Callable[[Candidate], Any],
    pinned: AbstractContextManager[None],
    damaged: Callable[[], Collection[PartCopy]],
) -> tuple[_Outcome, bytes]:
    """Restore a candidate. Damage is an outcome that all clients hear of; any other error fails the round."""
    try:
        with pinned:
            outcome = _Outcome(tree=read(chosen), damaged=tuple(sorted(damaged())))
    except DAMAGE as error:
        outcome = _Outcome(failure=error)
    return outcome, outcome.to_bytes()
