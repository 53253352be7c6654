"""Definitions of the commands and their options, with `click`.

Each command imports its implementation when it runs, so that ``--help`` does not wait for the import of torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import dtckpt
from dtckpt.cli.completion import complete_tensors
from dtckpt.cli.help_commands import completion, show_help
from dtckpt.cli.options import (
    CODECS,
    KVSTORES,
    LAYOUT_HELP,
    LOCATION,
    TARGETS,
    debug_option,
    json_option,
    memory_option,
    mesh_options,
    pager_option,
    quiet_option,
    rest_options,
    source_and_target,
)


@click.group(
    no_args_is_help=False,
    epilog="""\b
Topics:
  dtckpt help COMMAND      the same as dtckpt COMMAND --help
  dtckpt help exit-codes   the meaning of the exit codes
""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(dtckpt.__version__, prog_name="dtckpt", message="%(prog)s %(version)s")
@debug_option
def cli() -> None:
    """Look at checkpoints and lay them out anew, without the devices that they are for; look at running jobs."""


_RESHARD_HELP = f"""{LAYOUT_HELP}\b
Examples:
  dtckpt reshard step_100 step_100_for_4 --mesh x=4
  dtckpt reshard step_100 step_100_by_columns --mesh data=2,model=2 --layout 'model/*=unsharded,model' --dry-run
  dtckpt reshard step_100 step_100_half --mesh x=2 --dtype bfloat16 --max-memory 512MiB
  dtckpt reshard step_100 step_100_by_workers --mesh x=4 --workers 1 --worker 0 --resume

"""


@cli.command(epilog=_RESHARD_HELP)
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


@cli.command(epilog=_CONVERT_HELP)
@source_and_target
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
@memory_option("256MiB")
@click.option("--codec", type=click.Choice(CODECS), help="Compression of dtckpt and zarr [default: as in SRC].")
@rest_options
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan; write nothing.")
@json_option("Print one JSON line per event: start, progress, tensor, done, error.")
@quiet_option
@debug_option
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
  dtckpt inspect step_100 --tree --sort size           the largest subtrees first
  dtckpt inspect step_100 --tensor 'model/*' --chunks  which file has which part
  dtckpt inspect s3://bucket/step_100 --json

"""


@cli.command(epilog=_INSPECT_HELP)
@click.argument("path", type=LOCATION)
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
@pager_option
@json_option("Print one line of JSON.")
@debug_option
def inspect(**options: Any) -> None:
    """Show the tensors and values of checkpoint PATH.

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
  file, unknown         not read, as files of other programs beside A or B; not compared

\b
Examples:
  dtckpt diff step_100 step_200                     by digests: which tensors differ
  dtckpt diff step_100 step_200 --values            how many elements differ, and by how much
  dtckpt diff step_100 step_100_for_8 --ignore layout
  dtckpt diff step_100 model.safetensors --select 'model/*' --rename 'model/*=*' --ignore layout

"""
DIFFERENCES = ("missing", "extra", "type", "value", "shape", "dtype", "layout", "part", "elements", "file", "unknown")
"""A copy of the names in `dtckpt.checkpoint.inspecting.difference`, which is slow to import."""


@cli.command(epilog=_DIFF_HELP)
@click.argument("a", type=LOCATION)
@click.argument("b", type=LOCATION)
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
@memory_option("256MiB")
@pager_option
@json_option("Print one JSON line per difference, then one with the result.")
@quiet_option
@debug_option
def diff(**options: Any) -> int:
    """Show the differences between checkpoints A and B; exit with 0 if there are none, with 1 if there are some.

    Content digests tell whether the elements of two tensors of one dtype differ, for all layouts and chunks.
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


