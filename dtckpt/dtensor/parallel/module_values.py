"""Values that enter and leave a module: plain tensors become DTensors, these get a placement, and plain ones return.

::

    plain tensor --to_dtensor--> DTensor --place-->  DTensor in the desired placement --as_output--> plain or DTensor
"""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.derived_layouts import cached_layout
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor
from dtckpt.dtensor.torch_compile import keep_from_tracing
from dtckpt.errors import DtckptError, MeshError, ParallelPlanError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement
from dtckpt.redistribution.execute import report_error


def require_one_axis(style: object, mesh: Mesh) -> None:
    """Check that a mesh has one axis, as the placements of a style are for one.

    Raises:
        MeshError: It has several.
    """
    if mesh.ndim != 1:
        raise MeshError(
            f"{type(style).__name__}: got a mesh of axes {mesh.axis_sizes}, expected one axis; pass a slice, such as "
            f"mesh[{mesh.mesh_dim_names[-1]!r}]"
        )


def to_dtensor(value: Any, mesh: Mesh, placement: Placement, what: str, *, last_size: int | None = None) -> DTensor:
    """Return a value as a DTensor: a plain tensor is this client's component. Differentiable. A DTensor is returned.

    Collective: Over the mesh's clients, which agree on a shape once, if a plain tensor is one of several shards. Not if
        it is split along its last dim and ``last_size`` is given.

    Args:
        value: A tensor.
        mesh: A mesh of one axis.
        placement: Of a plain tensor.
        what: Names the value in errors.
        last_size: Global size of the last dim, if the caller knows it.

    Raises:
        ParallelPlanError: The value is no tensor, or a DTensor on another mesh.
        ComponentError: A shard does not fit the global size, or those of other clients.
        LayoutError: The placement does not fit the tensor.
    """
    try:
        if not isinstance(value, torch.Tensor):
            raise ParallelPlanError(
                f"{what}: got {type(value).__name__}, expected a tensor, as layout {placement!r} says"
            )
        if isinstance(value, DTensor):
            if value.device_mesh != mesh:
                raise ParallelPlanError(
                    f"{what}: got a DTensor on mesh {value.device_mesh.axis_sizes}, expected one on the mesh that the "
                    f"module was parallelized over, {mesh.axis_sizes}; redistribute moves it"
                )
            return value
        shape = _known_shape(value, mesh, placement, last_size)
        if shape is not None:
            return DTensor.from_local(value, mesh, (placement,), shape=shape)
    except DtckptError as error:
        # Facts of this client alone: the others may be on their way into an exchange.
        report_error(error, [mesh])
        raise
    return DTensor.from_local(value, mesh, (placement,))


def _known_shape(
    local: torch.Tensor, mesh: Mesh, placement: Placement, last_size: int | None
) -> tuple[int, ...] | None:
    """Return the global shape of a component; None if other clients must tell their part of it."""
    axes, shape = cached_layout(mesh, (placement,), local.ndim).split_axes, tuple(local.shape)
    if mesh.num_clients == 1 or not any(axes):
        return shape
    return (*shape[:-1], last_size) if axes[-1] and last_size is not None else None


def place(tensor: DTensor, placement: Placement) -> DTensor:
    """Return a tensor with a placement on its only axis. Differentiable. Collective: As `redistribute`."""
    return redistribute(tensor, cached_layout(tensor.device_mesh, (placement,), tensor.ndim))


def as_output(tensor: DTensor, use_local_output: bool) -> torch.Tensor:
    """Return a tensor, or this client's component of it, differentiable both.

    Raises:
        ComponentError: The component was asked for, and this client has several devices.
    """
    return tensor.to_local() if use_local_output else tensor


keep_from_tracing([to_dtensor, place, as_output])
