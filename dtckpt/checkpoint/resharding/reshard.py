"""`reshard`: write a checkpoint anew for the shards of another mesh, in bounded memory, in one process or several.

A reshard is a save whose elements come from a checkpoint (`CheckpointSource`) and not from tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dtckpt.checkpoint.converting.report import SourceAccount, validate_all_read
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.resharding.reshard_plan import (
    DEFAULT_MAX_MEMORY,
    ReshardedTensor,
    ReshardTarget,
    plan_reshard,
    share_out,
)
from dtckpt.checkpoint.resharding.workers import PartReport, SharedAttempt, Worker
from dtckpt.checkpoint.restoring.layout_choice import Layouts
from dtckpt.checkpoint.saving.plan import TensorSpec
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.coordination.api import Member
from dtckpt.coordination.single_client import SingleClientCoordination
from dtckpt.errors import ConfigError, MeshTypeError
from dtckpt.format.dtypes import is_floating
from dtckpt.format.tree import value_nodes
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_by_rename import DirectoryTarget
from dtckpt.storage.location import Location, location_of, validate_not_nested
from dtckpt.storage.zarr_files import validate_kind

if TYPE_CHECKING:
    import torch

    from dtckpt.checkpoint.resharding.checkpoint_source import CheckpointSource, Progress


@dataclass(frozen=True, slots=True, eq=False)
class ReshardReport:
    """The result of resharding, or of a dry run (then ``save`` is None)."""

    source: Location
    target: Location
    mesh: Mesh
    tensors: Sequence[ReshardedTensor]
    max_memory: int
    read_nbytes: int
    """Bytes of tensor data, before compression, that the plan reads from the source; with several workers, all read."""
    save: SaveReport | None
    account: SourceAccount
    """The outcome for every file and key of the source."""
    part: PartReport | None = None
    """The result of this worker, if there are several."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the new checkpoint."""
        return sum(tensor.new_nbytes for tensor in self.tensors)


