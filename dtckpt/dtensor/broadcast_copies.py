"""Broadcast of copies: give all devices along replicated axes the values of the first one, as ``from_local`` can.

::

    device (0, 0): a     device (0, 1): b              (0, 0): a     (0, 1): a
    device (1, 0): c     device (1, 1): d     --->     (1, 0): c     (1, 1): c     sharded along the first axis

It is a redistribution from the mesh of the first devices to the whole mesh.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dtckpt.dtensor.derived_layouts import gradient_layout
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor, spec_of, wrap_components
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh


def broadcast_copies(tensor: DTensor) -> DTensor:
    """Return a tensor whose components all equal that of the first device along the replicated axes. Differentiable.

    The gradient passes as if nothing had been sent.

    Collective: Over the mesh's clients.
    """
    result: DTensor = _Broadcast.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        ctx.set_materialize_grads(False)  # torch would make plain zeros, which are no gradient of a DTensor
        ctx.layout = tensor.layout
        return _broadcast(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> DTensor | None:
        return None if gradient is None else redistribute(gradient, gradient_layout(ctx.layout))


def _broadcast(tensor: DTensor) -> DTensor:
    layout, mesh = tensor.layout, tensor.device_mesh
    # Terms of a sum are no copies of each other: here they are the shards of one more dim.
    pending = list(layout.partial)
    kept = {*pending, *(axis for axes in layout.split_axes for axis in axes)}
    firsts = _first_devices(mesh, id(mesh), tuple(axis in kept for axis in mesh.dim_names))
    specs = [*pending, *layout.sharding_specs]
    shape = (*(mesh.dim_size(axis) for axis in pending), *tensor.shape)
    own = dict(zip(mesh.local_devices(), tensor.components, strict=True))
    parts = [own[name].reshape((1,) * len(pending) + own[name].shape) for name in firsts.local_devices()]
    source = DTensor(parts, Layout(specs, firsts), shape, tensor.dtype, device=tensor.device)
    moved = dict(zip(own, redistribute(source, Layout(specs, mesh)).components, strict=True))
    # The first devices keep their components, which share memory with what the caller passed.
    components = [
        part if name in firsts.local_devices() else moved[name].reshape(part.shape) for name, part in own.items()
    ]
    return wrap_components(components, spec_of(tensor))


@lru_cache(maxsize=256)
def _first_devices(mesh: Mesh, identity: int, is_kept: tuple[bool, ...]) -> Mesh:
    """Return the mesh of the devices that come first along all axes but those to keep; those axes have size 1 there."""
    # Equal meshes may be seen from different clients of one process.
    del identity
    names = np.array(mesh.device_names).reshape(mesh.shape)
    firsts = names[tuple(slice(None if is_whole else 1) for is_whole in is_kept)]
    flat, local = firsts.ravel().tolist(), set(mesh.local_devices())
    own = [position for position, name in enumerate(flat) if name in local]
    ids = np.arange(firsts.size).reshape(firsts.shape)
    return Mesh(mesh.dim_names, ids, own, [flat[position] for position in own], "", flat)
