"""`convert`: write a checkpoint anew in another format, in one process and in bounded memory.

The target is files of another library (`dtckpt.checkpoint.converting.files_target`), or a checkpoint of this library
(`CheckpointConversion`), which the machinery of resharding writes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

import torch

from dtckpt.checkpoint.converting.export import Export, ExportedTensor, plan_export
from dtckpt.checkpoint.converting.files_target import FilesConversion
from dtckpt.checkpoint.converting.report import ConvertedTensor, ConvertReport, SourceAccount, validate_all_read
from dtckpt.checkpoint.converting.targets import FILE_TARGETS, KVSTORE_OF, target_names, target_of
from dtckpt.checkpoint.converting.write_files import read_content
from dtckpt.checkpoint.leaves import dtype_name
from dtckpt.checkpoint.open import MapLike, open_checkpoint
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.resharding.checkpoint_source import CheckpointSource, Progress
from dtckpt.checkpoint.resharding.reshard_plan import MIN_CHUNK_NBYTES, Budget, saved_only, validate_memory
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.restoring.rename_rules import Rename
from dtckpt.checkpoint.saving.plan import Holding, TensorSpec, copies_of, holdings_of, plan_save
from dtckpt.checkpoint.saving.save import save_state
from dtckpt.checkpoint.saving.state import State
from dtckpt.coordination.api import Member
from dtckpt.coordination.single_client import SingleClientCoordination
from dtckpt.errors import CheckpointCorruptError, CheckpointExistsError, ConfigError, MeshError
from dtckpt.format import tree as trees
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import Location, location_of, validate_not_nested
from dtckpt.storage.zarr_files import validate_kind

DEFAULT_MAX_MEMORY = 256 << 20
DEFAULT_SHARD_NBYTES = 5_000_000_000
"""Bound on the elements of one file of several."""


def convert(
    src: str | Location,
    dst: str | Location,
    *,
    to: str | None = None,
    select: str | Sequence[str] = (),
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    tied: Mapping[str, str] | None = None,
    map: MapLike | None = None,  # noqa: A002  (as the option of the command)
    mesh: Mesh | None = None,
    layouts: Layouts | None = None,
    max_shard_size: int = DEFAULT_SHARD_NBYTES,
    max_memory: int = DEFAULT_MAX_MEMORY,
    options: SaveOptions | None = None,
    overwrite: bool = False,
    ignore_rest: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write a checkpoint anew in another format.

    The source may be a checkpoint of this library, or of another library that `dtckpt.open_checkpoint` reads. The call
    runs in this process alone and holds at most ``max_memory`` bytes of tensor data. Content digests prove that no
    tensor has changed: the digests of the source, or else of the elements that were read, are compared with the digests
    of the target. Only then the target appears, whole. After an error ``dst`` is as it was before.

    Blocks: On storage.

    Args:
        src: Path or URL of the source.
        dst: Path of the target; for ``dtckpt`` and ``zarr`` a URL will do, too.
        to: Format of the target. Of this library: ``dtckpt``, or ``zarr`` (dtckpt's format as plain Zarr v3 arrays). Of
            others: ``safetensors``, ``dcp`` (a directory of ``torch.distributed.checkpoint``), ``torch`` (a file of
            ``torch.save``), ``orbax``, or ``tensorflow`` (a directory with a V2 checkpoint). Default: the format of the
            suffix of ``dst``, or else ``dtckpt``.
        select: Globs over names of tensors and paths of values: only these are written. Default: everything.
        rename: New names of the selected tensors and values, as for `dtckpt.RestoreOptions`.
        dtype: New dtype of the floating-point tensors; rounded to nearest even.
        tied: By new name of a tensor, the new name of the tensor that it is tied to. Where the format allows it, only
            the latter is stored. Tensors that are stored once in the source, under several names, are tied without
            being named.
        map: Rules for other names and shapes of the tensors of ``src``, as for `dtckpt.open_checkpoint`. They come
            before ``select`` and ``rename``, which take the new names.
        mesh: For ``dtckpt`` and ``zarr``: mesh whose shards the chunks are made for, as in `dtckpt.reshard`. Default:
            the layouts of the source.
        layouts: With ``mesh``: layouts by name or glob.
        max_shard_size: Bound on the bytes of tensor data in one of several files; a larger tensor has a file to
            itself.
        max_memory: Bound on the bytes of tensor data in memory.
        options: For ``dtckpt`` and ``zarr``: options of the save, but ``kvstore`` and ``overwrite``.
        overwrite: Whether a checkpoint at ``dst`` is replaced, once the new one is durable.
        ignore_rest: Whether files beside another library's checkpoint, notes in its files, and values that dtckpt does
            not read are left behind. The report names them. Default: without ``select``, they are an error.
        dry_run: Plan and report only.
        progress: Called with the new name of a tensor and its bytes that were handed to storage since the last call.

    Raises:
        ConfigError: An argument cannot be used as given, or ``max_memory`` is less than one stored chunk needs.
        TensorNotFoundError: A glob or rule matches nothing.
        TensorNameError: Two tensors would have one name, or the format cannot store a tensor's name.
        DTypeError: The format lacks a tensor's dtype.
        CheckpointCorruptError: The source is damaged, or a tensor would change.
        CheckpointExistsError: ``dst`` is taken.
        TreeError: A value is of a class that only code could make.
        CheckpointError: As for `dtckpt.open_checkpoint` and `dtckpt.save`; or something would be left behind.

    >>> import tempfile, torch, dtckpt
    >>> folder = tempfile.mkdtemp()
    >>> report = dtckpt.save(f"{folder}/step_1", {"model": {"w": torch.ones(2, 3)}, "step": 1})
    >>> rules = {"model/*": "*"}
    >>> report = dtckpt.convert(f"{folder}/step_1", f"{folder}/m.safetensors", select="model/*", rename=rules)
    >>> dtckpt.restore(f"{folder}/m.safetensors")["w"].shape
    torch.Size([2, 3])
    """
    start = time.monotonic()
    where = location_of(dst)
    form = _format(to, where)
    validate_sizes(max_memory, max_shard_size)
    _validate_arguments(form, mesh, layouts, options)
    with open_checkpoint(src, map=map) as checkpoint:
        validate_not_nested(checkpoint.path, where)
        globs = [select] if isinstance(select, str) else select
        if not ignore_rest:
            validate_all_read(checkpoint, globs)
        new_dtype = None if dtype is None else dtype_name(dtype)
        target = FILE_TARGETS.get(form)
        export = plan_export(
            checkpoint,
            select=globs,
            rename=rename,
            dtype=new_dtype,
            tied=tied,
            is_numbered=target is not None and target.numbers_parameters,
        )
        validate_tied(checkpoint, export, tied or {})
        conversion: _Conversion
        dropped: Mapping[str, str] = {}
        if target is not None:
            dropped = target.dropped(export.structure)
            conversion = FilesConversion(
                checkpoint,
                export,
                where,
                target,
                max_memory=max_memory,
                max_file_nbytes=max_shard_size,
                overwrite=overwrite,
            )
        else:
            save_options = replace(options or SaveOptions(), kvstore=KVSTORE_OF[form], overwrite=overwrite)
            conversion = CheckpointConversion(
                checkpoint, export, where, save_options, max_memory=max_memory, mesh=mesh, layouts=layouts
            )
            export = replace(export, tied={})
        conversion.check()
        contents = {} if dry_run else conversion.run(progress)
        return ConvertReport(
            source=checkpoint.path,
            target=where,
            source_format=checkpoint.format,
            format=form,
            tensors=[_converted(tensor, export, contents) for tensor in export.tensors],
            files=conversion.files,
            values=[path for path, _ in trees.value_nodes(export.structure)],
            account=SourceAccount.of(checkpoint, export.taken, dropped),
            max_memory=max_memory,
            seconds=time.monotonic() - start,
        )


