"""Layouts on the root mesh: describe a tensor on a slice of a mesh by the mesh that was sliced.

Each client makes such a tensor on its own slice, and all slices hold the same tensor. On the root mesh the tensor is
replicated along the axes that the slice lacks, so all clients describe it by the same layout::

    root: dp=2, tp=2     norm on mesh["dp"], Shard(0)      the same on the root mesh
    clients  0  1        clients 0 and 2: halves           rows 0..n/2: clients 0 and 1
             2  3        clients 1 and 3: halves           rows n/2..n: clients 2 and 3
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from dtckpt.layout.layout import UNSHARDED, Layout, LayoutType
from dtckpt.layout.mesh import Mesh


def root_layout(layout: Layout) -> Layout:
    """Return the layout on the root mesh, replicated along the axes that its own mesh lacks.

    Returns the layout unchanged if it is on a root mesh, has pending reductions, or is on a mesh that combines or
    splits axes of the root.
    """
    mesh = layout.mesh
    if mesh.root_offsets[0] is mesh or layout.type is not LayoutType.STATIC or layout.has_partial:
        return layout
    axes = _root_axes(mesh)
    return layout if axes is None else _on_root(layout.split_axes, axes, mesh.root_offsets[0])


def _root_axes(mesh: Mesh) -> tuple[tuple[str, str], ...] | None:
    """Map each axis of a slice to its axis of the root; return None if the root lacks one of them."""
    # Kept with the mesh and not by its value: equal meshes may be slices of different roots.
    kept: dict[str, Any] = vars(mesh)
    if "root_axes" not in kept:
        kept["root_axes"] = _find_root_axes(mesh)
    found: tuple[tuple[str, str], ...] | None = kept["root_axes"]
    return found


def _find_root_axes(mesh: Mesh) -> tuple[tuple[str, str], ...] | None:
    root, offsets = mesh.root_offsets
    # By position and not by name: an axis of a slice may have another name.
    coordinates = np.array(np.unravel_index(np.array(offsets), root.shape)).reshape(root.ndim, *mesh.shape)
    expected = coordinates.copy()
    expected[:] = expected.reshape(root.ndim, -1)[:, 0].reshape(-1, *[1] * mesh.ndim)
    pairs: list[tuple[str, str]] = []
    for dim, (axis, size) in enumerate(mesh.axis_sizes.items()):
        # An axis of size 1 may be any axis of the root, and its choice does not matter.
        if size == 1:
            continue
        along = np.moveaxis(coordinates, dim + 1, -1).reshape(root.ndim, -1, size)[:, 0]
        (moving,) = np.nonzero((along != along[:, :1]).any(axis=1))
        if len(moving) != 1 or size != root.shape[moving[0]]:
            return None
        expected[moving[0]] = np.arange(size).reshape([-1 if other == dim else 1 for other in range(mesh.ndim)])
        pairs.append((axis, root.mesh_dim_names[moving[0]]))
    return tuple(pairs) if np.array_equal(coordinates, expected) else None


@lru_cache(maxsize=4096)
def _on_root(split_axes: tuple[tuple[str, ...], ...], axes: tuple[tuple[str, str], ...], root: Mesh) -> Layout:
    names = dict(axes)
    return Layout([tuple(names[axis] for axis in split if axis in names) or UNSHARDED for split in split_axes], root)
