"""Definitions of the commands and their options, with `click`.

Each command imports its implementation when it runs, so that ``--help`` does not wait for the import of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import dtckpt
from dtckpt.cli.exit_codes import exit_code_help

KVSTORES = ("ocdbt", "zarr")
"""A copy of the names in `dtckpt.format.manifest`, which is slow to import."""
CODECS = ("none", "zstd", "blosc")
"""A copy of the names in `dtckpt.format.codecs`, which is slow to import."""
TARGETS = ("dtckpt", "zarr", "safetensors", "dcp", "torch")
"""A copy of the names in `dtckpt.checkpoint.converting.targets`, which is slow to import."""

_Command = TypeVar("_Command", bound=Callable[..., Any])

_LAYOUT_HELP = """\b
Layouts:
  PATTERN is a glob over tensor names (* also matches /); the first match wins, command line before file.
  SPEC has one entry per dim, separated by commas: an axis (x), axes in order, major first (x+y), or unsharded.
  A scalar's SPEC is empty. The last = parts the two. Tensors that nothing matches keep their saved specs as far
  as the mesh has those axes. A layout file has one PATTERN=SPEC per line; # starts a comment.

"""


def _debug_option(command: _Command) -> _Command:
    # Without effect here: `dtckpt.cli.main` searches the arguments for it, so that it works even if parsing fails.
    return click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error.")(command)


def _json_option(text: str) -> Callable[[_Command], _Command]:
    return click.option("--json", "as_json", is_flag=True, help=text)


def _pager_option(command: _Command) -> _Command:
    return click.option(
        "--pager/--no-pager", default=True, help="On a terminal: show long text in $PAGER, or else less [default: yes]."
    )(command)


@click.group(
    no_args_is_help=False,
    epilog=exit_code_help(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(dtckpt.__version__, prog_name="dtckpt", message="%(prog)s %(version)s")
@_debug_option
def cli() -> None:
    """Look at checkpoints and lay them out anew, without the devices that they are for; look at running jobs."""


@cli.command(epilog=f"{_LAYOUT_HELP}{exit_code_help()}")
@click.argument("src")
@click.argument("dst")
@click.option("--mesh", required=True, metavar="AXIS=SIZE,...", help="Target mesh, major axis first: data=2,model=4.")
@click.option(
    "--layout", "layouts", multiple=True, metavar="PATTERN=SPEC", help="Layout of the tensors that match; see below."
)
@click.option("--layout-file", type=click.Path(path_type=Path), help="File of layouts, one per line.")
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
@click.option(
    "--max-memory",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Bound on tensor data in memory: 512KiB, 2GB.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST, once the new one is durable.")
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
@click.option("--resume", is_flag=True, help="Keep what an earlier process of this worker finished.")
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing.")
@_json_option("Print one JSON line per event: start, tensor, done, error.")
@_debug_option
def reshard(**options: Any) -> None:
    """Write checkpoint SRC anew as DST, laid out for another mesh.

    Names, values and structure stay as they are. DST appears whole or not at all.
    """
    from dtckpt.cli.reshard import ReshardRequest, run_reshard

    run_reshard(ReshardRequest(**options))


_CONVERT_HELP = """\b
Names:
  GLOB and OLD are matched with names of tensors and paths of values (* also matches /). Each * of NEW stands for what
  the one of OLD matched. Names of OLD and NEW are joined by /; files of safetensors have . in its place.

\b
Examples:
  dtckpt convert Llama-3-8B/ step_0                            a model in safetensors files, to train it
  dtckpt convert step_100 out --to safetensors --select 'model/*' --rename 'model/*=*' --dtype bfloat16
  dtckpt convert step_100 model.safetensors --select 'model/*' --rename 'model/*=*'
  dtckpt convert runs/dcp/step_100 step_100                    a distributed checkpoint of PyTorch, and back:
  dtckpt convert step_100 runs/dcp/step_101 --to dcp