class _Conversion(Protocol):
    """A conversion, planned."""

    @property
    def files(self) -> Mapping[str, int]:
        """Bytes of the files that are written, by name; none for a checkpoint of this library."""
        ...

    def check(self) -> None:
        """Check that the target may be written."""
        ...

    def run(self, progress: Progress | None) -> Mapping[str, int]:
        """Write and commit; return the content digests of the new tensors by name."""
        ...


def _format(to: str | None, where: Location) -> str:
    """Return the format of the target."""
    if to is None:
        return target_of(where.name)
    if to not in target_names():
        raise ConfigError(f"format cannot be used; got {to!r}, expected one of {', '.join(target_names())}")
    return to


def _validate_arguments(form: str, mesh: Mesh | None, layouts: Layouts | None, options: SaveOptions | None) -> None:
    if form in FILE_TARGETS and not (mesh is None and layouts is None and options is None):
        raise ConfigError(f"a mesh, layouts and options are for checkpoints of dtckpt; got them for {form}")
    if layouts is not None and mesh is None:
        raise ConfigError("layouts need a mesh; got layouts alone")
    if options is not None and (options.stored_dtypes or options.save_as_bf16):
        raise ConfigError("convert keeps stored dtypes; got option stored_dtypes or save_as_bf16, pass dtype instead")


def validate_sizes(max_memory: int, max_shard_size: int) -> None:
    """Refuse bounds that are no sizes."""
    if max_memory <= 0 or max_shard_size <= 0:
        raise ConfigError(f"sizes must be positive; got max_memory {max_memory}, max_shard_size {max_shard_size}")


def validate_tied(checkpoint: Checkpoint, export: Export, tied: Mapping[str, str]) -> None:
    """Check that tensors which the caller ties have equal elements."""
    by_name = {tensor.name: tensor for tensor in export.tensors}
    for name, kept in tied.items():
        one, other = (_content(checkpoint, by_name[each]) for each in (name, kept))
        if one != other:
            raise CheckpointCorruptError(f"tensors {name!r} and {kept!r} cannot be tied: their elements differ")


def _content(checkpoint: Checkpoint, tensor: ExportedTensor) -> int:
    return read_content(checkpoint, tensor) if tensor.content is None else tensor.content


def _converted(tensor: ExportedTensor, export: Export, contents: Mapping[str, int]) -> ConvertedTensor:
    tied_to = export.tied.get(tensor.name)
    return ConvertedTensor(
        name=tensor.info.name,
        new_name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.info.dtype_name,
        new_dtype=tensor.dtype,
        nbytes=tensor.nbytes if tied_to is None else 0,
        tied_to=tied_to,
        content_digest=contents.get(tied_to or tensor.name),
    )


_WRITERS = (0,)
"""This process writes all shards, whichever client will read them."""


class CheckpointConversion:
    """A conversion to this library's format, planned.

    Args:
        checkpoint: The source.
        export: The tensors and values to write.
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
    # A tensor that is rounded on storage stays so, unless it gets another dtype.
    stored = info.stored_dtype_name if tensor.dtype == info.dtype_name else tensor.dtype
    boxes = copies_of(_WRITERS, info.shape) if layout is None else holdings_of(layout, info.shape)
    holdings = saved_only(tuple(Holding(box.region, _WRITERS) for box in boxes), info)
    content = info.content_digest if stored == info.stored_dtype_name else None
    return TensorSpec(tensor.name, info.shape, tensor.dtype, stored, holdings, layout, content, codec or info.codec)
