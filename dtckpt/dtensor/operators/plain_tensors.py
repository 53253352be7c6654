"""Plain tensors beside DTensors: they count as replicated, if all clients have the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor import components as packing
from dtckpt.dtensor.operators.operands import replicated_layout
from dtckpt.dtensor.operators.plans import are_plain_tensors_trusted, trust_plain_tensors
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.mesh import Mesh


def to_dtensors(tensors: Sequence[torch.Tensor], mesh: Mesh, unread: Sequence[torch.Tensor] = ()) -> list[Any]:
    """Return tensors with the plain ones as replicated DTensors.

    Collective: Over the mesh's clients, which compare digests of plain tensors that have more than one element, except
    under `dtckpt.dtensor.operators.plans.trust_plain_tensors`.

    Args:
        tensors: DTensors, which it returns unchanged, and plain tensors.
        mesh: The mesh of the new DTensors.
        unread: Tensors that the operator only writes to, so that their values do not matter.

    Raises:
        ReplicaMismatchError: The values of a plain tensor differ between clients.
    """
    dtensors = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            dtensors.append(tensor)
            continue
        components = _components(tensor.detach(), mesh)
        layout = replicated_layout(mesh, tensor.ndim)
        is_read = tensor.numel() > 1 and not tensor.is_meta and not any(tensor is one for one in unread)
        if is_read and mesh.num_clients > 1 and not are_plain_tensors_trusted():
            packing.pack(components, layout, tensor.shape, run_check=True)
        stride = tensor.stride() if tensor.layout is torch.strided else None
        dtensors.append(DTensor(components, layout, tensor.shape, tensor.dtype, device=tensor.device, stride=stride))
    return dtensors


def _components(tensor: torch.Tensor, mesh: Mesh) -> list[torch.Tensor]:
    """Return a tensor on each of this client's devices: itself where it lies, and copies, each in its own memory."""
    places = [tensor.device if tensor.is_meta else device_of(name) for name in mesh.local_devices()]
    # Once to each GPU, because mesh devices may share one; further copies are made on the GPU.
    brought = {place: _on(place, tensor) for place in dict.fromkeys(places)}
    return [
        brought[place].clone() if place in places[:number] else brought[place] for number, place in enumerate(places)
    ]


def _on(place: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 0 and tensor.device.type == "cpu" != place.type:
        # The number goes along with a kernel, as where PyTorch takes a scalar of the host beside tensors of a GPU. A
        # copy out of ordinary memory makes the host wait, and a graph cannot capture it.
        return torch.empty((), dtype=tensor.dtype, device=place).fill_(tensor)
    return tensor.to(place)


def gradient_to_dtensor(gradient: torch.Tensor, mesh: Mesh) -> DTensor:
    """Return a gradient as a DTensor: PyTorch makes some gradients of zeros from the shape alone, as plain tensors."""
    if isinstance(gradient, DTensor):
        return gradient
    with trust_plain_tensors():
        dtensor: DTensor = to_dtensors([gradient.clone()], mesh)[0]
    return dtensor