@cli.command(epilog=_CAT_HELP)
@click.argument("path", type=LOCATION)
@click.argument("tensor", metavar="TENSOR[SLICE]", shell_complete=complete_tensors)
@click.option("--stats", is_flag=True, help="Print statistics of the elements: extremes, mean, NaN, Inf, zeros.")
@click.option("--all", "all_elements", is_flag=True, help="Print every element; else of over 1000 those at the edges.")
@memory_option("256MiB", "Bound on tensor data in memory with --stats: 512MiB, 2GB.")
@json_option("Print one line of JSON, with every element or the statistics.")
@quiet_option
@debug_option
def cat(**options: Any) -> None:
    """Print elements of a tensor of checkpoint PATH.

    SLICE is one of NumPy: integers, start:stop:step and '...'. Only the chunks that it meets are read. Minimum,
    maximum, mean and standard deviation are those of the finite elements; of complex ones, magnitudes count.
    """
    from dtckpt.cli.cat import CatRequest, run_cat

    run_cat(CatRequest(**options))


_VERIFY_HELP = """\b
Examples:
  dtckpt verify step_100
  dtckpt verify s3://bucket/step_100 --threads 16 --json

"""


@cli.command(epilog=_VERIFY_HELP)
@click.argument("path", type=LOCATION)
@click.option("--threads", type=click.IntRange(min=1), help="Chunks that are read at one time [default: one per core].")
@json_option("Print one JSON line per damage, then one with the result.")
@quiet_option
@debug_option
def verify(path: str, threads: int | None, as_json: bool) -> int:
    """Read all of checkpoint PATH and compare every digest; exit with 1 if anything is damaged."""
    from dtckpt.cli.verify import run_verify

    return run_verify(path, as_json=as_json, threads=threads)


_STATUS_HELP = """\b
Variables:
  DTCKPT_COORDINATOR, and what else names it to clients; DTCKPT_COORDINATOR_CA, _CERT, _KEY, _SERVER_NAME for TLS;
  DTCKPT_COORDINATOR_TOKEN_FILE or _TOKEN: a job's token shows that job, a token of the job * shows all.

\b
Examples:
  dtckpt status --coordinator localhost:50051
  dtckpt status --job run --watch
  dtckpt status --json

"""


@cli.command(epilog=_STATUS_HELP)
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
@json_option("Print one JSON line per look.")
@debug_option
def status(**options: Any) -> None:
    """Show jobs, clients and open barriers of a coordinator: who is missing, and what they did last."""
    from dtckpt._proto import COORDINATOR, require

    require(*COORDINATOR)
    from dtckpt.cli.status import StatusRequest, run_status

    run_status(StatusRequest(**options))


_LS_HELP = """\b
States:
  whole      a finished checkpoint whose metadata can be read; dtckpt verify reads its elements, too
  damaged    a finished checkpoint that cannot be opened; --json says why
  unfinished files of a save that is under way, or that was killed less than an hour ago
  leftover   of a save that did not end, or of a checkpoint that was removed; dtckpt gc removes it

\b
Examples:
  dtckpt ls run
  dtckpt ls run --sort size
  dtckpt ls s3://bucket/run --json

"""


@cli.command(epilog=_LS_HELP)
@click.argument("root", type=LOCATION)
@click.option(
    "--sort",
    type=click.Choice(("name", "size", "age")),
    default="name",
    show_default=True,
    help="Order: step 2 before step 10; or the largest, or the newest first.",
)
@pager_option
@json_option("Print one JSON line per checkpoint, then one with the totals.")
@debug_option
def ls(**options: Any) -> None:
    """List the checkpoints below ROOT: steps, sizes, ages, states and metrics; * marks the newest valid one.

    ROOT is the directory or URL of a CheckpointManager, or any folder of checkpoints. On an object store, those are
    listed that dtckpt saved there. A step is rolled back if the run went back to an older one and saved again.
    """
    from dtckpt.cli.ls import LsRequest, run_ls

    run_ls(LsRequest(**options))


_TIERS_HELP = """\b
Examples:
  dtckpt tiers run
  dtckpt tiers run --without host3,host7
  dtckpt tiers s3://bucket/run --json

"""


