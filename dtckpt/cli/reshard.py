"""``dtckpt reshard``: check all arguments and plan the whole work, then write the new checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.resharding.reshard import ReshardReport, reshard
from dtckpt.checkpoint.resharding.workers import PartReport, Worker
from dtckpt.cli.arguments import LayoutRules, parse_dtype, parse_mesh, read_rules
from dtckpt.cli.freed_memory import return_freed_memory
from dtckpt.cli.plain_arguments import parse_size
from dtckpt.cli.reshard_progress import JsonReporter, PlanReporter, ProgressReporter, Reporter
from dtckpt.errors import ConfigError
from dtckpt.storage.location import location_of

PART_NBYTES = 4 << 30
"""Bytes of a part of a large checkpoint, at least."""
MAX_PARTS = 16
"""Each part plans the whole work again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardRequest:
    """The arguments of the command, as `click` passes them; see `dtckpt.cli.commands`."""

    src: str
    dst: str
    mesh: str
    layouts: Sequence[str]
    layout_file: Path | None
    dtype: str | None
    kvstore: str
    codec: str | None
    raw_bits: bool | None
    max_memory: str
    overwrite: bool
    ignore_rest: bool
    workers: int | None
    worker: int | None
    resume: bool
    dry_run: bool
    as_json: bool


def run_reshard(request: ReshardRequest) -> None:
    """Run the command.

    Raises:
        MeshError: ``--mesh`` cannot be used.
        LayoutError: A layout does not fit the mesh or a tensor, or matches no tensor.
        ConfigError: Another option cannot be used.
        CheckpointError: As for `dtckpt.reshard`.
    """
    start = time.monotonic()
    return_freed_memory()
    mesh = parse_mesh(request.mesh)
    from_file = read_rules(request.layout_file) if request.layout_file else ()
    rules = LayoutRules([*request.layouts, *from_file], mesh)
    run = partial(
        reshard,
        request.src,
        request.dst,
        mesh=mesh,
        layouts=rules,
        dtype=None if request.dtype is None else parse_dtype(request.dtype),
        max_memory=parse_size(request.max_memory),
        ignore_rest=request.ignore_rest,
        options=SaveOptions(
            kvstore=request.kvstore, codec=request.codec, raw_bits=request.raw_bits, overwrite=request.overwrite
        ),
    )
    workers = _workers(request)
    # A dry run first: it finds errors in all arguments and tensors before anything is written.
    plan = run(dry_run=True, worker=workers[0])
    rules.validate_all_used()
    with _reporter(request, plan, start) as reporter:
        if not request.dry_run:
            parts = [run(progress=reporter.advance, worker=worker).part for worker in workers]
            reporter.part = _notable(parts, is_asked_for=request.workers is not None)
        reporter.finish()


def _notable(parts: Sequence[PartReport | None], *, is_asked_for: bool) -> PartReport | None:
    """Return the last part if a user should hear of parts: one of several workers, nothing to write, or no commit."""
    last = parts[-1]
    nbytes = sum(part.nbytes for part in parts if part is not None)
    return last if last is not None and (is_asked_for or not nbytes or not last.is_committed) else None


def _workers(request: ReshardRequest) -> list[Worker] | list[None]:
    """Return the workers that this process is, one after the other; None is one that writes all and keeps no parts.

    Without ``--workers`` a large checkpoint is written in parts, too, so that ``--resume`` finds those that are done.
    """
    count = request.workers
    if count is None and (request.dry_run or not isinstance(location_of(request.dst), Path)):
        return [None]
    if count is None:
        with open_checkpoint(request.src) as source:
            nbytes = sum(info.nbytes for info in source.tensors.values())
        count = min(MAX_PARTS, -(-nbytes // PART_NBYTES)) or 1
        if count == 1 and not request.resume:
            return [None]
        return [Worker(index, count, resume=request.resume) for index in range(count)]
    if request.worker is None and count > 1:
        raise ConfigError(
            f"which of the {count} workers is this? set --worker, or run in an Indexed Job of Kubernetes, which sets "
            "JOB_COMPLETION_INDEX"
        )
    index = request.worker if request.worker is not None and count > 1 else 0
    return [Worker(index, count, resume=request.resume)]


def _reporter(request: ReshardRequest, plan: ReshardReport, start: float) -> Reporter:
    if request.as_json:
        return JsonReporter(plan, start, request.kvstore, is_dry_run=request.dry_run)
    if request.dry_run:
        return PlanReporter(plan, start)
    return ProgressReporter(plan, start)
