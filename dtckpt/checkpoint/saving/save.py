"""`save`: write a state tree as one checkpoint, together with all clients of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.participants import Group, participants_of
from dtckpt.checkpoint.saving import save_handle
from dtckpt.checkpoint.saving.attempt import SaveAttempt
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.state import State, state_of_tree
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.storage.location import Location


def save(
    path: str | Location,
    tree: Any,
    *,
    options: SaveOptions | None = None,
    step: int | None = None,
    group: Group | None = None,
) -> SaveReport:
    """Save a state tree as the checkpoint at ``path``.

    Clients may pass different keys: the checkpoint is the union of what they pass. A key is saved by all who pass it,
    and must be the same there: a tensor of one shape and dtype, whose shards are equal or apart, or one plain value. A
    tensor on a slice of a mesh is one tensor with those of the same name on the other slices.

    Collective: Over all clients of the job, or those of ``group``; barriers ``save/begin``, ``save/written`` and
    ``save/merged`` (and ``save/edges`` where unevenly nested shards share chunks; ``save/described`` and
    ``save/united`` where clients pass different things for the first time). Every client returns, or every
    client raises the same error. After an error the path holds what it held before; or, if a client was lost or
    storage failed during the commit, the new checkpoint. It never holds anything else.

    Blocks: On storage, and on the slowest client, at each barrier at most ``options.timeout_s`` seconds; before that,
    on a `save_async` in flight. If that save failed and nobody has looked at its error, the error is raised here, and
    nothing is saved.

    Args:
        path: Directory of the checkpoint, whose parents are made; or a URL.
        tree: Nested containers of DTensors (also PyTorch's), tensors (a copy on every client that passes them, or parts
            as `Shards`), plain values, and objects with ``state_dict()`` and ``load_state_dict()``. Containers are
            dicts, lists, tuples, those of `collections`, namespaces, named tuples and dataclasses; see
            docs/checkpointing.md.
        options: See `SaveOptions`.
        step: The step of the training run, from 0 on, which tells which save this is. Clients compare it, so that a
            save that one of them began alone, or skipped, is never joined to another step of the others. Default:
            clients compare how many saves each has begun, which is as good unless clients skip saves while others go
            on without them.
        group: The clients that save: a process group, or a sequence of client ids; default: all clients of the job.
            Groups without a common client may save at the same time, to different paths.

    Raises:
        CheckpointExistsError: There is something at the path; ``options.overwrite`` replaces a checkpoint.
        TreeError: The tree holds something that cannot be saved.
        TensorNameError: A key cannot be part of a tensor's name.
        DTypeError: A tensor's dtype cannot be stored, or the tensor is not dense memory of its own.
        SaveDisagreementError: Clients pass different values under one key; or nobody passes a part of a tensor; or,
            with ``SaveOptions(keys="same")``, some clients lack a key; or clients are at different saves. Nothing is
            committed then, and the next save finds them level.
        ComponentError: Clients disagree on a tensor's shape, dtype or layout.
        ReplicaMismatchError: Copies of one value differ; see `SaveOptions.check_replicas`, `Shards` and `PerClient`.
        MeshError: ``group`` lacks this client, or names one that the job does not have.
        ConfigError: The step is none.
        ClientLostError: A client died.
        BarrierTimeoutError: A client did not arrive in time.
        StorageError: Storage refused; `StorageFullError` and `StoragePermissionError` are its common cases.

    >>> import tempfile, torch, dtckpt
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> report = dtckpt.save(path, {"weight": torch.ones(2, 3), "step": 1})
    >>> dtckpt.restore(path)["step"]
    1
    """
    coordination = current_coordination()
    options = options or SaveOptions()
    participants = participants_of(group, coordination.member)
    return save_state(
        path,
        lambda: state_of_tree(tree, options, coordination.member.client, participants),
        options=options,
        coordination=coordination,
        participants=participants,
        step=step,
    )


def save_state(
    path: str | Location,
    collect: Callable[[], State],
    *,
    options: SaveOptions | None = None,
    coordination: Coordination | None = None,
    participants: Sequence[int] | None = None,
    step: int | None = None,
) -> SaveReport:
    """Run the save protocol. Collective and errors: as `save`, over ``participants``.

    Args:
        path: Where the checkpoint will be.
        collect: Returns this client's description of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The connection to the other clients; default: that of this process.
        participants: The clients that save; default: all of the job.
        step: Which save this is; see `save`.
    """
    options = options or SaveOptions()
    save_handle.wait_until_free(options.timeout_s)
    attempt = SaveAttempt(path, collect, options, coordination or current_coordination(), participants, step=step)
    with attempt.collective.process_lock():
        return attempt.begin().complete()