"""


@cli.command(epilog=f"{_CONVERT_HELP}{exit_code_help()}")
@click.argument("src")
@click.argument("dst")
@click.option("--to", type=click.Choice(TARGETS), help="Format of DST [default: by its suffix, or else dtckpt].")
@click.option("--select", multiple=True, metavar="GLOB", help="Write only what has such names.")
@click.option("--rename", "renames", multiple=True, metavar="OLD=NEW", help="New names of what is written.")
@click.option("--dtype", metavar="DTYPE", help="New dtype of the floating-point tensors, such as bfloat16.")
@click.option(
    "--tied", "ties", multiple=True, metavar="NAME=KEPT", help="Store KEPT only; NAME must have the same elements."
)
@click.option(
    "--max-shard-size", metavar="SIZE", default="5GB", show_default=True, help="Bound on one file of several."
)
@click.option(
    "--max-memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Bound on tensor data in memory: 512MiB, 2GB.",
)
@click.option("--codec", type=click.Choice(CODECS), help="Compression of dtckpt and zarr [default: as in SRC].")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST, once the new one is durable.")
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing.")
@_json_option("Print one JSON line per event: start, progress, tensor, done, error.")
@_debug_option
def convert(**options: Any) -> None:
    """Write checkpoint SRC anew as DST, in another format.

    SRC is a checkpoint of dtckpt, a file or directory of safetensors, a directory of torch.distributed.checkpoint
    (dcp), or a file of torch.save (torch). Digests of every tensor's content prove that it stayed as it was. DST
    appears whole or not at all.
    """
    from dtckpt.cli.convert import ConvertRequest, run_convert

    run_convert(ConvertRequest(**options))


_INSPECT_HELP = """\b
Examples:
  dtckpt inspect step_100
  dtckpt inspect step_100 --tree --sort size           what takes the space
  dtckpt inspect step_100 --tensor 'model/*' --chunks  which file has which part
  dtckpt inspect s3://bucket/step_100 --json

"""


@cli.command(epilog=f"{_INSPECT_HELP}{exit_code_help()}")
@click.argument("path")
@click.option("--tensor", "patterns", multiple=True, metavar="GLOB", help="Only tensors with such names.")
@click.option("--tree", is_flag=True, help="Show names as a tree, with the size of every subtree.")
@click.option(
    "--sort",
    type=click.Choice(("name", "size")),
    default="name",
    show_default=True,
    help="Order of the tensors: layers.2 before layers.10, or the largest first.",
)
@click.option("--each", is_flag=True, help="A line for each tensor, also for those that are alike but for numbers.")
@click.option("--chunks", "with_chunks", is_flag=True, help="List every chunk: region, key, digest, client.")
@_pager_option
@_json_option("Print one line of JSON.")
@_debug_option
def inspect(**options: Any) -> None:
    """Show what checkpoint PATH holds.

    Tensors that are alike but for numbers in their names share a line: layers.{0..31}.norm stands for 32 of them, and
    chunks and bytes are those of all of them.
    """
    from dtckpt.cli.inspect import InspectRequest, run_inspect

    run_inspect(InspectRequest(**options))


_DIFF_HELP = """\b
Differences:
  missing, extra        in A only, in B only
  type, value           another kind of container or leaf; another plain value
  shape, dtype, layout  of a tensor; a layout is its specs and the axes of its mesh
  part                  which part of a tensor was saved
  elements              the tensor's elements
  unknown               not compared

\b
Examples:
  dtckpt diff step_100 step_200                     by digests: which tensors differ
  dtckpt diff step_100 step_200 --values            how many elements differ, and by how much
  dtckpt diff step_100 step_100_for_8 --ignore layout
  dtckpt diff step_100 model.safetensors --select 'model/*' --rename 'model/*=*' --ignore layout

