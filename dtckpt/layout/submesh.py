"""Slices of meshes: the work of `Mesh.__getitem__`, `flatten`, `_unflatten`, `_concatenate` and `clients_along`.

A slice knows its root mesh and the offsets of its devices there (`Mesh.root_offsets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dtckpt.errors import AxisNotFoundError, MeshError, MeshTypeError
from dtckpt.layout import mesh_validation, text_format

if TYPE_CHECKING:
    from dtckpt.layout.mesh import Mesh


def slice_mesh(mesh: Mesh, names: str | Sequence[str]) -> Mesh:
    """Do the work of `Mesh.__getitem__`."""
    names = (names,) if isinstance(names, str) else mesh_validation.tuple_of("axes to keep", names)
    if names == mesh.mesh_dim_names:
        return mesh
    return _slice(mesh, tuple((name, _axes_named(mesh, name)) for name in names))


def flatten_mesh(mesh: Mesh, axes: Sequence[str] | None, name: str | None) -> Mesh:
    """Do the work of `Mesh.flatten`."""
    part = mesh if axes is None else mesh[axes]
    name = "_".join(part.mesh_dim_names) if name is None else name
    origins = tuple(origin for axis in part.mesh_dim_names for origin in part.origins[axis])
    named = mesh.origins.get(name, origins)
    if named != origins:
        raise MeshError(f"{mesh.label}: got {name!r} as name for axes {origins}, expected another: it means {named}")
    flat = part if (name,) == part.mesh_dim_names else _slice(part, ((name, part.mesh_dim_names),))
    mesh.origins[name] = origins  # last, so that a failed slice does not take the name
    return flat


def unflatten_mesh(
    mesh: Mesh, dim: int | str, sizes: Sequence[int], names: Sequence[str], backend_override: Any
) -> Mesh:
    """Do the work of `Mesh._unflatten`."""
    axis, backends = mesh.axis_index(dim), mesh_validation.parse_backend_override(backend_override, names)
    record = mesh_validation.unflattened_record(mesh.record, axis, sizes, names, mesh.label)
    return _part(mesh, record, range(mesh.size()), mesh.backends | backends)


def concatenate_meshes(meshes: Sequence[Mesh]) -> Mesh:
    """Do the work of `Mesh._concatenate`."""
    roots = {mesh.root_offsets[0] for mesh in meshes}
    if len(roots) != 1:
        raise MeshError(f"meshes to concatenate: got parts of {len(roots)} meshes, expected parts of one")
    root, parts = roots.pop(), [(mesh.record.dims, mesh.root_offsets[1]) for mesh in meshes]
    record, offsets = mesh_validation.concatenated_record(root.record, root.device_names, parts)
    backends = {axis: backend for mesh in meshes for axis, backend in mesh.backends.items()}
    return _part(root, record, offsets, backends)


def clients_of_line(mesh: Mesh, axis: int) -> tuple[int, ...]:
    """Return the clients on the lines of devices along an axis that run through this client's devices, ascending.

    Args:
        mesh: The mesh.
        axis: Position of the axis.

    Raises:
        MeshError: This client has no device in the mesh, or the lines through its devices have different sets of
            clients.
    """
    # The axis last: then the other coordinates of a device are the index of its line.
    owners = np.moveaxis(mesh.owners, axis, -1)
    coordinates = map(mesh.coordinate, mesh.local_device_ids())
    lines = (owners[(*place[:axis], *place[axis + 1 :])].tolist() for place in coordinates)
    client_sets = {tuple(sorted(set(line))) for line in lines}
    # Without a local device there is no set at all.
    if len(client_sets) != 1:
        raise MeshError(
            f"{mesh.label}: got local devices that see {len(client_sets)} sets of clients along axis "
            f"{mesh.mesh_dim_names[axis]!r}, expected one; this client has {len(mesh.local_device_ids())} devices in "
            "the mesh"
        )
    return client_sets.pop()


def _axes_named(mesh: Mesh, name: str) -> tuple[str, ...]:
    """Return the axes of a mesh for which a name stands: one axis, or the flattened axes of this name."""
    if not isinstance(name, str):
        raise MeshTypeError(f"{mesh.label}: got {name!r} as axis name, expected str")
    axes = (name,) if name in mesh.mesh_dim_names else mesh.origins.get(name, ())
    if not axes or not set(axes) <= set(mesh.mesh_dim_names):
        flattened = [other for other in mesh.origins if other not in mesh.mesh_dim_names]
        more = f" or flattened {flattened}" if flattened else ""
        raise AxisNotFoundError(f"{mesh.label}: got axis {name!r}, expected one of {mesh.dim_names}{more}")
    return axes


def _slice(mesh: Mesh, parts: tuple[tuple[str, tuple[str, ...]], ...]) -> Mesh:
    """Return the slice with new axes, each a name and the axes of the mesh that it combines; make it once."""
    if parts not in mesh.slices:
        record, offsets = mesh_validation.slice_record(mesh.record, mesh.device_names, parts, mesh.label)
        mesh.slices[parts] = _part(mesh, record, offsets, mesh.backends)
        vars(mesh.slices[parts])["origins"] = mesh.origins
    return mesh.slices[parts]


def _part(
    mesh: Mesh, record: text_format.MeshRecord, offsets: Sequence[int], backends: dict[str, tuple[str | None, Any]]
) -> Mesh:
    """Return the mesh of the devices at some row-major offsets in a mesh, and note its root."""
    part, (root, root_offsets) = type(mesh).from_record(record), mesh.root_offsets
    # Written past the frozen dataclass: these are cached properties, whose defaults describe a root.
    vars(part).update(root_offsets=(root, [root_offsets[offset] for offset in offsets]), backends=backends)
    return part
