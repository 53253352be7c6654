"""`save_async`: copy the state to host memory, return, and write and commit in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.participants import Group, participants_of
from dtckpt.checkpoint.saving import save_handle
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.save import BegunSave, SaveAttempt
from dtckpt.checkpoint.saving.save_handle import SaveHandle, SaveProgress, SaveStats
from dtckpt.checkpoint.saving.staging import BucketSource, StagingMemory, stage_in_buckets
from dtckpt.checkpoint.saving.state import State, state_of_tree
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.storage.location import Location

__all__ = ["SaveHandle", "SaveProgress", "SaveStats", "save_async", "start_save"]

_staging_memory = StagingMemory()
"""Used by the one save in flight only."""


def save_async(
    path: str | Location,
    tree: Any,
    *,
    options: SaveOptions | None = None,
    step: int | None = None,
    group: Group | None = None,
    base: str | Location | None = None,
) -> SaveHandle:
    """Save a state tree in the background; return when it is copied to host memory and all clients agree on it.

    Later changes of the tensors do not change the checkpoint. The host memory is kept for the next save. The call
    plans and copies; digests, writing and the commit follow in the background. With ``options.staging_nbytes`` the
    copies that wait to be written are bounded, and the call also writes all but the last of them.

    One save at a time is in flight in a process: a further `save_async` or `save`, or a restore over several clients,
    waits for it. If a save fails and its handle has not raised the error, the next `save_async` or `save` raises it. A
    process that exits commits its save first; a process that is killed leaves the old checkpoint or the new one. A
    forked process does not take part in the save, which goes on in its parent.

    Collective: As `dtckpt.save`; the barriers ``save/begin``, ``save/described`` and ``save/united`` in the call, the
    others in the background. Clients start saves and restores in the same order.

    Blocks: On a save in flight, on the copy, and on the slowest client, at most ``options.timeout_s`` seconds each.

    Args:
        path: As for `dtckpt.save`.
        tree: As for `dtckpt.save`.
        options: See `SaveOptions`.
        step: As for `dtckpt.save`.
        group: As for `dtckpt.save`.
        base: As for `dtckpt.save`. Parts that have not changed are not copied to host memory, either.

    Raises:
        CoordinationError: The save in flight did not end in time.
        DtckptError: An error of `dtckpt.save` that is found before anything is written; or the error of the last save,
            if its handle has not raised it.

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
    participants = participants_of(group, coordination.member)
    return start_save(
        path,
        # Runs inside the first round, so that an error of one client is its vote and reaches all.
        lambda: state_of_tree(tree, options, coordination.member.client, participants),
        options=options,
        coordination=coordination,
        participants=participants,
        step=step,
        base=base,
    )


def start_save(
    path: str | Location,
    collect: Callable[[], State],
    *,
    options: SaveOptions,
    coordination: Coordination,
    participants: Sequence[int] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    then: Callable[[SaveHandle], object] = lambda _: None,
    step: int | None = None,
    follow_link: bool = True,
    base: str | Location | None = None,
) -> SaveHandle:
    """Run the save protocol, in the background after its first round. Collective and errors: as `save_async`.

    Args:
        path: Where the checkpoint will be.
        collect: Returns this client's description of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The connection to the other clients.
        participants: The clients that save; default: all of the job.
        extra_files: Files, by name, that the leader adds to the checkpoint.
        then: Called in the background when the save has ended, well or not.
        step: As for `dtckpt.save`.
        follow_link: Whether ``path`` may be a link to the place of the checkpoint.
        base: As for `dtckpt.save`.
    """
    start = time.monotonic()

    def stage(state: State, plan: SavePlan, collective: Collective) -> State:
        with_copies, nbytes = bool(options.check_replicas), options.staging_nbytes
        if nbytes is not None:
            return stage_in_buckets(state, plan, collective.client, with_copies=with_copies, nbytes=nbytes)
        return _staging_memory.stage(
            state, plan, collective.client, with_copies=with_copies, count=collective.phases.count
        )

    attempt = SaveAttempt(
        path,
        collect,
        options,
        coordination,
        participants,
        stage=stage,
        extra_files=extra_files,
        step=step,
        follow_link=follow_link,
        base=base,
    )
    with ExitStack() as stack:
        # First the turn: one block of staging memory serves one save at a time.
        turn = save_handle.take_turn(options.timeout_s)
        stack.callback(turn.release)
        stack.enter_context(attempt.collective.process_lock())
        # The copy runs in here, while this client waits for the verdict of ``save/begin``.
        begun = attempt.begin()
        # If the save cannot begin, the stack releases the locks; from here on the background thread does.
        locks = stack.pop_all()
    buckets = source if isinstance(source := begun.agreed.state.source, BucketSource) else None
    # The time for which the program, and so training, stood still.
    blocking_s = time.monotonic() - start
    # The locks are released before ``then`` is called: other saves need not wait for the removal of old checkpoints.
    handle = SaveHandle(begun.where, attempt.collective.phases, timeout_s=options.timeout_s, blocking_s=blocking_s)
    if buckets is None:
        handle.launch(begun.complete, locks, then)
        return handle
    handle.launch(lambda: _complete(begun, buckets), locks, then)
    buckets.wait()
    handle.blocking_s = time.monotonic() - start
    return handle


def _complete(begun: BegunSave, buckets: BucketSource) -> SaveReport:
    try:
        return begun.complete()
    finally:
        buckets.end()
