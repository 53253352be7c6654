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
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError, MeshError
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
        ComponentError: The clients' tensors differ in shape or dtype.
        LayoutError: A DTensor has another mesh or other placements; redistribute does that.
        MeshError: The mesh has no such position.
    """
    if not isinstance(tensor, torch.Tensor):
        raise LayoutTypeError(f"distribute_tensor needs a tensor; got {type(tensor).__name__}")
    mesh = require_mesh(device_mesh)
    layout = from_placements(mesh, placements, tensor.ndim)
    if isinstance(tensor, DTensor):
        if tensor.layout != layout:
            raise LayoutError(
                f"the tensor is distributed already; got {tensor.layout.to_string()}, expected {layout.to_string()}; "
                "use redistribute"
            )
        return tensor
    plain = Layout(layout.sharding_specs, mesh)
    if src_data_rank is None:
        placed = copy_to_mesh(tensor.detach(), plain)
    else:
        placed = redistribute(_on_one_device(tensor.detach(), mesh, src_data_rank), plain)
    result = redistribute(placed, layout)
    result.requires_grad_(tensor.requires_grad)
    return result


def _on_one_device(tensor: torch.Tensor, mesh: Mesh, position: int) -> DTensor:
    """Return the tensor as the one component of a mesh that has only the device at ``position`` along every axis."""
    if not 0 <= position < min(mesh.shape):
        raise MeshError(f"src_data_rank is {position}; expected a position along every axis of {mesh.axis_sizes}")
    if transport.is_connected(mesh.clients) and mesh.num_clients > 1:
        facts = transport.all_gather_object((tuple(tensor.shape), str(tensor.dtype)), mesh.clients)
        if len(set(facts)) > 1:
            raise ComponentError(f"clients distribute tensors of different shapes or dtypes; got {facts[:8]}")
    device = mesh.device_ids[int(np.ravel_multi_index((position,) * mesh.ndim, mesh.shape))]
    name = mesh.portable().global_devices()[device - mesh.min_global_device_id()]
    is_mine = device in mesh.local_device_ids()
    source = Mesh(["source"], np.arange(1), [0] if is_mine else [], [name] if is_mine else [], "", [name])
    components = [tensor.to(device_of(name))] if is_mine else []
    return DTensor(components, Layout.replicated(source, tensor.ndim), tensor.shape, tensor.dtype)


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
