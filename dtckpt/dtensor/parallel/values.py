"""Parameters of parallel modules, and the values that enter and leave a module.

Plain tensors become DTensors, these get a placement, and plain tensors return::

    plain tensor --to_dtensor--> DTensor --place-->  DTensor in the desired placement --as_output--> plain or DTensor

A parameter that several modules share becomes one DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dtckpt.dtensor.derived_layouts import cached_layout
from dtckpt.dtensor.distribute import distribute_tensor
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor, described, fetch_layout
from dtckpt.dtensor.torch_compile import keep_from_tracing
from dtckpt.errors import DtckptError, LayoutError, MeshError, ParallelPlanError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement
from dtckpt.redistribution.execute import report_error


def require_one_axis(style: object, mesh: Mesh) -> None:
    """Check that a mesh has one axis, as the placements of a style are for one.

    Raises:
        MeshError: The mesh has several axes.
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
        ComponentError: A shard does not fit the global size, or the shards of other clients.
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
        # Facts of this client alone: the others may enter an exchange now.
        report_error(error, [mesh])
        raise
    return DTensor.from_local(value, mesh, (placement,))


def _known_shape(
    local: torch.Tensor, mesh: Mesh, placement: Placement, last_size: int | None
) -> tuple[int, ...] | None:
    """Return the global shape of a component; None if it depends on the parts of other clients."""
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


# --- parameters -----------------------------------------------------------------------------------------------------


_replacements: MutableMapping[nn.Parameter, weakref.ref[nn.Parameter]] = WeakIdKeyDictionary()
"""By plain parameter, a weak reference to the DTensor that has replaced it in one module.

Another module may still have the plain parameter: it is tied, and the other module was parallelized alone.
"""


def distribute_parameter(
    module: nn.Module, name: str, mesh: Mesh, placement: Placement, src_data_rank: int | None
) -> None:
    """Replace a module's parameter by a DTensor; a parameter that two modules share becomes the same DTensor in both.

    Collective: As `distribute_tensor`, unless the parameter was distributed with another module.

    Args:
        module: The module.
        name: Of the parameter. If the module has None for it, nothing happens.
        mesh: A mesh of one axis.
        placement: On that axis.
        src_data_rank: As for `distribute_tensor`.

    Raises:
        LayoutError: The parameter was distributed already, in another layout.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    distributed = parameter if isinstance(parameter, DTensor) else replacement_of(parameter)
    if distributed is None:
        made = distribute_tensor(parameter.detach(), mesh, (placement,), src_data_rank=src_data_rank)
        distributed = nn.Parameter(made, requires_grad=parameter.requires_grad)
        _replacements[parameter] = weakref.ref(distributed)
    layout, present = cached_layout(mesh, (placement,), distributed.ndim), fetch_layout(distributed)
    if present != layout:
        raise LayoutError(
            f"parameter {name!r} of {type(module).__name__} was distributed before, perhaps as the parameter of "
            f"another module that shares it; got {described(layout)}, expected {described(present)}; have one style "
            "for all modules that share a parameter, or give each its own copy"
        )
    module.register_parameter(name, distributed)


def replacement_of(parameter: nn.Parameter) -> nn.Parameter | None:
    """Return the DTensor that has replaced a plain parameter in some module that lives; None if there is none."""
    reference = _replacements.get(parameter)
    return None if reference is None else reference()


def tie(module: nn.Module) -> None:
    """Replace plain parameters of a module and its submodules that are DTensors in other modules already."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and (replacement := replacement_of(parameter)) is not None:
                each._parameters[name] = replacement
