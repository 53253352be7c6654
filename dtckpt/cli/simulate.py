"""``dtckpt simulate``: time and bytes of saves and restores of a model on a large mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtckpt.cli.options import debug_option, json_option, mesh_options, parse_pairs, parse_size, quiet_option
from dtckpt.cli.output import format_age, write_event, write_line, write_summary, write_table
from dtckpt.errors import ConfigError, format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.simulating.simulate import SimulatedOperation, Simulation

EPILOG = """\b
Models:
  llama-3-8b, llama-3-70b, llama-3-405b, deepseek-v3, or a JSON file (see docs/simulate.md). They are laid out over the
  axes dp (data), tp (tensor) and ep (experts), as far as the mesh has them; over any other axis they are replicated.

\b
Layouts:
  As for dtckpt reshard. A name joins the names of the state and of the parameter: model/layers.0.attention.wq.weight.

\b
Speeds:
  Bytes a second: 25GB, 512MiB. Pass measured speeds; the defaults are guesses.

\b
Examples:
  dtckpt simulate llama-3-8b --mesh dp=8,tp=8
  dtckpt simulate llama-3-70b --mesh dp=64,tp=8 --to-mesh dp=32,tp=8 --storage 50GB -o simulation.svg
  dtckpt simulate deepseek-v3 --mesh replica=2,dp=4,ep=32 --state model=bfloat16 --json
  dtckpt simulate llama-3-8b --mesh x=16 --layout 'model/*norm*=unsharded' --layout '*norm*=x' --mtbf 4

"""


@click.command("simulate", epilog=EPILOG)
@click.argument("model", metavar="MODEL")
@mesh_options(is_required=True)
@click.option("--to-mesh", "target_mesh", metavar="AXIS=SIZE,...", help="Mesh that restores [default: the same].")
@click.option("--to-layout", "target_layouts", multiple=True, metavar="PATTERN=SPEC", help="Layouts on that mesh.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="NAME=DTYPE",
    help="A tensor that is kept of each parameter [default: weights in bfloat16, and three tensors "
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
    help="Seconds that the arrival of one client takes at a barrier.",
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
def command(
    *,
    model: str,
    mesh: str,
    layouts: Sequence[str],
    layout_file: Path | None,
    target_mesh: str | None,
    target_layouts: Sequence[str],
    states: Sequence[str],
    devices_per_client: int,
    devices_per_host: int,
    device_link: str,
    network: str,
    host_storage: str,
    storage: str,
    arrival_ms: float,
    mtbf_h: float | None,
    chunk_size: str,
    check_replicas: bool,
    workers: int,
    clients: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show the bytes and seconds that saves and restores of MODEL would take on a mesh that need not exist.

    The bytes come from the plans that real saves, restores and reshards follow. The seconds are these bytes at the
    speeds that you give; the time for planning is measured here.
    """
    from dtckpt.checkpoint.options import SaveOptions
    from dtckpt.checkpoint.simulating.simulate import Machine, simulate
    from dtckpt.cli.arguments import parse_mesh, parse_rules
    from dtckpt.cli.charts import simulation_picture
    from dtckpt.cli.picture_files import validate_output, write_picture

    if output is not None:
        validate_output(output)
    if target_layouts and target_mesh is None:
        raise ConfigError("--to-layout needs the mesh that it is for; give --to-mesh")
    saving_mesh = parse_mesh(mesh, devices_per_client)
    rules = [parse_rules(layouts, layout_file, saving_mesh)]
    restoring_mesh = None
    if target_mesh is not None:
        restoring_mesh = parse_mesh(target_mesh, devices_per_client)
        rules.append(parse_rules(target_layouts, None, restoring_mesh))
    found = simulate(
        model,
        saving_mesh,
        layouts=rules[0],
        target_mesh=restoring_mesh,
        target_layouts=None if restoring_mesh is None else rules[1],
        state=parse_pairs(states, "state", "NAME=DTYPE") or None,
        machine=Machine(
            devices_per_host=devices_per_host,
            device_link=parse_size(device_link),
            network=parse_size(network),
            host_storage=parse_size(host_storage),
            storage=parse_size(storage),
            arrival_s=arrival_ms / 1000,
        ),
        options=SaveOptions(chunk_nbytes=parse_size(chunk_size), check_replicas=check_replicas),
        workers=workers,
        mtbf_s=None if mtbf_h is None else mtbf_h * 3600,
        sample=clients,
    )
    for each in rules:
        each.validate_all_used()
    if output is not None:
        write_picture(simulation_picture(found), f"simulation of {found.model}", output)
    if as_json:
        _write_events(found)
    else:
        _write_text(found)
        if output is not None:
            write_summary(printable(f"wrote the charts to {output}"))


