"""``dtckpt reshard``: check all arguments and plan the whole work, then write the new checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtckpt.cli.options import (
    KVSTORES,
    LAYOUT_HELP,
    debug_option,
    json_option,
    memory_option,
    mesh_options,
    parse_size,
    quiet_option,
    rest_options,
    return_freed_memory,
    source_and_target,
)
from dtckpt.errors import ConfigError
from dtckpt.format.codecs import CODECS

if TYPE_CHECKING:
    from dtckpt.checkpoint.resharding.workers import PartReport, Worker
    from dtckpt.cli.reshard_progress import Reporter

PART_NBYTES = 4 << 30
"""About the largest part of a checkpoint of up to `MAX_PARTS` parts; a larger checkpoint has larger parts."""
MAX_PARTS = 16
"""Each part plans the whole work again."""

EPILOG = f"""{LAYOUT_HELP}\b
Examples:
  dtckpt reshard step_100 step_100_for_4 --mesh x=4
  dtckpt reshard step_100 step_100_by_columns --mesh data=2,model=2 --layout 'model/*=unsharded,model' --dry-run
  dtckpt reshard step_100 step_100_half --mesh x=2 --dtype bfloat16 --max-memory 512MiB
  dtckpt reshard step_100 step_100_by_workers --mesh x=4 --workers 1 --worker 0 --resume

"""


@click.command("reshard", epilog=EPILOG)
@source_and_target
@mesh_options(is_required=True)
@click.option("--dtype", metavar="DTYPE", help="New dtype of the floating-point tensors, such as bfloat16.")
@click.option(
    "--format",
    "kvstore",
    type=click.Choice(KVSTORES),
    default="ocdbt",
    show_default=True,
    help="How DST is stored: few files, or a plain Zarr v3 tree.",
)
@click.option("--codec", type=click.Choice(CODECS), help="How chunks are compressed [default: as in SRC].")
@click.option(
    "--raw-bits/--no-raw-bits",
    default=None,
    help="Describe bfloat16 and float8 to other Zarr readers as unsigned integers [default: as in SRC].",
)
@memory_option("1GiB")
@rest_options
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write a part of DST only, as one of N processes that are started alike; the last one commits.",
)
@click.option(
    "--worker",
    type=click.IntRange(min=0),
    envvar="JOB_COMPLETION_INDEX",
    show_envvar=True,
    metavar="I",
    help="Which of the N, from 0.",
)
@click.option("--resume", is_flag=True, help="Keep the parts that an earlier process finished.")
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing.")
@json_option("Print one JSON line per event: start, tensor, done, error.")
@quiet_option
@debug_option
def command(
    *,
    src: str,
    dst: str,
    mesh: str,
    layouts: Sequence[str],
    layout_file: Path | None,
    dtype: str | None,
    kvstore: str,
    codec: str | None,
    raw_bits: bool | None,
    max_memory: str,
    overwrite: bool,
    ignore_rest: bool,
    workers: int | None,
    worker: int | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write checkpoint SRC anew as DST, laid out for another mesh.

    Names, values and structure stay as they are. DST appears whole or not at all.
    """
    from dtckpt.checkpoint.options import SaveOptions
    from dtckpt.checkpoint.resharding.reshard import reshard
    from dtckpt.cli.arguments import parse_dtype, parse_mesh, parse_rules
    from dtckpt.cli.reshard_progress import JsonReporter, PlanReporter, ProgressReporter

    start = time.monotonic()
    return_freed_memory()
    target_mesh = parse_mesh(mesh)
    rules = parse_rules(layouts, layout_file, target_mesh)
    run = partial(
        reshard,
        dst=dst,
        mesh=target_mesh,
        layouts=rules,
        dtype=None if dtype is None else parse_dtype(dtype),
        max_memory=parse_size(max_memory),
        ignore_rest=ignore_rest,
        options=SaveOptions(kvstore=kvstore, codec=codec, raw_bits=raw_bits, overwrite=overwrite),
    )
    own = _workers(src, dst, workers=workers, worker=worker, resume=resume, dry_run=dry_run)
    # A dry run first: it finds errors in all arguments and tensors before anything is written.
    plan = run(src, dry_run=True, worker=own[0])
    run = partial(run, plan.source)  # of a feed: the step that was planned
    rules.validate_all_used()
    if as_json:
        reporter: Reporter = JsonReporter(plan, start, kvstore, is_dry_run=dry_run)
    else:
        reporter = PlanReporter(plan, start) if dry_run else ProgressReporter(plan, start)
    with reporter:
        if not dry_run:
            parts = [run(progress=reporter.advance, worker=each).part for each in own]
            reporter.part = _notable(parts, is_asked_for=workers is not None)
        reporter.finish()


def _notable(parts: Sequence[PartReport | None], *, is_asked_for: bool) -> PartReport | None:
    """Return the last part if a user should hear of parts: one of several workers, nothing to write, or no commit."""
    last = parts[-1]
    nbytes = sum(part.nbytes for part in parts if part is not None)
    return last if last is not None and (is_asked_for or not nbytes or not last.is_committed) else None


def _workers(
    src: str, dst: str, *, workers: int | None, worker: int | None, resume: bool, dry_run: bool
) -> list[Worker] | list[None]:
    """Return the workers whose parts this process writes, in order.

    A None in their place: the process writes the whole checkpoint at once, and ``--resume`` finds no part. Without
    ``--workers``, a large checkpoint at a local path is written in parts, too.
    """
    from dtckpt.checkpoint.open import open_checkpoint
    from dtckpt.checkpoint.resharding.workers import Worker
    from dtckpt.storage.location import location_of

    count = workers
    if count is None and (dry_run or not isinstance(location_of(dst), Path)):
        return [None]
    if count is None:
        with open_checkpoint(src) as source:
            nbytes = sum(info.nbytes for info in source.tensors.values())
        count = min(MAX_PARTS, -(-nbytes // PART_NBYTES)) or 1
        if count == 1 and not resume:
            return [None]
        return [Worker(index, count, resume=resume) for index in range(count)]
    if worker is None and count > 1:
        raise ConfigError(
            f"which of the {count} workers is this? set --worker, or run in an Indexed Job of Kubernetes, which sets "
            "JOB_COMPLETION_INDEX"
        )
    index = worker if worker is not None and count > 1 else 0
    return [Worker(index, count, resume=resume)]
