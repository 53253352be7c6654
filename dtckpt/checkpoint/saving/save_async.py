"""Saves that return when the state is in host memory; the rest is done in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving import save_handle
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.save import Attempt, State, state_of_tree
from dtckpt.checkpoint.saving.save_handle import SaveHandle, SaveProgress, SaveStats
from dtckpt.checkpoint.saving.staging import StagingMemory
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.storage.location import Location

__all__ = ["SaveHandle", "SaveProgress", "SaveStats", "save_async", "start_save"]

_memory = StagingMemory()
"""Only the one save in flight uses it."""


def save_async(
    path: str | Location, tree: Any, *, options: SaveOptions | None = None, step: int | None = None
) -> SaveHandle:
    """Save a state tree in the background; returns when it is copied to host memory and all clients agree on it.

    Whatever happens to the tensors afterwards does not change what is saved. The host memory is kept for the next
    save. Planning is part of the call, digests, writing and the commit are not.

    One save at a time is in flight in a process: a further `save_async` or `save`, or a restore over several clients,
    waits for it. A failure that nobody looked at is raised by the next `save_async` or `save`. A process that exits
    commits its save first; one that is killed leaves the old checkpoint or the new one. A process that is forked
    knows nothing of the save, which goes on in its parent.

    Collective: As `dtckpt.save`; the barrier ``save/begin`` in the call, the others in the background. Clients start
    saves and restores in the same order.

    Blocks: On a save in flight, on the copy, and on the slowest client, at most ``options.timeout_s`` seconds each.

    Args:
        path: As for `dtckpt.save`.
        tree: As for `dtckpt.save`.
        options: See `SaveOptions`.
        step: As for `dtckpt.save`.

    Raises:
        CoordinationError: The save in flight did not end in time.
        DtckptError: As for `dtckpt.save`, where it is found before anything is written; or what the last save failed
            with, if nobody has looked.

    >>> import tempfile, torch, dtckpt
    >>> path, weight = tempfile.mkdtemp() + "/step_1", torch.ones(3)
    >>> handle = dtckpt.save_async(path, {"weight": weight})
    >>> _ = weight.zero_()
    >>> handle.result().path.name
    'step_1'
    >>> dtckpt.restore(path)["weight"].tolist()
    [1.0, 1.0, 1.0]
    """
    coordination = current_coordination()
    options = options or SaveOptions()
    return start_save(
        path,
        lambda: state_of_tree(tree, options, coordination),
        options=options,
        coordination=coordination,
        step=step,
    )


def start_save(
    path: str | Location,
    collect: Callable[[], State],
    *,
    options: SaveOptions,
    coordination: Coordination,
    extra_files: Mapping[str, bytes] | None = None,
    then: Callable[[SaveHandle], object] = lambda _: None,
    step: int | None = None,
) -> SaveHandle:
    """Run the save protocol, from the first barrier on in the background. Collective and errors: as `save_async`.

    Args:
        path: Where the checkpoint will be.
        collect: Gives this client's side of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The way to the other clients.
        extra_files: Files, by name, that the leader adds to the checkpoint.
        then: Called in the background when the save has ended, well or not.
        step: As for `dtckpt.save`.
    """
    start = time.monotonic()

    def stage(state: State, plan: SavePlan, client: int) -> State:
        phases = attempt.rounds.phases
        return _memory.stage(state, plan, client, with_copies=options.check_replicas, count=phases.count)

    attempt = Attempt(path, collect, options, coordination, stage=stage, extra_files=extra_files, step=step)
    with ExitStack() as holding:
        turn = save_handle.take_turn(options.timeout_s)
        holding.callback(turn.release)
        holding.enter_context(attempt.rounds.exclusive())
        attempt.begin()
        held = holding.pop_all()
    blocking_s = time.monotonic() - start
    handle = SaveHandle(attempt.place.where, attempt.rounds.phases, timeout_s=options.timeout_s, blocking_s=blocking_s)
    handle.launch(attempt.complete, held, then)
    return handle