def _write_events(found: Simulation) -> None:
    from dataclasses import asdict

    for operation in found.operations:
        write_event(
            "operation",
            operation=operation.name,
            seconds=operation.seconds,
            parts=dict(operation.parts),
            links=[asdict(load) for load in operation.loads],
            by_client=list(operation.by_client),
        )
    write_event(
        "simulation",
        model=found.model,
        parameters=found.num_parameters,
        mesh=dict(found.mesh),
        target_mesh=dict(found.target_mesh),
        clients=found.num_clients,
        hosts=found.num_hosts,
        tensors=found.num_tensors,
        chunks=found.num_chunks,
        bytes=found.nbytes,
        max_client_bytes=found.max_client_nbytes,
        digests_bytes=found.digests_nbytes,
        plan_s=found.plan_s,
        planned_clients=list(found.planned_clients),
        blocking_s=found.blocking_s,
        lag_s=found.lag_s,
        mtbf_s=found.mtbf_s,
        interval_s=found.interval_s,
        lost_share=found.lost_share(found.interval_s),
        notes=list(found.notes),
    )


def _write_text(found: Simulation) -> None:
    size = f"{found.num_parameters / 1e9:.2f} billion parameters"
    state = f"{format_nbytes(found.nbytes)} of state in {found.num_tensors} tensors, {found.num_chunks} chunks"
    write_line(printable(f"{found.model}: {size}; {state}"))
    most = f"at most {format_nbytes(found.max_client_nbytes)} a client"
    clients = f"{found.num_clients} clients on {found.num_hosts} hosts; {most}; planned in {found.plan_s:.2f} s"
    write_line(f"mesh {_axes(found.mesh)}: {clients}")
    if found.target_mesh != found.mesh:
        write_line(f"target mesh {_axes(found.target_mesh)}")
    if len(found.planned_clients) < math.prod(found.target_mesh.values()) // found.devices_per_client:
        write_line(f"restores: planned for {len(found.planned_clients)} clients, the others taken to be alike")
    write_line("")
    write_table(
        ("OPERATION", "SECONDS", "OF THESE", "LINK", "ALL", "BUSIEST", "SECONDS"),
        [row for operation in found.operations for row in _rows(operation)],
    )
    write_line("")
    lag = f"is complete after {found.lag_s:.1f} s"
    write_line(f"a save in the background stops training for {found.blocking_s:.2f} s, and {lag}")
    lost = f"saves and repeated steps then take {100 * found.lost_share(found.interval_s):.2f} % of the time"
    every = f"with a failure every {format_age(found.mtbf_s)}, save every {format_age(found.interval_s)}"
    write_line(f"{every}: {lost}")
    for note in found.notes:
        write_line(f"note: {note}")


def _axes(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def _rows(operation: SimulatedOperation) -> list[tuple[str, ...]]:
    """Return the lines of an operation in the table: its parts on the left, its links on the right."""
    parts = [f"{seconds:.2f} {part}" for part, seconds in operation.parts.items()]
    links = [
        (load.link, format_nbytes(load.total_nbytes), format_nbytes(load.max_nbytes), f"{load.seconds:.2f}")
        for load in operation.loads
        if load.total_nbytes
    ]
    count = max(len(parts), len(links), 1)
    names = [(operation.name, f"{operation.seconds:.2f}"), *[("", "")] * (count - 1)]
    parts += [""] * (count - len(parts))
    links += [("", "", "", "")] * (count - len(links))
    return [(*name, part, *link) for name, part, link in zip(names, parts, links, strict=True)]
