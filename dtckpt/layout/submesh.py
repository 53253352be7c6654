"""Parts of meshes: what `Mesh` does to slice, flatten, cut and concatenate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtckpt.errors import AxisNotFoundError, MeshError, MeshTypeError
from dtckpt.layout import mesh_validation, text_format

if TYPE_CHECKING:
    from dtckpt.layout.mesh import Mesh


def sliced(mesh: Mesh, names: str | Sequence[str]) -> Mesh:
    """Return `Mesh.__getitem__`."""
    wanted = (names,) if isinstance(names, str) else mesh_validation.sequence_of("axes to keep", names)
    if wanted == mesh.mesh_dim_names:
        return mesh
    return _slice(mesh, tuple((name, _axes_behind(mesh, name)) for name in wanted))


def flattened(mesh: Mesh, axes: Sequence[str] | None, name: str | None) -> Mesh:
    """Return `Mesh.flatten`."""
    kept = mesh if axes is None else mesh[axes]
    name = "_".join(kept.mesh_dim_names) if name is None else name
    behind = tuple(origin for axis in kept.mesh_dim_names for origin in kept.origins[axis])
    known = mesh.origins.get(name, behind)
    if known != behind:
        raise MeshError(f"{mesh.label}: got {name!r} as name for axes {behind}, expected another: it means {known}")
    flat = kept if (name,) == kept.mesh_dim_names else _slice(kept, ((name, kept.mesh_dim_names),))
    mesh.origins[name] = behind
    return flat


def unflattened(mesh: Mesh, dim: int | str, sizes: Sequence[int], names: Sequence[str], backend_override: Any) -> Mesh:
    """Return `Mesh._unflatten`."""
    axis, backends = mesh.axis_index(dim), mesh_validation.backends_of(backend_override, names)
    record = mesh_validation.unflattened_record(mesh.record, axis, sizes, names, mesh.label)
    return _part(mesh, record, range(mesh.size()), mesh.backends | backends)


def concatenated(meshes: Sequence[Mesh]) -> Mesh:
    """Return `Mesh._concatenate`."""
    roots = {mesh.place[0] for mesh in meshes}
    if len(roots) != 1:
        raise MeshError(f"meshes to concatenate: got parts of {len(roots)} meshes, expected parts of one")
    root, parts = roots.pop(), [(mesh.record.dims, mesh.place[1]) for mesh in meshes]
    record, offsets = mesh_validation.concatenated_record(root.record, root.device_names, parts)
    return _part(root, record, offsets, {axis: found for mesh in meshes for axis, found in mesh.backends.items()})


def _axes_behind(mesh: Mesh, name: str) -> tuple[str, ...]:
    """Return the axes of a mesh that a name stands for."""
    if not isinstance(name, str):
        raise MeshTypeError(f"{mesh.label}: got {name!r} as axis name, expected str")
    axes = (name,) if name in mesh.mesh_dim_names else mesh.origins.get(name, ())
    if not axes or not set(axes) <= set(mesh.mesh_dim_names):
        more = [known for known in mesh.origins if known not in mesh.mesh_dim_names]
        also = f" or flattened {more}" if more else ""
        raise AxisNotFoundError(f"{mesh.label}: got axis {name!r}, expected one of {mesh.dim_names}{also}")
    return axes


def _slice(mesh: Mesh, parts: tuple[tuple[str, tuple[str, ...]], ...]) -> Mesh:
    """Return the slice with new axes, each made of axes of the mesh; made once."""
    if parts not in mesh.slices:
        record, offsets = mesh_validation.slice_record(mesh.record, mesh.device_names, parts, mesh.label)
        mesh.slices[parts] = _part(mesh, record, offsets, mesh.backends)
        vars(mesh.slices[parts])["origins"] = mesh.origins
    return mesh.slices[parts]


def _part(
    mesh: Mesh, record: text_format.MeshRecord, offsets: Sequence[int], backends: dict[str, tuple[str | None, Any]]
) -> Mesh:
    """Return the mesh of some devices of a mesh, which stand at these row-major offsets in it."""
    made, (root, places) = type(mesh).from_record(record), mesh.place
    vars(made).update(place=(root, [places[offset] for offset in offsets]), backends=backends)
    return made
