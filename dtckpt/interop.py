"""PyTorch's own DTensors, seen as ours: the only module that looks at ``torch.distributed.tensor``.

It is never imported from here: an object can be one of its tensors only if the program has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from dtckpt.clients import job_name
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.placement import Partial, Placement, Replicate, Shard, _StridedShard


def is_torch_dtensor(value: object) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def layout_and_local(value: Any) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout and the local component (None for a client outside the mesh) of a PyTorch DTensor.

    Raises:
        LayoutError: Its placements have no counterpart here.
    """
    mesh = mesh_of(value.device_mesh)
    layout = Layout.from_placements(mesh, [_placement(item) for item in value.placements], value.ndim)
    return layout, None if mesh.is_remote() else value.to_local().detach()


def mesh_of(device_mesh: Any) -> Mesh:
    """Return the `Mesh` of a PyTorch ``DeviceMesh``; ranks are clients with one device each.

    Device ids count the mesh's devices row-major; which client owns a device stands in its name.
    """
    ranks = device_mesh.mesh.cpu().numpy()
    names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
    kind = "GPU" if device_mesh.device_type == "cuda" else "CPU"
    devices = [f"/job:{job_name()}/replica:0/task:{rank}/device:{kind}:0" for rank in ranks.reshape(-1).tolist()]
    ids = np.arange(ranks.size).reshape(ranks.shape)
    mine = ids[ranks == device_mesh.get_rank()].tolist()
    return Mesh(names, ids, mine, [devices[index] for index in mine], "", devices)


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        return Partial(placement.reduce_op)
    if type(placement).__name__ == "_StridedShard":
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim)
