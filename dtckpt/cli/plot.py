"""``dtckpt plot``: draw regions of a tensor, the traffic of a reshard, or the timeline of a save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.inspecting.traffic import traffic
from dtckpt.checkpoint.reading.checkpoint import Checkpoint, open_checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.timeline import timeline_picture
from dtckpt.cli.arguments import LayoutRules, parse_mesh, read_rules
from dtckpt.cli.output import format_count, write_event, write_summary
from dtckpt.cli.picture_files import svg_size, validate_output, write_picture
from dtckpt.cli.pictures import traffic_picture
from dtckpt.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    format_nbytes,
    printable,
)
from dtckpt.layout.layout import Layout
from dtckpt.pictures.sharding import Subject, sharding_grid, subject_svg
from dtckpt.pictures.svg import Picture

_GAP = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotRequest:
    """The arguments of the command, as `click` passes them; see `dtckpt.cli.commands`."""

    path: str
    tensor: str | None
    output: Path
    kind: str | None
    mesh: str | None
    layouts: Sequence[str]
    layout_file: Path | None
    as_json: bool


def run_plot(request: PlotRequest) -> None:
    """Run the command.

    Raises:
        ConfigError: Options do not fit together, or the output cannot have this format.
        TensorNotFoundError: There is no such tensor.
        LayoutError: A layout does not fit, or a tensor has none.
        CheckpointError: The checkpoint stores no timings; or as for `dtckpt.open_checkpoint`.
    """
    validate_output(request.output)
    kind = request.kind or ("regions" if request.tensor else "traffic" if request.mesh else "timeline")
    if request.mesh is None and (request.layouts or request.layout_file):
        raise ConfigError("--layout and --layout-file need the mesh that they are for; give --mesh")
    draw = {"regions": _regions, "traffic": _traffic, "timeline": _timeline}[kind]
    with open_checkpoint(request.path) as checkpoint:
        svg, facts = draw(checkpoint, request)
        title = f"{kind} of {checkpoint.path}"
    write_picture(svg, title, request.output)
    if request.as_json:
        write_event("plot", kind=kind, path=str(checkpoint.path), output=str(request.output), **facts)
    else:
        write_summary(printable(f"wrote the {kind} of {checkpoint.path} to {request.output}"))


def _rules(request: PlotRequest) -> LayoutRules | None:
    """Return the rules for the layouts after the reshard; None without a mesh."""
    if request.mesh is None:
        return None
    from_file = read_rules(request.layout_file) if request.layout_file else ()
    return LayoutRules([*request.layouts, *from_file], parse_mesh(request.mesh))


def _layout(info: TensorInfo) -> Layout:
    if info.layout is None:
        raise LayoutError(f"tensor {info.name!r} was saved without a layout: every client had all of it")
    return info.layout


def _regions(checkpoint: Checkpoint, request: PlotRequest) -> tuple[str, dict[str, Any]]:
    if request.tensor is None:
        raise ConfigError("the regions of which tensor? name one behind the path; dtckpt inspect lists them")
    info, rules = checkpoint.info(request.tensor), _rules(request)
    layouts = {"as saved": _layout(info)}
    if rules is not None:
        layouts["after the reshard"] = rules(info.name, info)
        rules.validate_all_used()
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


def _traffic(checkpoint: Checkpoint, request: PlotRequest) -> tuple[str, dict[str, Any]]:
    rules = _rules(request)
    if rules is None:
        raise ConfigError("the traffic of which reshard? give --mesh, and --layout, as to dtckpt reshard")
    infos = [checkpoint.info(request.tensor)] if request.tensor else list(checkpoint.tensors.values())
    laid_out = [info for info in infos if info.layout is not None]
    if not laid_out:
        names = repr(request.tensor) if request.tensor else "all tensors"
        raise LayoutError(f"{checkpoint.path}: {names} were saved without layouts, so nothing goes between devices")
    # Many tensors are alike, and planning a tensor takes time, so one of each kind is planned.
    alike = Counter((_layout(info), rules(info.name, info), info.shape, info.nbytes) for info in laid_out)
    for info in infos:
        if info.layout is None:
            rules(info.name, info)  # so that a rule for it counts as used
    rules.validate_all_used()
    matrix = _sum([traffic(old, new, shape, nbytes) * count for (old, new, shape, nbytes), count in alike.items()])
    size = min(matrix.shape)
    stay = int(np.trace(matrix[:size, :size]))
    moved = int(matrix.sum()) - stay
    what = request.tensor or format_count(len(laid_out), "tensor")
    subtitle = f"{what}: {format_nbytes(moved)} go to another device, {format_nbytes(stay)} stay on the diagonal"
    svg = traffic_picture(matrix, f"Bytes between devices in a reshard to {request.mesh}", subtitle)
    return svg, {"tensors": len(laid_out), "moved_bytes": moved, "staying_bytes": stay, "matrix": matrix.tolist()}


def _sum(matrices: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return the sum of matrices, of which smaller ones are of smaller meshes."""
    shape = tuple(max(matrix.shape[dim] for matrix in matrices) for dim in (0, 1))
    total = np.zeros(shape, np.int64)
    for matrix in matrices:
        total[: matrix.shape[0], : matrix.shape[1]] += matrix
    return total


def _timeline(checkpoint: Checkpoint, _: PlotRequest) -> tuple[str, dict[str, Any]]:
    costs = checkpoint.manifest.costs if checkpoint.format == KIND else {}
    if not any(costs.values()):
        raise CheckpointError(
            f"{checkpoint.path} stores no timings of its save, as those of dtckpt.save and CheckpointManager do; draw "
            "its regions or traffic: name a tensor, or give --mesh"
        )
    subtitle = "seconds of each phase, in their order; a grey end is the wait for the other clients"
    svg = timeline_picture(costs, f"Save of {checkpoint.path.name} by {format_count(len(costs), 'client')}", subtitle)
    clients = [
        {"client": client, **{phase: round(cost.seconds, 6) for phase, cost in own.items()}}
        for client, own in sorted(costs.items())
    ]
    return svg, {"clients": clients}
