"""Pictures of meshes, layouts and tensors in notebooks. Importing this module gives `Mesh` and `Layout` theirs."""

from __future__ import annotations

import math

import numpy as np

from dtckpt.errors import LayoutError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.pictures.sharding import Subject, region_colours, subject_svg
from dtckpt.pictures.svg import INK, Picture

MAX_CELLS = 4096
"""More cells are too small for a picture; then a notebook shows the text."""
_WIDTH, _TOP, _CHAR = 560, 74, 7.0


def drawn(subject: Subject, title: str) -> str | None:
    """Return a picture; None if there is none: of too many cells or dims, or of a sum that is pending."""
    try:
        return subject_svg(subject, title) if len(subject.cells) <= MAX_CELLS else None
    except LayoutError:
        return None


def layout_picture(layout: Layout) -> str | None:
    """Draw a layout as a tensor with one element in each shard; return None if there are too many, or unknown ones."""
    specs = ", ".join(spec if isinstance(spec, str) else "+".join(spec) for spec in layout.sharding_specs)
    try:
        shape = tuple(layout.num_shards(dim) for dim in range(layout.rank))
    except LayoutError:  # it leaves open how a dim is split
        return None
    if math.prod(shape) > MAX_CELLS:  # before so many cells are made
        return None
    return drawn(Subject(layout, shape), f"Layout ({specs}), of a tensor with one element in each shard")


def mesh_picture(mesh: Mesh) -> str | None:
    """Draw the devices of a mesh: a column for each index of the last axis, a row for each of the others together.

    Devices of one client have one colour. A tooltip has the numbers of device and client.

    Returns:
        The picture as SVG; None of more devices than are legible.
    """
    if not 0 < mesh.size() <= MAX_CELLS:
        return None
    *outer, inner = mesh.dim_names
    columns = mesh.shape[-1]
    rows = mesh.size() // columns
    names = [_indices(outer, np.unravel_index(row, mesh.shape[:-1])) if outer else "" for row in range(rows)]
    left = 32 + _CHAR * max(map(len, names))
    width, height = max(14.0, min(120.0, _WIDTH / columns)), max(13.0, min(44.0, 700 / rows))
    picture = Picture(repr(mesh.axis_sizes), max(420.0, left + columns * width + 20), _TOP + rows * height + 20)
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.axis_sizes.items())
    clients = len(mesh.clients)
    picture.text(20, 28, f"Mesh {sizes}", "h")
    picture.text(
        20, 48, f"{mesh.size()} devices of {clients} client{'s' * (clients != 1)}; one colour for each client", "s"
    )
    every = math.ceil(_CHAR * (len(inner) + 5) / width)
    for column in range(0, columns, every):
        picture.text(left + (column + 0.5) * width, _TOP - 8, f"{inner} {column}", "t", anchor="middle")
    for row, name in enumerate(names):
        picture.text(left - 8, _TOP + (row + 0.5) * height + 4, name, "t", anchor="end")
    for number, device in enumerate(mesh.device_ids):
        client = mesh.client_of(device)
        row, column = divmod(number, columns)
        x, y = left + column * width, _TOP + row * height
        picture.rect(x, y, width - 2, height - 2, region_colours(client)[0], f"device {device}, client {client}")
        if width >= _CHAR * len(str(device)) + 4:
            picture.text(x + width / 2 - 1, y + height / 2 + 3, str(device), "t", anchor="middle", fill=INK)
    return picture.svg()


def _indices(axes: list[str], indices: tuple[np.intp, ...]) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in zip(axes, indices, strict=True))


# Bound here, because meshes and layouts stand below all drawing.
Mesh._repr_svg_ = mesh_picture
Layout._repr_svg_ = layout_picture
