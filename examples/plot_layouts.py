"""Draw which device of a mesh holds which region of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import dtckpt

COLOURS = ("#3b6ea5", "#c4600c", "#3e8a3a", "#8f5b96", "#b83a3a", "#2f8585", "#8a6d00", "#7a5240")


def holders(layout: dtckpt.Layout, shape: Sequence[int]) -> dict[dtckpt.Region, list[int]]:
    """Return the devices that hold each region."""
    found: dict[dtckpt.Region, list[int]] = {}
    for device in layout.mesh.device_ids:
        found.setdefault(layout.region(device, shape), []).append(device)
    return found


def _place(mesh: dtckpt.Mesh, device: int) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in zip(mesh.dim_names, mesh.coordinate(device), strict=True))


def draw(name: str, panels: Sequence[tuple[str, dtckpt.Layout, Sequence[int]]], path: Path) -> None:
    """Draw one panel per ``(title, layout, shape)`` of a tensor with two dims, to an SVG or PNG file."""
    figure = Figure(figsize=(4.6 * len(panels), 5.6), layout="constrained")
    figure.suptitle(f"Which device holds which region of {name}", fontsize=12)
    for axes, (title, layout, shape) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        mesh, edges = layout.mesh, ({0}, {0})
        for region, devices in holders(layout, shape).items():
            (top, left), (height, width) = region.offset, region.shape
            colour = COLOURS[devices[0] % len(COLOURS)]
            axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor="white", linewidth=3))
            label = "\n".join(f"device {device}\n{_place(mesh, device)}" for device in devices)
            middle = (left + width / 2, top + height / 2)
            axes.annotate(f"{label}\n{region}", middle, ha="center", va="center", color="white", fontsize=9.5)
            for found, start, stop in zip(edges, region.offset, region.stop, strict=True):
                found.update((start, stop))
        specs = ", ".join(spec if isinstance(spec, str) else "+".join(spec) for spec in layout.sharding_specs)
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.axis_sizes.items())
        axes.set_title(f"{title}\nmesh {sizes};  sharding specs {specs}", fontsize=10)
        axes.set(xlim=(0, shape[1]), ylim=(shape[0], 0), aspect="equal", xlabel="dim 1", ylabel="dim 0")
        axes.set(xticks=sorted(edges[1]), yticks=sorted(edges[0]))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    is_svg = path.suffix == ".svg"
    with mpl.rc_context({"svg.hashsalt": "dtckpt"}):  # the same layouts give the same file
        figure.savefig(path, metadata={"Date": None} if is_svg else None, dpi=110)
