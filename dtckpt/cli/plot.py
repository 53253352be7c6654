"""``dtckpt plot``: draw regions of a tensor, the traffic of a reshard, or the timeline of a save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtckpt.cli.options import (
    LAYOUT_HELP,
    LOCATION,
    complete_tensors,
    debug_option,
    json_option,
    mesh_options,
    quiet_option,
)
from dtckpt.cli.output import format_count, write_event, write_summary
from dtckpt.errors import CheckpointError, ConfigError, LayoutError, format_nbytes, printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dtckpt.checkpoint.reading.checkpoint import Checkpoint
    from dtckpt.checkpoint.reading.tensor_info import TensorInfo
    from dtckpt.cli.arguments import LayoutRules
    from dtckpt.layout.layout import Layout

_GAP = 24

EPILOG = f"""{LAYOUT_HELP}\b
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


@click.command("plot", epilog=EPILOG)
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
def command(
    *,
    path: str,
    tensor: str | None,
    output: Path,
    kind: str | None,
    mesh: str | None,
    layouts: Sequence[str],
    layout_file: Path | None,
    as_json: bool,
) -> None:
    """Draw checkpoint PATH: regions of a tensor, traffic of a reshard, or the timeline of the save.

    PNG needs matplotlib: pip install 'dtckpt[plot]'.
    """
    from dtckpt.checkpoint.open import open_checkpoint
    from dtckpt.cli.arguments import parse_mesh, parse_rules
    from dtckpt.cli.picture_files import validate_output, write_picture

    def rules() -> LayoutRules | None:
        return None if mesh is None else parse_rules(layouts, layout_file, parse_mesh(mesh))

    validate_output(output)
    kind = kind or ("regions" if tensor else "traffic" if mesh else "timeline")
    if mesh is None and (layouts or layout_file):
        raise ConfigError("--layout and --layout-file need the mesh that they are for; give --mesh")
    with open_checkpoint(path) as checkpoint:
        if kind == "regions":
            svg, facts = _regions(checkpoint, tensor, rules)
        elif kind == "traffic":
            svg, facts = _traffic(checkpoint, tensor, mesh, rules())
        else:
            svg, facts = _timeline(checkpoint)
        title = f"{kind} of {checkpoint.path}"
    write_picture(svg, title, output)
    if as_json:
        write_event("plot", kind=kind, path=str(checkpoint.path), output=str(output), **facts)
    else:
        write_summary(printable(f"wrote the {kind} of {checkpoint.path} to {output}"))


def _layout(info: TensorInfo) -> Layout:
    if info.layout is None:
        raise LayoutError(f"tensor {info.name!r} was saved without a layout: every client had all of it")
    return info.layout


def _regions(
    checkpoint: Checkpoint, tensor: str | None, rules: Callable[[], LayoutRules | None]
) -> tuple[str, dict[str, Any]]:
    if tensor is None:
        raise ConfigError("the regions of which tensor? name one behind the path; dtckpt inspect lists them")
    from dtckpt.cli.picture_files import svg_size
    from dtckpt.pictures.sharding import Subject, sharding_grid, subject_svg
    from dtckpt.pictures.svg import Picture

    info, new = checkpoint.info(tensor), rules()
    layouts = {"as saved": _layout(info)}
    if new is not None:
        layouts["after the reshard"] = new(info.name, info)
        new.validate_all_used()
    drawn = [subject_svg(Subject(layout, info.shape), f"{info.name} {when}") for when, layout in layouts.items()]
    facts = {
        when.replace(" ", "_"): [
            {"offset": region.offset, "shape": region.shape, "devices": devices}
            for region, devices in sharding_grid(layout, info.shape)
        ]
        for when, layout in layouts.items()
    }
    sizes = [svg_size(svg) for svg in drawn]
    width = sum(width for width, _ in sizes) + _GAP * (len(sizes) - 1)
    picture = Picture(info.name, width, max(height for _, height in sizes))
    x = 0.0
    for svg, size in zip(drawn, sizes, strict=True):
        picture.place(svg, x, 0)
        x += size[0] + _GAP
    return picture.svg(), {"tensor": info.name, "shape": info.shape, **facts}


def _traffic(
    checkpoint: Checkpoint, tensor: str | None, mesh: str | None, rules: LayoutRules | None
) -> tuple[str, dict[str, Any]]:
    from dtckpt.cli.charts import traffic, traffic_picture

    if rules is None:
        raise ConfigError("the traffic of which reshard? give --mesh, and --layout, as to dtckpt reshard")
    infos = [checkpoint.info(tensor)] if tensor else list(checkpoint.tensors.values())
    laid_out = [info for info in infos if info.layout is not None]
    if not laid_out:
        names = repr(tensor) if tensor else "all tensors"
        raise LayoutError(f"{checkpoint.path}: {names} were saved without layouts, so nothing goes between devices")
    # Many tensors are alike, and planning a tensor takes time, so one of each kind is planned.
    alike = Counter((_layout(info), rules(info.name, info), info.shape, info.nbytes) for info in laid_out)
    for info in infos:
        if info.layout is None:
            rules(info.name, info)  # so that a rule for it counts as used
    rules.validate_all_used()
    matrix = _sum([traffic(old, new, shape, nbytes) * count for (old, new, shape, nbytes), count in alike.items()])
    stay = int(matrix.trace())
    moved = int(matrix.sum()) - stay
    what = tensor or format_count(len(laid_out), "tensor")
    subtitle = f"{what}: {format_nbytes(moved)} go to another device, {format_nbytes(stay)} stay on the diagonal"
    svg = traffic_picture(matrix, f"Bytes between devices in a reshard to {mesh}", subtitle)
    return svg, {"tensors": len(laid_out), "moved_bytes": moved, "staying_bytes": stay, "matrix": matrix.tolist()}


def _sum(matrices: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return the sum of matrices, of which smaller ones are of smaller meshes."""
    import numpy as np

    shape = tuple(max(matrix.shape[dim] for matrix in matrices) for dim in (0, 1))
    total = np.zeros(shape, np.int64)
    for matrix in matrices:
        total[: matrix.shape[0], : matrix.shape[1]] += matrix
    return total


def _timeline(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    from dtckpt.checkpoint.reading.manifest_files import KIND
    from dtckpt.checkpoint.timeline import timeline_picture

    costs = checkpoint.manifest.costs if checkpoint.format == KIND else {}
    if not any(costs.values()):
        raise CheckpointError(
            f"{checkpoint.path} stores no timings of its save; dtckpt.save and CheckpointManager store them; draw "
            "its regions or traffic: name a tensor, or give --mesh"
        )
    subtitle = "seconds of each phase, in their order; a grey end is the wait for the other clients"
    svg = timeline_picture(costs, f"Save of {checkpoint.path.name} by {format_count(len(costs), 'client')}", subtitle)
    clients = [
        {"client": client, **{phase: round(cost.seconds, 6) for phase, cost in own.items()}}
        for client, own in sorted(costs.items())
    ]
    return svg, {"clients": clients}
