"""``dtckpt convert``: check all arguments and plan the whole work, then write the checkpoint in its new format."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dtckpt.checkpoint.converting.convert import convert
from dtckpt.checkpoint.converting.report import ConvertedTensor, ConvertReport
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.cli.arguments import parse_dtype
from dtckpt.cli.freed_memory import return_freed_memory
from dtckpt.cli.left_behind import account_facts, write_left
from dtckpt.cli.output import (
    format_count,
    format_shape,
    open_progress,
    write_event,
    write_line,
    write_summary,
    write_table,
)
from dtckpt.cli.plain_arguments import parse_pairs, parse_size
from dtckpt.errors import format_nbytes, printable

PROGRESS_S = 1.0
"""Seconds between two ``progress`` events, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """The arguments of the command, as `click` passes them; see `dtckpt.cli.commands`."""

    src: str
    dst: str
    to: str | None
    select: Sequence[str]
    renames: Sequence[str]
    dtype: str | None
    ties: Sequence[str]
    max_shard_size: str
    max_memory: str
    codec: str | None
    overwrite: bool
    ignore_rest: bool
    dry_run: bool
    as_json: bool


def run_convert(request: ConvertRequest) -> None:
    """Run the command.

    Raises:
        ConfigError: An option cannot be used.
        CheckpointError: As for `dtckpt.convert`.
    """
    return_freed_memory()
    renames: dict[str | re.Pattern[str], str] = dict(parse_pairs(request.renames, "rename", "OLD=NEW").items())
    run = partial(
        convert,
        request.src,
        request.dst,
        to=request.to,
        select=request.select,
        rename=renames or None,
        dtype=None if request.dtype is None else parse_dtype(request.dtype),
        tied=parse_pairs(request.ties, "tied", "NAME=KEPT"),
        max_shard_size=parse_size(request.max_shard_size),
        max_memory=parse_size(request.max_memory),
        options=None if request.codec is None else SaveOptions(codec=request.codec),
        overwrite=request.overwrite,
        ignore_rest=request.ignore_rest,
    )
    # A dry run first: it finds errors in all arguments and tensors before anything is written.
    plan = run(dry_run=True)
    if request.as_json:
        _run_as_json(run, plan, is_dry_run=request.dry_run)
    elif request.dry_run:
        _write_plan(plan)
    else:
        with open_progress("converting", plan.nbytes) as progress:
            report = run(progress=progress.advance)
        write_left(plan.account)
        rate = format_nbytes(report.nbytes / max(report.seconds, 1e-9))
        write_summary(
            f"converted {_source(plan)} to {_target(plan)}: {_totals(plan)} in {report.seconds:.1f} s ({rate}/s)"
        )


def _source(plan: ConvertReport) -> str:
    return printable(f"{plan.source} ({plan.source_format})")


def _target(plan: ConvertReport) -> str:
    return printable(f"{plan.target} ({plan.format})")


def _totals(plan: ConvertReport) -> str:
    files = f", {format_count(len(plan.files), 'file')}" if plan.files else ""
    return f"{format_count(len(plan.tensors), 'tensor')}, {format_nbytes(plan.nbytes)}{files}"


def _write_plan(plan: ConvertReport) -> None:
    """Print the plan of a dry run, a row per tensor and per file."""
    rows = [
        (
            tensor.name,
            "" if tensor.new_name == tensor.name else tensor.new_name,
            format_shape(tensor.shape),
            tensor.dtype if tensor.dtype == tensor.new_dtype else f"{tensor.dtype} -> {tensor.new_dtype}",
            format_nbytes(tensor.nbytes) if tensor.tied_to is None else f"tied to {tensor.tied_to}",
        )
        for tensor in plan.tensors
    ]
    write_table(("TENSOR", "NEW NAME", "SHAPE", "DTYPE", "SIZE"), rows)
    if plan.files:
        write_line("")
        write_table(("FILE", "SIZE"), [(name, format_nbytes(nbytes)) for name, nbytes in plan.files.items()])
    write_left(plan.account)
    write_line(f"would write {_totals(plan)} to {_target(plan)}; this was a dry run, nothing was written")


def _run_as_json(run: partial[ConvertReport], plan: ConvertReport, *, is_dry_run: bool) -> None:
    """Convert, and print the events."""
    facts = {
        "source": str(plan.source),
        "target": str(plan.target),
        "from": plan.source_format,
        "to": plan.format,
        "tensors": len(plan.tensors),
        "values": len(plan.values),
        "bytes": plan.nbytes,
        "dry_run": is_dry_run,
    }
    write_event("start", **facts, files=plan.files, max_memory=plan.max_memory, **account_facts(plan.account))
    done, last = 0, time.monotonic()

    def note(name: str, nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            write_event("progress", tensor=name, bytes=done, of=plan.nbytes)

    report = plan if is_dry_run else run(progress=note)
    for tensor in report.tensors:
        write_event("tensor", **_tensor_facts(tensor))
    write_event("done", **facts, seconds=round(report.seconds, 6))


def _tensor_facts(tensor: ConvertedTensor) -> dict[str, object]:
    content = tensor.content_digest
    return {
        "name": tensor.name,
        "new_name": tensor.new_name,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "new_dtype": tensor.new_dtype,
        "bytes": tensor.nbytes,
        "tied_to": tensor.tied_to,
        # As text: JSON readers that keep numbers as doubles would round it.
        "content_digest": None if content is None else f"{content:016x}",
    }
