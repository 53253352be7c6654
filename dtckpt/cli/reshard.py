"""``dtckpt reshard``: check all arguments and plan the whole work, then write the new checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.resharding.reshard import ReshardReport, reshard
from dtckpt.checkpoint.resharding.workers import Worker
from dtckpt.cli.arguments import LayoutRules, parse_dtype, parse_mesh, read_rules
from dtckpt.cli.freed_memory import return_freed_memory
from dtckpt.cli.plain_arguments import parse_size
from dtckpt.cli.reshard_progress import JsonReporter, PlanReporter, ProgressReporter, Reporter
from dtckpt.errors import ConfigError


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
        worker=_worker(request),
        options=SaveOptions(
            kvstore=request.kvstore, codec=request.codec, raw_bits=request.raw_bits, overwrite=request.overwrite
        ),
    )
    # A dry run first: it finds errors in all arguments and tensors before anything is written.
    plan = run(dry_run=True)
    rules.validate_all_used()
    with _reporter(request, plan, start) as reporter:
        if not request.dry_run:
            reporter.part = run(progress=reporter.advance).part
        reporter.finish()


def _worker(request: ReshardRequest) -> Worker | None:
    """Return the worker that this process is, None if it is the only one and does not resume."""
    if request.workers is None and not request.resume:
        return None
    count = 1 if request.workers is None else request.workers
    if request.worker is None and count > 1:
        raise ConfigError(
            f"which of the {count} workers is this? set --worker, or run in an Indexed Job of Kubernetes, which sets "
            "JOB_COMPLETION_INDEX"
        )
    return Worker(request.worker if request.worker is not None and count > 1 else 0, count, resume=request.resume)


def _reporter(request: ReshardRequest, plan: ReshardReport, start: float) -> Reporter:
    if request.as_json:
        return JsonReporter(plan, start, request.kvstore, is_dry_run=request.dry_run)
    if request.dry_run:
        return PlanReporter(plan, start)
    return ProgressReporter(plan, start)
