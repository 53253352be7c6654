"""``dtckpt simulate``: what saves and restores of a model on a large mesh would take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.simulating.machine import Machine
from dtckpt.checkpoint.simulating.report import Operation, Simulation
from dtckpt.checkpoint.simulating.simulate import simulate
from dtckpt.cli.arguments import LayoutRules, parse_mesh, read_rules
from dtckpt.cli.output import format_age, write_event, write_line, write_summary, write_table
from dtckpt.cli.picture_files import validate_output, write_picture
from dtckpt.cli.plain_arguments import parse_pairs, parse_size
from dtckpt.cli.simulation_picture import simulation_picture
from dtckpt.errors import ConfigError, format_nbytes, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """The arguments of the command, as `click` passes them; see `dtckpt.cli.commands`."""

    model: str
    mesh: str
    layouts: Sequence[str]
    layout_file: Path | None
    target_mesh: str | None
    target_layouts: Sequence[str]
    states: Sequence[str]
    devices_per_client: int
    devices_per_host: int
    device_link: str
    network: str
    host_storage: str
    storage: str
    arrival_ms: float
    mtbf_h: float | None
    chunk_size: str
    check_replicas: bool
    workers: int
    clients: int
    output: Path | None
    as_json: bool


def run_simulate(request: SimulateRequest) -> None:
    """Run the command.

    Raises:
        MeshError: A mesh cannot be used.
        LayoutError: A layout does not fit its mesh or a tensor, or matches no tensor.
        ConfigError: Another option cannot be used, or the model is unknown.
    """
    if request.output is not None:
        validate_output(request.output)
    if request.target_layouts and request.target_mesh is None:
        raise ConfigError("--to-layout needs the mesh that it is for; give --to-mesh")
    mesh = parse_mesh(request.mesh, request.devices_per_client)
    from_file = read_rules(request.layout_file) if request.layout_file else ()
    rules = LayoutRules([*request.layouts, *from_file], mesh)
    target_mesh = target_rules = None
    if request.target_mesh is not None:
        target_mesh = parse_mesh(request.target_mesh, request.devices_per_client)
        target_rules = LayoutRules(request.target_layouts, target_mesh)
    found = simulate(
        request.model,
        mesh,
        layouts=rules,
        target_mesh=target_mesh,
        target_layouts=target_rules,
        state=parse_pairs(request.states, "state", "NAME=DTYPE") or None,
        machine=_machine(request),
        options=SaveOptions(chunk_nbytes=parse_size(request.chunk_size), check_replicas=request.check_replicas),
        workers=request.workers,
        mtbf_s=None if request.mtbf_h is None else request.mtbf_h * 3600,
        sample=request.clients,
    )
    rules.validate_all_used()
    if target_rules is not None:
        target_rules.validate_all_used()
    if request.output is not None:
        write_picture(simulation_picture(found), f"simulation of {found.model}", request.output)
    if request.as_json:
        _write_events(found)
    else:
        _write_text(found)
        if request.output is not None:
            write_summary(printable(f"wrote the charts to {request.output}"))


def _machine(request: SimulateRequest) -> Machine:
    return Machine(
        devices_per_host=request.devices_per_host,
        device_link=parse_size(request.device_link),
        network=parse_size(request.network),
        host_storage=parse_size(request.host_storage),
        storage=parse_size(request.storage),
        arrival_s=request.arrival_ms / 1000,
    )


def _write_events(found: Simulation) -> None:
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


def _rows(operation: Operation) -> list[tuple[str, ...]]:
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