"""
DIFFERENCES = ("missing", "extra", "type", "value", "shape", "dtype", "layout", "part", "elements", "unknown")
"""A copy of the names in `dtckpt.checkpoint.inspecting.difference`, which is slow to import."""


@cli.command(epilog=f"{_DIFF_HELP}{exit_code_help()}")
@click.argument("a")
@click.argument("b")
@click.option(
    "--values/--no-values",
    default=None,
    help="Read the elements of tensors whose digests differ, too; or read none at all [default: read those without "
    "digests that tell].",
)
@click.option("--select", multiple=True, metavar="GLOB", help="Compare only tensors and values of such names.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="Names in B for those in A, as in convert; then --select chooses from A, and all of B is compared.",
)
@click.option(
    "--ignore", multiple=True, type=click.Choice(DIFFERENCES), help="Differences that do not count; see below."
)
@click.option(
    "--max-memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Bound on tensor data in memory: 512MiB, 2GB.",
)
@_pager_option
@_json_option("Print one JSON line per difference, then one with the result.")
@_debug_option
def diff(**options: Any) -> int:
    """Show in what checkpoints A and B differ; exit with 0 if they are the same, with 1 if not.

    Content digests tell whether the elements of two tensors of one dtype differ, whatever the layouts and chunks are.
    Elements are read where there are no such digests: of other libraries' files, and of two dtypes. Elements of one
    dtype are equal if their bits are, so a NaN equals one of the same bits. Errors do not count a NaN.
    """
    from dtckpt.cli.diff import DiffRequest, run_diff

    return run_diff(DiffRequest(**options))


_CAT_HELP = """\b
Examples:
  dtckpt cat step_100 model/w                      all of it, or its edges if it is large
  dtckpt cat step_100 'model/w[0:4, ..., -1]'
  dtckpt cat step_100 'model/w[::1000]' --all
  dtckpt cat step_100 model/w --stats              with counts of NaN and Inf
  dtckpt cat step_100 step                         a plain value

"""


@cli.command(epilog=f"{_CAT_HELP}{exit_code_help()}")
@click.argument("path")
@click.argument("tensor", metavar="TENSOR[SLICE]")
@click.option("--stats", is_flag=True, help="Print statistics of the elements: extremes, mean, NaN, Inf, zeros.")
@click.option("--all", "all_elements", is_flag=True, help="Print every element; else of over 1000 those at the edges.")
@click.option(
    "--max-memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Bound on tensor data in memory with --stats: 512MiB, 2GB.",
)
@_json_option("Print one line of JSON, with every element or the statistics.")
@_debug_option
def cat(**options: Any) -> None:
    """Print elements of a tensor of checkpoint PATH.

    SLICE is one of NumPy: integers, start:stop:step and '...'. Only the chunks that it meets are read. Minimum,
    maximum, mean and standard deviation are those of the finite elements; of complex ones, magnitudes count.
    """
    from dtckpt.cli.cat import CatRequest, run_cat

    run_cat(CatRequest(**options))


@cli.command(epilog=exit_code_help())
@click.argument("path")
@click.option("--threads", type=click.IntRange(min=1), help="Chunks that are read at one time [default: one per core].")
@_json_option("Print one JSON line per damage, then one with the result.")
@_debug_option
def verify(path: str, threads: int | None, as_json: bool) -> int:
    """Read all of checkpoint PATH and compare every digest; exit with 1 if anything is damaged."""
    from dtckpt.cli.verify import run_verify

    return run_verify(path, as_json=as_json, threads=threads)


_STATUS_HELP = """\b
Variables:
  DTCKPT_COORDINATOR, and what else names it to clients; DTCKPT_COORDINATOR_CA, _CERT, _KEY, _SERVER_NAME for TLS;
  DTCKPT_COORDINATOR_TOKEN_FILE or _TOKEN: a job's token shows that job, a token of the job * shows all.

"""


@cli.command(epilog=f"{_STATUS_HELP}{exit_code_help()}")
@click.option("--coordinator", metavar="HOST:PORT", help="Which coordinator [default: the one of the environment].")
@click.option("--job", metavar="NAME", help="Only this job [default: all that the token shows].")
@click.option("--watch", is_flag=True, help="Look again and again, until interrupted.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1, max=3600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to look for the coordinator.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Clients to show of each job, those silent for longest first.",
)
@_json_option("Print one JSON line per look.")
@_debug_option
def status(**options: Any) -> None:
    """Show jobs, clients and open barriers of a coordinator: who is missing, and what they did last."""
    from dtckpt.cli.status import StatusRequest, run_status

    run_status(StatusRequest(**options))
