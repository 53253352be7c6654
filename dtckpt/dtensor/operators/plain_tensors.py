"""Plain tensors beside DTensors: they count as replicated, once the clients have found theirs to be the same."""

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


def to_dtensors(tensors: Sequence[torch.Tensor], mesh: Mesh) -> list[Any]:
    """Return tensors with the plain ones as DTensors that every device of the mesh holds.

    Collective: Over the mesh's clients, which compare digests of plain tensors that have more than one element,
    unless those are known to agree (see `dtckpt.dtensor.operators.plans.trust_plain_tensors`).

    Raises:
        ReplicaMismatchError: They differ.
    """
    adopted = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            adopted.append(tensor)
            continue
        names = mesh.local_devices()
        components = [
            (tensor if number == 0 else tensor.clone())
            .detach()
            .to(tensor.device if tensor.is_meta else device_of(name))
            for number, name in enumerate(names)
        ]
        layout = replicated_layout(mesh, tensor.ndim)
        if tensor.numel() > 1 and mesh.num_clients > 1 and not are_plain_tensors_trusted() and not tensor.is_meta:
            packing.pack(components, layout, tensor.shape, run_check=True)
        adopted.append(DTensor(components, layout, tensor.shape, tensor.dtype, device=tensor.device))
    return adopted


def gradient_to_dtensor(gradient: torch.Tensor, mesh: Mesh) -> DTensor:
    """Return a gradient of zeros that PyTorch may have made as a plain tensor, as a DTensor on the mesh."""
    if isinstance(gradient, DTensor):
        return gradient
    with trust_plain_tensors():
        made: DTensor = to_dtensors([gradient.clone()], mesh)[0]
    return made
