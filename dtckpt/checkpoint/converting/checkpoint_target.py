"""`CheckpointConversion`: write a checkpoint of this library from any other one, by the machinery of resharding."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint, open_checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.resharding.checkpoint_source import CheckpointSource, Progress
from dtckpt.checkpoint.resharding.reshard_plan import MIN_CHUNK_NBYTES, Budget, saved_only, validate_memory
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.saving.plan import Holding, TensorSpec, copies_of, holdings_of, plan_save
from dtckpt.checkpoint.saving.save import save_state
from dtckpt.checkpoint.saving.state import State
from dtckpt.coordination.api import Member
from dtckpt.coordination.single_client import SingleClientCoordination
from dtckpt.errors import CheckpointExistsError, MeshError
from dtckpt.format import tree as trees
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import Location
from dtckpt.storage.zarr_files import validate_kind

_WRITERS = (0,)
"""This process writes all shards, whichever client will read them."""


class CheckpointConversion:
    """A conversion to this library's format, planned.

    Args:
        checkpoint: The source.
        export: What is written.
        where: The target.
        options: Options of the save.
        max_memory: Bound on the bytes of tensor data in memory.
        mesh: As for `dtckpt.convert`.
        layouts: As for `dtckpt.convert`.

    Attributes:
        files: See `dtckpt.checkpoint.converting.report.ConvertReport`.

    Raises:
        MeshError: A layout is on another mesh.
        ConfigError: ``max_memory`` is less than one chunk needs.
        TensorNameError: A tensor's name cannot be stored.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        export: Export,
        where: Location,
        options: SaveOptions,
        *,
        max_memory: int,
        mesh: Mesh | None,
        layouts: Layouts | None,
    ) -> None:
        self.files: Mapping[str, int] = {}
        self._checkpoint = checkpoint
        self._export = export
        self._target = commit_target_of(where)
        self._budget = Budget.of(checkpoint.tensors.values(), max_memory)
        # A chunk must fit a window, as a window is made of whole chunks.
        chunk_nbytes = min(options.chunk_nbytes, max(MIN_CHUNK_NBYTES, self._budget.window))
        if options.raw_bits is None:
            options = replace(options, raw_bits=checkpoint.format == KIND and checkpoint.manifest.raw_bits)
        # Replicas are not compared: a source has one copy of everything, and would read all of it again.
        self._options = replace(options, chunk_nbytes=chunk_nbytes, check_replicas=False, content_digest=True)
        self._specs = tuple(_spec(tensor, _layout(tensor, mesh, layouts), options.codec) for tensor in export.tensors)
        validate_kind(options.kvstore, self._target.folder, (spec.codec for spec in self._specs))
        validate_memory(plan_save(self._specs, chunk_nbytes), self._budget, max_memory)

    def check(self) -> None:
        """Check that the target may be written. Raises: `CheckpointExistsError`."""
        try:
            self._target.check_target(overwrite=self._options.overwrite)
        except CheckpointExistsError as error:  # `dtckpt.convert` has an argument for it
            message = error.message.replace("SaveOptions(overwrite=True)", "overwrite=True")
            raise CheckpointExistsError(message) from error

    def run(self, progress: Progress | None) -> Mapping[str, int]:
        """Write and commit; return the content digests of the new tensors by name. Blocks: on storage.

        Raises:
            CheckpointError: As for `dtckpt.save`, and for reads of the source.
        """
        old_names = {tensor.name: tensor.info.name for tensor in self._export.tensors}
        alone = SingleClientCoordination(
            Member(job="convert", client=0, num_clients=1, incarnation=secrets.randbits(63))
        )
        with closing(CheckpointSource(self._checkpoint, self._budget, progress, old_names)) as source:
            state = State(self._specs, source, trees.dump(self._export.structure), contents=source.contents)
            save_state(self._target.where, lambda: state, options=self._options, coordination=alone)
        with open_checkpoint(self._target.where) as converted:
            contents = {name: info.content_digest for name, info in converted.tensors.items()}
        return {name: content for name, content in contents.items() if content is not None}


def _layout(tensor: ExportedTensor, mesh: Mesh | None, layouts: Layouts | None) -> Layout | None:
    if mesh is None:
        return tensor.info.layout
    layout = choose_layout(tensor.name, tensor.info, mesh, layouts)
    if layout is None or layout.mesh != mesh:
        raise MeshError(f"layout for tensor {tensor.name!r} is on another mesh; expected {mesh.to_string()}")
    return layout


def _spec(tensor: ExportedTensor, layout: Layout | None, codec: str | None) -> TensorSpec:
    """Describe the new tensor for the plan."""
    info = tensor.info
    # What was rounded on storage stays so, unless it gets another dtype.
    stored = info.stored_dtype_name if tensor.dtype == info.dtype_name else tensor.dtype
    boxes = copies_of(_WRITERS, info.shape) if layout is None else holdings_of(layout, info.shape)
    holdings = saved_only(tuple(Holding(box.region, _WRITERS) for box in boxes), info)
    content = info.content_digest if stored == info.stored_dtype_name else None
    return TensorSpec(tensor.name, info.shape, tensor.dtype, stored, holdings, layout, content, codec or info.codec)