def reshard(
    src: str | Location,
    dst: str | Location,
    *,
    mesh: Mesh,
    layouts: Layouts | None = None,
    dtype: torch.dtype | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    options: SaveOptions | None = None,
    ignore_rest: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    worker: Worker | None = None,
) -> ReshardReport:
    """Write checkpoint ``src`` anew as ``dst``, chunked for the shards of another mesh.

    Values, names and structure stay. Before the new checkpoint appears, the content digests of all tensors prove that
    their values stayed. The call runs in this process alone, and needs none of the mesh's devices. The new checkpoint
    appears whole or not at all.

    Blocks: On storage.

    Args:
        src: The checkpoint to read.
        dst: Path or URL of the new checkpoint.
        mesh: Target mesh, as from `dtckpt.layout.clients.abstract_mesh`.
        layouts: As for `dtckpt.restore`: layouts on ``mesh`` by name or glob; other tensors keep their saved specs as
            far as the mesh has those axes.
        dtype: New dtype of the floating-point tensors; rounded to nearest even.
        max_memory: Bound on the bytes of tensor data in memory.
        options: Options of the save of ``dst``; without a codec, tensors keep theirs, and without ``raw_bits`` the
            checkpoint does.
        ignore_rest: Whether to leave behind the files, notes and values of another library's checkpoint that dtckpt
            does not read, as for `dtckpt.convert`.
        dry_run: Plan and report only.
        progress: See `Progress`.
        worker: This process, if several write ``dst`` together. All get the same arguments but ``worker``. Each
            writes its part, and the last worker commits. The workers need not run at the same time; a worker that
            died is called again. ``dst`` must be on a file system.

    Raises:
        MeshError: A layout is on another mesh.
        ConfigError: ``max_memory`` is less than one chunk needs, ``dtype`` is no floating-point type, or one of
            ``src`` and ``dst`` lies inside the other.
        CheckpointCorruptError: ``src`` is damaged, or a tensor's values would change.
        CheckpointExistsError: ``dst`` is taken; found before anything is planned, also in a dry run.
        CheckpointError: As for `dtckpt.open_checkpoint` and `dtckpt.save`.
    """
    options = options or SaveOptions()
    new_dtype = _validate_arguments(mesh, dtype, max_memory, options)
    place = commit_target_of(location_of(dst))
    if worker is not None and not isinstance(place, DirectoryTarget):
        raise ConfigError(f"several workers can write to a file system only; got {place.where}")
    with open_checkpoint(src) as checkpoint:
        # With several workers another one may have committed already, which is no error; see
        # `SharedAttempt.check_target`.
        if worker is None:
            place.check_target(overwrite=options.overwrite)
        validate_not_nested(checkpoint.path, place.where)
        if not ignore_rest:
            validate_all_read(checkpoint)
        if options.raw_bits is None:
            options = replace(options, raw_bits=checkpoint.format == KIND and checkpoint.manifest.raw_bits)
        infos = dict(checkpoint.tensors)
        specs = ReshardTarget(mesh, layouts, new_dtype, options.codec).specs(infos)
        validate_kind(options.kvstore, place.folder, (spec.codec for spec in specs))
        plan = plan_reshard(infos, specs, max_memory=max_memory, chunk_nbytes=options.chunk_nbytes)
        shared = None
        if worker is not None and isinstance(place, DirectoryTarget):
            parts = share_out(plan.save, plan.windows, worker.count)
            # Workers that read another source build in another directory.
            shared = SharedAttempt(place.where, parts, checkpoint.fingerprint(), worker, options)
            shared.check_target()
        saved = part = None
        if not dry_run:
            # Here, because it imports PyTorch, which takes seconds: a dry run does without it.
            from dtckpt.checkpoint.resharding.checkpoint_source import CheckpointSource

            with closing(CheckpointSource(checkpoint, plan.budget, progress)) as source:
                if shared is not None:
                    part = shared.write(source, checkpoint.tree)
                else:
                    # Replicas are not compared: a source has one copy of everything, and would read all of it again.
                    options = replace(options, chunk_nbytes=plan.chunk_nbytes, check_replicas=False)
                    saved = _save(place.where, specs, source, checkpoint.tree, options)
        values = (path for path, _ in value_nodes(checkpoint.structure))
        account = SourceAccount.of(checkpoint, {path: path for path in (*infos, *values)})
        return ReshardReport(
            checkpoint.path, place.where, mesh, plan.tensors, max_memory, plan.read_nbytes, saved, account, part
        )


def _validate_arguments(mesh: Mesh, dtype: torch.dtype | None, max_memory: int, options: SaveOptions) -> str | None:
    if not isinstance(mesh, Mesh):
        raise MeshTypeError(f"reshard needs a Mesh; got {type(mesh).__name__}")
    if max_memory <= 0:
        raise ConfigError(f"max_memory must be positive; got {max_memory}")
    if options.stored_dtypes or options.save_as_bf16:
        raise ConfigError("reshard keeps stored dtypes; got option stored_dtypes or save_as_bf16, pass dtype instead")
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and not is_floating(name):
        raise ConfigError(f"dtype for floating-point tensors must be a floating-point type; got {name}")
    return name


def _save(
    where: Location, specs: Sequence[TensorSpec], source: CheckpointSource, tree: bytes, options: SaveOptions
) -> SaveReport:
    """Save the new checkpoint: one process writes all shards, so the clients of the mesh play no part in it."""
    # Here, for the reason in `reshard`.
    from dtckpt.checkpoint.saving.save import save_state
    from dtckpt.checkpoint.saving.state import State

    state = State(tuple(specs), source, tree, contents=source.contents)
    alone = SingleClientCoordination(Member(job="reshard", client=0, num_clients=1, incarnation=secrets.randbits(63)))
    return save_state(where, lambda: state, options=options, coordination=alone)
