"""`DtckptStorageWriter`: DCP's ``save`` and ``async_save`` write checkpoints of this library.

::

    all ranks      set_up_storage_writer, prepare_local_plan
    coordinator    prepare_global_plan      begin an attempt, choose the chunks, announce both to all ranks
    all ranks      write_data               write chunks into the attempt
    coordinator    finish                   put split chunks together, merge, commit

DCP does not tell a writer that a save has failed. So an attempt that was not committed is removed when its thread
begins the next save with the same writer, or lets the writer go. At the latest, the next save to the path removes it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan as DcpPlan
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dtckpt.checkpoint.foreign.dcp_metadata import OWN_MARKER
from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.construction import Merge
from dtckpt.checkpoint.saving.state import MemorySource
from dtckpt.checkpoint.saving.stored_dtypes import validate_all_used
from dtckpt.checkpoint.saving.write import ClientWriter
from dtckpt.checkpoint.timing import Phases
from dtckpt.comm import fork_guard
from dtckpt.comm.torch_private import cached_global_plans
from dtckpt.config import Config
from dtckpt.errors import (
    BarrierConflictError,
    CheckpointError,
    ConfigError,
    DtckptError,
    SaveDisagreementError,
)
from dtckpt.format import tree as trees
from dtckpt.format.names import DCP_METADATA_NAME
from dtckpt.interop.dcp.client_parts import ClientPart, parts_of, plan_of_parts
from dtckpt.interop.dcp.columns import ShortMetadata, WriteItems, WriteResults
from dtckpt.interop.dcp.known_saves import known_saves, note_saves
from dtckpt.interop.dcp.rank_items import resolve_copies, resolve_items
from dtckpt.interop.dcp.save_operation import (
    Announcement,
    SaveOperation,
    forget_announcement,
    rank_folder,
    received_announcement,
    share_of,
    validate_free,
)
from dtckpt.interop.dcp.write_plan import (
    boxes_of_plans,
    plan_boxes,
    plan_share,
    shares_of,
)
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import Location, location_of
from dtckpt.storage.url import Url


class DtckptStorageWriter(StorageWriter):
    """Writes checkpoints of ours through `torch.distributed.checkpoint`.

    The result is an ordinary checkpoint: `dtckpt.restore` reads it, and every other reader of the format. The
    checkpoint appears at the path in one step when all of it is written; until then the path is unchanged. If a rank
    fails, DCP raises a ``CheckpointException`` on all, and nothing is committed.

    Tensors are named by the keys that lead to them in the state dict, joined with ``/``. Items that are no tensors must
    be values that a state tree can hold (docs/checkpointing.md); they are stored as such, and nothing is pickled.

    The writer may be used again, after a failure too, and by several threads at the same time, to different paths.

    Args:
        path: Directory or URL of the checkpoint. The ``checkpoint_id`` of a save takes its place.
        overwrite: Replace a checkpoint at the path, which stays until the new one is durable. Default:
            ``options.overwrite``; without options True, as in DCP's own writer. A warning tells of a checkpoint that
            this run has neither saved nor loaded.
        options: See `SaveOptions`; the same on all ranks. ``progress`` and ``timeout_s`` have no effect.

    Attributes:
        save_id: A random id, as DCP's own writer has; `reset` changes it.

    Raises:
        ConfigError: A checkpoint cannot have such a path, or ``options.keys`` is not ``union``.

    >>> import tempfile, torch, torch.distributed.checkpoint as dcp
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> metadata = dcp.save({"w": torch.ones(2)}, storage_writer=DtckptStorageWriter(path), no_dist=True)
    >>> import dtckpt
    >>> dtckpt.restore(path)["w"]
    tensor([1., 1.])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__()
        options = dataclasses.replace(options or SaveOptions(overwrite=True), progress=False)
        if options.keys != "union":
            raise ConfigError(f"DCP's planner decides which keys are saved; got SaveOptions(keys={options.keys!r})")
        self._options = options if overwrite is None else dataclasses.replace(options, overwrite=overwrite)
        self._decider = "SaveOptions" if overwrite is None else "DtckptStorageWriter"  # decides about an overwrite
        self._path = None if path is None else location_of(path)
        self.save_id = str(uuid.uuid4())
        self._process = os.getpid()
        self._thread = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        # A save goes on in the thread that began it; the process that DCP saves in begins its own.
        own = {name: value for name, value in vars(self).items() if name != "_thread"}
        return {**own, "_known": known_saves()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        note_saves(state["_known"])
        vars(self).update({name: value for name, value in state.items() if name != "_known"})
        self._thread = threading.local()

    @property
    def checkpoint_id(self) -> str | Path | None:
        """The path or URL of the checkpoint."""
        where = self._where()
        return where if where is None or isinstance(where, Path) else str(where)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can have this path or URL."""
        try:
            commit_target_of(location_of(checkpoint_id))
        except DtckptError:
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return the facts about the checkpoint for DCP's planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save: give up this thread's unfinished save, and take the new path if there is one."""
        self._thread.operation = None
        self._thread.path = None
        if checkpoint_id:
            # Saves of other threads, which have begun with another path, keep theirs.
            self._path = self._thread.path = location_of(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002  (DCP's)
        """Begin a save on this rank.

        Args:
            is_coordinator: Whether this rank commits.
            args: Ignored.
            kwargs: ``rank`` and ``use_collectives``, as DCP passes them. Without collectives, each rank writes a
                separate checkpoint, ``rank_0`` and so on below the path.

        Raises:
            CheckpointError: There is no path.
            CheckpointExistsError: Without collectives: there is a checkpoint of all ranks at the path.
            ConfigError: Another process saves for the process that made the writer, and the path is in its memory.
            ForkedProcessError: The parent of this forked process uses checkpoints.
        """
        fork_guard.claim_process()
        forget_announcement()
        self._thread.operation = None  # an attempt of a failed save goes first
        where = self._where()
        if where is None:
            raise CheckpointError("there is no path to save to; pass checkpoint_id, or DtckptStorageWriter(path)")
        if isinstance(where, Url) and where.scheme == "memory" and os.getpid() != self._process:
            raise ConfigError(
                f"{where} would be in the memory of this process, which saves for process {self._process}, and end "
                "with it; save elsewhere, or in a thread"
            )
        is_alone = not kwargs.get("use_collectives", True)
        if is_alone:
            validate_free(where)
            where = where / rank_folder(kwargs["rank"])
        self._thread.operation = SaveOperation(commit_target_of(where))

    def prepare_local_plan(self, plan: DcpPlan) -> DcpPlan:
        """Return the plan in a form that is sent quickly, with a second list of the items.

        The planner will have one rank write each box; by the second list the coordinator knows which ranks have copies.
        """
        items = WriteItems(plan.items)
        return dataclasses.replace(plan, items=items, storage_data=items)

    def prepare_global_plan(self, plans: list[DcpPlan]) -> list[DcpPlan]:
        """Choose the chunks of all tensors, begin an attempt, and announce it to all ranks. Called by the coordinator.

        Raises:
            CheckpointExistsError: The path has a checkpoint that may not be replaced, or other files.
            TreeError: Two tensors would have one name.
            TensorNameError: A key cannot be a part of a tensor's name.
            DTypeError: A dtype cannot be stored.
            ConfigError: A pattern of ``stored_dtypes`` matches no tensor, or storage does not support the options.
            SaveDisagreementError: Copies cannot be compared, as the planner has dropped the ranks of the copies.
        """
        operation, options = self._operation(), self._options
        # Planners that cache send only plans that have changed. A rank whose plan has not may have new chunks all the
        # same, as they depend on the boxes of all ranks.
        known = plans if all(plan.usable for plan in plans) else cached_global_plans(plans)
        shares: Sequence[Any] = [None] * len(plans)
        if known is not None:
            with gc_paused():
                tensors = boxes_of_plans(known)
                planned = plan_boxes(tensors.values(), options, len(plans))
                validate_all_used(tuple(rule[0] for rule in options.stored_dtypes), planned)
                shares = shares_of(known, tensors, planned, options)
        token = operation.lead(options, self._decider)
        where = str(operation.target.where)
        return [
            dataclasses.replace(
                plan, items=WriteItems(plan.items), storage_data=Announcement(token, where, options, share)
            )
            for plan, share in zip(plans, shares, strict=True)
        ]

    def write_data(self, plan: DcpPlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks into the attempt; the returned future is done. Blocks: On storage.

        Raises:
            TreeError: An item is neither a tensor nor a value that a state tree can hold; the text names the key.
            DTypeError: A tensor is not dense memory.
            SaveDisagreementError: The ranks' writers have different options.
            BarrierConflictError: The ranks save to different paths.
            StorageError: Storage refused, or another attempt took over.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner))
        return future

    def _write(self, plan: DcpPlan, planner: SavePlanner) -> WriteResults:
        """Write this rank's chunks, and digest its copies; return a result for each item, with the rank's part."""
        operation, told = self._operation(), received_announcement()
        where = operation.target.where
        _validate_same(told, str(where), self._options)
        share = share_of(told, plan.storage_data)
        _validate_paths(plan, planner)
        if not plan.items and not share.shared:
            return WriteResults()
        phases = Phases("save", share.client, lambda _: None)
        with phases.operation(where, is_shown=False), operation.joined(told.token) as attempt:
            with phases.measure("plan"), gc_paused():
                items = resolve_items(plan.items, planner, share, plan.planner_data)
                own = plan_share(share, plan.items, items.dtypes, items.inner, self._options)
            with phases.measure("write"):
                chunk_list = None
                if plan.items:
                    writer = ClientWriter(
                        own,
                        attempt,
                        client=share.client,
                        clients=(),
                        source=items.source,
                        options=self._options,
                        count=phases.count,
                    )
                    if own.has_moves:
                        writer.hand_over()
                    chunk_list = writer.write()
                copies = resolve_copies(share.shared, planner, plan.planner_data)
        part = ClientPart(
            told.token,
            share.topic,
            chunk_list,
            items.dtypes,
            items.values,
            items.inner,
            items.layouts,
            copies,
            phases.costs if plan.items else {},
        )
        with gc_paused():
            return WriteResults(
                (WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items), part
            )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge the parts of all ranks, and commit. Called by the coordinator.

        Raises:
            SaveDisagreementError: The ranks have not written as planned, or have different values under one key.
            ComponentError: Ranks have tensors of different shapes or dtypes under one name.
            ReplicaMismatchError: Ranks have tensors with different elements under one name.
            CheckpointCorruptError: A rank's files differ from its message.
            CheckpointExistsError: Something took the path meanwhile.
            StorageError: Storage refused, or another attempt took over.
        """
        operation, options = self._operation(), self._options
        # One more client, which puts split chunks together, and writes the documents.
        assembler = len(results)
        with operation.ended() as (construction, attempt):
            with construction.takeover_explained():
                with gc_paused():
                    parts = parts_of(results, attempt.token)
                    plan, tree = plan_of_parts(metadata, results, parts, options)
                writer = ClientWriter(
                    plan,
                    attempt,
                    client=assembler,
                    clients=(assembler,),
                    source=MemorySource({}),
                    options=options,
                    count=lambda _: None,
                )
                written = {client: part.chunk_list for client, part in parts.items() if part.chunk_list is not None}
                chunk_lists = {**written, assembler: writer.write()}
            merge = Merge(
                plan=plan,
                chunk_lists=chunk_lists,
                tree=trees.dump(tree),
                job=Config.from_environ().job_name,
                num_clients=len(results),
                costs={client: parts[client].costs for client in written},
                document_writers=(assembler,),
            )
            construction.commit(merge, options, markers={DCP_METADATA_NAME: OWN_MARKER})
        metadata.storage_meta, metadata.version = self.storage_meta(), CURRENT_DCP_VERSION
        ShortMetadata.shorten(metadata)
        self._thread.operation = None

    def _where(self) -> Location | None:
        own: Location | None = getattr(self._thread, "path", None)
        return own or self._path

    def _operation(self) -> SaveOperation:
        operation: SaveOperation | None = getattr(self._thread, "operation", None)
        if operation is None:
            raise CheckpointError("set_up_storage_writer must be called first, in the same thread")
        return operation


def _validate_paths(plan: DcpPlan, planner: SavePlanner) -> None:
    """Refuse a cached plan of a state dict that had the same keys at other paths, as ``{"a": {"b.c": 1}}`` has."""
    planned, present = plan.planner_data, getattr(planner, "mappings", None)
    if isinstance(planned, Mapping) and isinstance(present, Mapping) and present is not planned:
        moved = [key for key, path in planned.items() if present.get(key, path) != path]
        if moved:
            raise SaveDisagreementError(
                f"the planner's cached plan has item {moved[0]!r} at {planned[moved[0]]}, and the state dict at "
                f"{present[moved[0]]}; make a planner without enable_plan_caching"
            )


def _validate_same(told: Announcement, where: str, options: SaveOptions) -> None:
    if told.where != where:
        raise BarrierConflictError(f"this rank saves to {where!r}, and the coordinator to {told.where!r}")
    if told.options != options:
        raise SaveDisagreementError(
            "this rank and the coordinator save with different options; pass the same on every rank"
        )
