"""Conversion between `DTensor` and PyTorch's own DTensor; see also `dtckpt.layout.placement.placement_of`.

This module imports PyTorch's package only to make a PyTorch DTensor: the program has imported the package already if a
value is a PyTorch DTensor.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout.device_mesh import adopt, device_mesh_of, mesh_of
from dtckpt.layout.layout import Layout
from dtckpt.layout.placement import Partial, Placement, Shard, _StridedShard


def is_torch_dtensor(value: object) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


KeptLayouts = dict[Any, tuple[Any, Layout, bool]]
"""By id of a PyTorch mesh, placements and number of dims: the mesh, which keeps the id; layout; if it is remote."""


def layout_and_local(value: Any, kept: KeptLayouts | None = None) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout and the local component (None for a client outside the mesh) of a PyTorch DTensor.

    Args:
        value: The tensor.
        kept: Layouts of converted tensors, to which this call adds: a model has thousands of tensors of equal layout.
            The mapping must not outlive the objects on which a layout depends, such as the default process group.

    Raises:
        LayoutError: Its placements have no counterpart here, or its local part is a `DTensor` itself.
    """
    local = torch_private.local_tensor_of(value).detach()  # to_local() would record a gradient, which takes much longer
    if isinstance(local, DTensor):
        raise LayoutError(
            "got a DTensor of PyTorch whose local part is a DTensor of dtckpt, so its rows are not the rows of the "
            "tensor; shard a module by one of the two libraries: pass PyTorch's fully_shard to_torch(…) of its tensors"
        )
    mesh = value.device_mesh
    key = id(mesh), value.placements, value.ndim
    found = None if kept is None else kept.get(key)
    if found is None:
        layout = Layout.from_placements(mesh_of(mesh), value.placements, value.ndim)
        found = mesh, layout, layout.mesh.is_remote()
        if kept is not None:
            kept[key] = found
    return found[1], None if found[2] else local


def to_torch(tensor: DTensor, device_mesh: Any = None) -> Any:
    """Return PyTorch's DTensor with the components of a `DTensor`: the same memory, no copy. Differentiable.

    The result for a parameter is no leaf; ``nn.Parameter(to_torch(parameter.detach()))`` is a leaf.

    Collective: Over the mesh's clients if ``device_mesh`` is None and the mesh is new to PyTorch, because the call may
    make process groups. Otherwise local.

    Args:
        tensor: The tensor; each client owns one device of its mesh.
        device_mesh: PyTorch's mesh of the same devices; default: the mesh that was converted to this
            mesh, or a new mesh, which is kept.

    Raises:
        LayoutTypeError: The value is no `DTensor`.
        ComponentError: A client owns several devices of the mesh.
        CoordinationError: No default process group spans the clients.
    """
    from torch.distributed.tensor import DTensor as TorchDTensor  # here, as most programs do without

    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"to_torch: got {type(tensor).__name__}, expected a DTensor of dtckpt")
    local = tensor.to_local()
    mesh = device_mesh_of(tensor.device_mesh) if device_mesh is None else device_mesh
    return TorchDTensor.from_local(
        local,
        mesh,
        [_torch_placement(item) for item in tensor.placements],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def from_torch(tensor: Any) -> DTensor:
    """Return the `DTensor` with the local part of a PyTorch DTensor: the same memory, no copy. Differentiable.

    Collective: As `Mesh.from_device_mesh`: all clients of the mesh call it, though nothing is sent.

    Raises:
        LayoutTypeError: The value is no DTensor of PyTorch.
        LayoutError: Its placements have no counterpart here, or its local part is a `DTensor` itself.
    """
    if not is_torch_dtensor(tensor):
        raise LayoutTypeError(f"from_torch: got {type(tensor).__name__}, expected a DTensor of PyTorch")
    layout, _ = layout_and_local(tensor)
    return DTensor.from_local(
        tensor.to_local(),
        adopt(tensor.device_mesh),
        layout.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _torch_placement(placement: Placement) -> Any:
    from torch.distributed.tensor import placement_types

    if isinstance(placement, Shard):
        return placement_types.Shard(placement.dim)
    if isinstance(placement, Partial):
        return placement_types.Partial(placement.reduce_op)
    if isinstance(placement, _StridedShard):
        return torch_private.strided_shard(placement.dim, placement.split_factor)
    return placement_types.Replicate()