@cli.command(epilog=_TIERS_HELP)
@click.argument("root", type=LOCATION)
@click.option("--without", metavar="HOST,...", help="Hosts that are taken to be lost.")
@json_option("Print one JSON line per host and local step, then one with the step that would come back.")
@debug_option
def tiers(**options: Any) -> None:
    """Show which steps the hosts of a job hold, and which would come back if hosts were lost now.

    ROOT is the directory or URL of a CheckpointManager with a LocalTier. What the hosts hold is read from a file that
    client 0 keeps there, so no host is asked.
    """
    from dtckpt.cli.tiers import TiersRequest, run_tiers

    run_tiers(TiersRequest(**options))


_GC_HELP = """\b
Examples:
  dtckpt gc run                             leftovers of saves that were killed
  dtckpt gc run --keep 3 --keep-every 100   and which steps would go
  dtckpt gc run --keep 3 --keep-every 100 --yes
  dtckpt gc run --keep 1 --keep-best 2 --metric loss

"""


@cli.command(epilog=_GC_HELP)
@click.argument("root", type=LOCATION)
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Keep the N newest steps.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep steps that are multiples of N.")
@click.option("--keep-newer-s", type=click.FloatRange(min=1), metavar="S", help="Keep steps younger than S s.")
@click.option("--keep-every-s", type=click.FloatRange(min=1), metavar="S", help="Keep the first step of each S s.")
@click.option("--keep-best", type=click.IntRange(min=1), metavar="N", help="Keep the N steps with the best metric.")
@click.option("--metric", metavar="NAME", default="loss", show_default=True, help="Which metric.")
@click.option(
    "--mode", type=click.Choice(("min", "max")), default="min", show_default=True, help="Which metric is the best."
)
@click.option(
    "--min-age",
    "min_age_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long nothing changed in a leftover, at least.",
)
@click.option("--yes", "is_confirmed", is_flag=True, help="Remove; without it, only show.")
@click.option(
    "--take-over",
    is_flag=True,
    help="On an object store: remove although a manager is registered; if it lives, its next save is refused.",
)
@json_option("Print one JSON line per leftover and step, then one with the totals.")
@quiet_option
@debug_option
def gc(**options: Any) -> None:
    """Show, and with --yes remove, leftovers and old steps below ROOT: those that no --keep rule keeps.

    The rules are those of a CheckpointManager. Without any, all steps stay. The newest valid step, damaged steps, and
    files that a process writes or restores, always stay.
    """
    from dtckpt.cli.gc import GcRequest, run_gc

    run_gc(GcRequest(**options))


_PLOT_HELP = f"""{LAYOUT_HELP}\b
Kinds:
  regions    which device holds which region of TENSOR; with --mesh, before a reshard beside after it
  traffic    bytes that go from device to device in a reshard to --mesh: of TENSOR, or of all tensors
  timeline   phases of the save, a lane per client

\b
Examples:
  dtckpt plot step_100 model/w -o regions.svg
  dtckpt plot step_100 model/w --mesh x=4 --layout 'model/*=unsharded,x' -o before_and_after.html
  dtckpt plot step_100 --mesh x=4 -o traffic.svg
  dtckpt plot step_100 -o timeline.svg

"""


@cli.command(epilog=_PLOT_HELP)
@click.argument("path", type=LOCATION)
@click.argument("tensor", required=False, shell_complete=complete_tensors)
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="File to write: .svg, .html or .png."
)
@click.option(
    "--kind",
    type=click.Choice(("regions", "traffic", "timeline")),
    help="The picture to draw [default: regions of a TENSOR; else traffic, if --mesh is given; else timeline].",
)
@mesh_options(is_required=False)
@json_option("Print one line of JSON with the numbers that are drawn.")
@quiet_option
@debug_option
def plot(**options: Any) -> None:
    """Draw checkpoint PATH: regions of a tensor, traffic of a reshard, or the timeline of the save.

    PNG needs matplotlib: pip install 'dtckpt[plot]'.
    """
    from dtckpt.cli.plot import PlotRequest, run_plot

    run_plot(PlotRequest(**options))


