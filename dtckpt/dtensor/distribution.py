"""Put existing tensors and modules on a mesh: `distribute_tensor`, `distribute_module`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dtckpt.dtensor import transport
from dtckpt.dtensor.devices import device_of
from dtckpt.dtensor.factories import require_mesh
from dtckpt.dtensor.functional import from_placements, redistribute
from dtckpt.dtensor.moving import copy_to_mesh
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import (
    ComponentError,
    DtckptError,
    LayoutError,
    LayoutTypeError,
    MeshError,
    capped,
    from_wire,
    to_wire,
)
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.placement import Placement

_APPLIED = "_distribute_module_applied"


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Mesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return a DTensor of the values that one client's ``tensor`` has. The result is a leaf.

    Collective: Over the mesh's clients, unless ``src_data_rank`` is None.

    Args:
        tensor: On every client a tensor of one shape and dtype; the values count on one of them only. A DTensor that
            has the wanted mesh and placements is returned as it is.
        device_mesh: Default the mesh of the innermost `run_on` block.
        placements: One per mesh axis; None means replicated.
        src_data_rank: Position along every axis of the device whose client gives the values; None: every client uses
            its own, which must be the same, and nothing is communicated.

    Raises:
        ComponentError: The clients' tensors differ in shape or dtype, or the other arguments do.
        LayoutError: A DTensor has another mesh or other placements; redistribute does that. The tensor is no leaf.
        MeshError: The mesh has no such position.
    """
    mesh = require_mesh(device_mesh)
    if isinstance(tensor, DTensor):
        return _as_it_is(tensor, from_placements(mesh, placements, tensor.ndim))
    wanted = _wanted(tensor, mesh, placements, src_data_rank)
    if src_data_rank is not None and not mesh.is_remote() and mesh.num_clients > 1:
        wanted = _agreed(wanted, tensor, mesh, src_data_rank)
    if isinstance(wanted, DtckptError):
        raise wanted
    plain = Layout(wanted.sharding_specs, mesh)
    if src_data_rank is None:
        placed = copy_to_mesh(tensor.detach(), plain)
    else:
        placed = _own(redistribute(_on_one_device(tensor.detach(), mesh, src_data_rank), plain), tensor)
    result = redistribute(placed, wanted)
    result.requires_grad_(tensor.requires_grad)
    return result


def _as_it_is(tensor: DTensor, layout: Layout) -> DTensor:
    if tensor.layout != layout:
        raise LayoutError(
            f"the tensor is distributed already; got {_described(tensor.layout)}, expected {_described(layout)}; "
            "use redistribute"
        )
    return tensor


def _described(layout: Layout) -> str:
    """Return a text that is the same on every client."""
    mesh = layout.mesh
    return f"{layout.placements} on mesh {mesh.name!r} {mesh.axis_sizes} of clients {capped(mesh.clients)}"


def _wanted(
    tensor: object, mesh: Mesh, placements: Sequence[Placement] | None, position: int | None
) -> Layout | DtckptError:
    """Return the layout, or what is wrong with the arguments as this client alone sees them."""
    try:
        if not isinstance(tensor, torch.Tensor):
            raise LayoutTypeError(f"distribute_tensor needs a tensor; got {type(tensor).__name__}")
        if not tensor.is_leaf:
            raise LayoutError(
                "distribute_tensor makes leaves, so no gradient would get through; got a tensor that was computed, "
                "expected a leaf; use DTensor.from_local and redistribute, or detach it"
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"layout {tensor.layout}"
            raise LayoutError(f"distribute_tensor needs a dense tensor that has values; got {kind}")
        layout = from_placements(mesh, placements, tensor.ndim)
        if position is not None and (not isinstance(position, int) or not 0 <= position < min(mesh.shape)):
            raise MeshError(f"src_data_rank is {position!r}; expected a position along every axis of {mesh.axis_sizes}")
        return layout
    except DtckptError as error:
        return error


def _agreed(wanted: Layout | DtckptError, tensor: torch.Tensor, mesh: Mesh, position: int) -> Layout | DtckptError:
    """Return ``wanted`` if all clients want the same, else one error, the same one on all of them."""
    if not transport.is_connected(mesh.clients):
        return wanted
    if isinstance(wanted, DtckptError):
        seen: tuple[Any, ...] = (to_wire(wanted), None)
    else:
        seen = (None, (tuple(tensor.shape), str(tensor.dtype), str(wanted.placements), position))
    facts = transport.all_gather_object(seen, mesh.clients)
    failure = next((failure for failure, _ in facts if failure is not None), None)
    if failure is not None:
        return from_wire(*failure)
    asked = [asked for _, asked in facts]
    if len(set(asked)) > 1:
        return ComponentError(
            f"distribute_tensor: clients differ in shape, dtype, placements or src_data_rank; got {capped(asked)}; "
            "expected the same on every client"
        )
    return wanted


def _on_one_device(tensor: torch.Tensor, mesh: Mesh, position: int) -> DTensor:
    """Return the tensor as the one component of a mesh that has only the device at ``position`` along every axis."""
    device = mesh.device_ids[int(np.ravel_multi_index((position,) * mesh.ndim, mesh.shape))]
    name = mesh.portable().global_devices()[device - mesh.min_global_device_id()]
    is_mine = device in mesh.local_device_ids()
    source = Mesh(["source"], np.arange(1), [0] if is_mine else [], [name] if is_mine else [], "", [name])
    components = [tensor.to(device_of(name))] if is_mine else []
    return DTensor(components, Layout.replicated(source, tensor.ndim), tensor.shape, tensor.dtype)


def _own(made: DTensor, tensor: torch.Tensor) -> DTensor:
    """Return the DTensor with memory of its own: a component that did not have to move is the caller's tensor still."""
    storage = tensor.untyped_storage().data_ptr()
    components = [
        part.clone(memory_format=torch.contiguous_format) if part.untyped_storage().data_ptr() == storage else part
        for part in made.components
    ]
    return DTensor(components, made.layout, made.shape, made.dtype)


def distribute_module(
    module: nn.Module,
    device_mesh: Mesh | None = None,
    partition_fn: Callable[[str, nn.Module, Mesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
) -> nn.Module:
    """Turn a module's parameters and buffers into DTensors, in place.

    Collective: Over the mesh's clients, as `distribute_tensor` for every parameter and buffer.

    Args:
        module: The module.
        device_mesh: Default the mesh of the innermost `run_on` block.
        partition_fn: Called with name, submodule and mesh for every submodule, the root (``""``) first; it may replace
            parameters by DTensors. What it leaves plain is replicated.
        input_fn: Called with module, inputs and mesh before the module's forward; what it returns are the inputs.
        output_fn: Called with module, outputs and mesh after it; what it returns are the outputs.

    Returns:
        ``module``.

    Raises:
        LayoutError: The module was distributed before.
    """
    mesh = require_mesh(device_mesh)
    if getattr(module, _APPLIED, False):
        raise LayoutError("distribute_module was applied to this module already; a module can be distributed once")
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda root, inputs: input_fn(root, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda root, _, outputs: output_fn(root, outputs, mesh))
    setattr(module, _APPLIED, True)
    return module


def _replicate_rest(module: nn.Module, mesh: Mesh) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, DTensor):
            whole = distribute_tensor(parameter.detach(), mesh)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(buffer, mesh)
