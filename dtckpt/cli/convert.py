"""``dtckpt convert``: check all arguments and plan the whole work, then write the checkpoint in its new format."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from dtckpt.cli.options import (
    TARGETS,
    debug_option,
    json_option,
    map_options,
    memory_option,
    parse_map,
    parse_pairs,
    parse_size,
    quiet_option,
    rest_options,
    return_freed_memory,
    source_and_target,
)
from dtckpt.cli.output import (
    account_facts,
    format_count,
    format_shape,
    open_progress,
    write_event,
    write_left,
    write_line,
    write_summary,
    write_table,
)
from dtckpt.errors import format_nbytes, printable
from dtckpt.format.codecs import CODECS

if TYPE_CHECKING:
    from dtckpt.checkpoint.converting.report import ConvertedTensor, ConvertReport

PROGRESS_S = 1.0
"""Seconds between two ``progress`` events, at least."""

EPILOG = """\b
Names:
  GLOB and OLD are matched with names of tensors and paths of values (* also matches /). Each * of NEW stands for the
  text that the * of OLD matched. Names of OLD and NEW are joined by /; files of safetensors have . in its place.

\b
Examples:
  dtckpt convert Llama-3-8B/ step_0                            a model in safetensors files, to train it
  dtckpt convert step_100 out --to safetensors --select 'model/*' --rename 'model/*=*' --dtype bfloat16
  dtckpt convert step_100 model.safetensors --select 'model/*' --rename 'model/*=*'
  dtckpt convert runs/dcp/step_100 step_100                    a distributed checkpoint of PyTorch, and back:
  dtckpt convert step_100 runs/dcp/step_101 --to dcp
  dtckpt convert runs/megatron out --to safetensors --map megatron-llama --select 'model.*' --select lm_head.weight
  dtckpt convert Llama-3-8B step_0 --map-back megatron-llama

"""


@click.command("convert", epilog=EPILOG)
@source_and_target
@click.option("--to", type=click.Choice(TARGETS), help="Format of DST [default: by its suffix, or else dtckpt].")
@click.option("--select", multiple=True, metavar="GLOB", help="Write only tensors and values whose names match.")
@click.option("--rename", "renames", multiple=True, metavar="OLD=NEW", help="Rename tensors and values on the way.")
@map_options
@click.option("--dtype", metavar="DTYPE", help="New dtype of the floating-point tensors, such as bfloat16.")
@click.option(
    "--tied", "ties", multiple=True, metavar="NAME=KEPT", help="Store KEPT only; NAME must have the same elements."
)
@click.option(
    "--max-shard-size", metavar="SIZE", default="5GB", show_default=True, help="Bound on one file of several."
)
@memory_option("256MiB")
@click.option("--codec", type=click.Choice(CODECS), help="Compression of dtckpt and zarr [default: as in SRC].")
@rest_options
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing.")
@json_option("Print one JSON line per event: start, progress, tensor, done, error.")
@quiet_option
@debug_option
def command(
    *,
    src: str,
    dst: str,
    to: str | None,
    select: Sequence[str],
    renames: Sequence[str],
    map_name: str | None,
    map_back: str | None,
    map_sizes: Sequence[str],
    dtype: str | None,
    ties: Sequence[str],
    max_shard_size: str,
    max_memory: str,
    codec: str | None,
    overwrite: bool,
    ignore_rest: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write checkpoint SRC anew as DST, in another format.

    SRC is a checkpoint of dtckpt, a file or directory of safetensors, a directory of torch.distributed.checkpoint
    (dcp), or a file of torch.save (torch). SRC may also be a folder of Trainer or accelerate, a directory of Orbax, or
    the prefix of a checkpoint of TensorFlow. Digests of every tensor's content prove that it stayed as it was. DST
    appears whole or not at all.
    """
    from dtckpt.checkpoint.converting.convert import convert
    from dtckpt.checkpoint.options import SaveOptions
    from dtckpt.cli.arguments import parse_dtype

    return_freed_memory()
    new_names: dict[str | re.Pattern[str], str] = dict(parse_pairs(renames, "rename", "OLD=NEW").items())
    run = partial(
        convert,
        dst=dst,
        to=to,
        select=select,
        rename=new_names or None,
        dtype=None if dtype is None else parse_dtype(dtype),
        tied=parse_pairs(ties, "tied", "NAME=KEPT"),
        map=parse_map(map_name, map_back, map_sizes),
        max_shard_size=parse_size(max_shard_size),
        max_memory=parse_size(max_memory),
        options=None if codec is None else SaveOptions(codec=codec),
        overwrite=overwrite,
        ignore_rest=ignore_rest,
    )
    # A dry run first: it finds errors in all arguments and tensors before anything is written.
    plan = run(src, dry_run=True)
    run = partial(run, plan.source)  # of a feed: the step that was planned, though there may be a newer one by now
    if as_json:
        _run_as_json(run, plan, is_dry_run=dry_run)
    elif dry_run:
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