_SIMULATE_HELP = """\b
Models:
  llama-3-8b, llama-3-70b, llama-3-405b, deepseek-v3, or a JSON file (see docs/simulate.md). They are laid out over the
  axes dp (data), tp (tensor) and ep (experts), as far as the mesh has them; over any other axis they are replicated.

\b
Layouts:
  As for dtckpt reshard. Names are those of the state and of the parameter: model/layers.0.attention.wq.weight.

\b
Speeds:
  Bytes a second: 25GB, 512MiB. Pass what you have measured; the defaults are guesses.

\b
Examples:
  dtckpt simulate llama-3-8b --mesh dp=8,tp=8
  dtckpt simulate llama-3-70b --mesh dp=64,tp=8 --to-mesh dp=32,tp=8 --storage 50GB -o simulation.svg
  dtckpt simulate deepseek-v3 --mesh replica=2,dp=4,ep=32 --state model=bfloat16 --json
  dtckpt simulate llama-3-8b --mesh x=16 --layout 'model/*norm*=unsharded' --layout '*norm*=x' --mtbf 4

"""


@cli.command(epilog=_SIMULATE_HELP)
@click.argument("model", metavar="MODEL")
@mesh_options(is_required=True)
@click.option("--to-mesh", "target_mesh", metavar="AXIS=SIZE,...", help="Mesh that restores [default: the same].")
@click.option("--to-layout", "target_layouts", multiple=True, metavar="PATTERN=SPEC", help="Layouts on that mesh.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="NAME=DTYPE",
    help="A tensor that is kept of each parameter [default: those of the model: weights in bfloat16, and three tensors "
    "of AdamW in float32].",
)
@click.option("--devices-per-client", type=click.IntRange(min=1), default=1, show_default=True, metavar="N")
@click.option("--devices-per-host", type=click.IntRange(min=1), default=8, show_default=True, metavar="N")
@click.option(
    "--device-link", metavar="SPEED", default="25GB", show_default=True, help="From a device to its host's memory."
)
@click.option("--network", metavar="SPEED", default="50GB", show_default=True, help="Of one host, each way.")
@click.option("--host-storage", metavar="SPEED", default="5GB", show_default=True, help="From one host to storage.")
@click.option("--storage", metavar="SPEED", default="200GB", show_default=True, help="From all hosts to storage.")
@click.option(
    "--arrival",
    "arrival_ms",
    type=click.FloatRange(min=0, min_open=True),
    default=0.18,
    show_default=True,
    metavar="MS",
    help="What one client's arrival takes at a barrier.",
)
@click.option(
    "--mtbf",
    "mtbf_h",
    type=click.FloatRange(min=0, min_open=True),
    metavar="HOURS",
    help="Mean time between failures of the job [default: one failure per host in 6335 h].",
)
@click.option("--chunk-size", metavar="SIZE", default="16MiB", show_default=True, help="Bound on the bytes of a chunk.")
@click.option(
    "--check-replicas/--no-check-replicas", default=True, help="Whether the save compares all copies of a value."
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes of the reshard, one a host."
)
@click.option(
    "--clients",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="N",
    help="Plan the restores of so many clients, if there are more.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Charts: a file .svg, .html or .png.")
@json_option("Print one JSON line per operation, then one with the totals.")
@quiet_option
@debug_option
def simulate(**options: Any) -> None:
    """Show what saves and restores of MODEL would take on a mesh that need not exist.

    Bytes are those of the plans that real saves, restores and reshards follow. Seconds are these bytes at the speeds
    that you give; the time for planning is measured here.
    """
    from dtckpt.cli.simulate import SimulateRequest, run_simulate

    run_simulate(SimulateRequest(**options))


cli.add_command(show_help)
cli.add_command(completion)
