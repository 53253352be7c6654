"""Read PyTorch's own DTensors. This is the only module that looks at ``torch.distributed.tensor``.

It never imports that package: a value can be a PyTorch DTensor only if the program has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dtckpt.layout import torch_device_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.placement import Partial, Placement, Replicate, Shard, _StridedShard


def is_torch_dtensor(value: object) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def layout_and_local(value: Any) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout and the local component (None for a client outside the mesh) of a PyTorch DTensor.

    Raises:
        LayoutError: Its placements have no counterpart here.
    """
    mesh = torch_device_mesh.mesh_of(value.device_mesh)
    layout = Layout.from_placements(mesh, [_placement(item) for item in value.placements], value.ndim)
    return layout, None if mesh.is_remote() else value.to_local().detach()


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        return Partial(placement.reduce_op)
    if type(placement).__name__ == "_StridedShard":
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim)
