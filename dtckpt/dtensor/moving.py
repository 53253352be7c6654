"""`relayout`, `copy_to_mesh`, `call_with_layout`, `run_on`: TensorFlow's names for moving tensors to layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as PyTorchMesh

from dtckpt import default_mesh
from dtckpt.dtensor.functional import redistribute
from dtckpt.dtensor.packing import pack
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout import MATCH, UNSHARDED, Layout
from dtckpt.mesh import Mesh

MeshLike = Mesh | PyTorchMesh
"""What will do where a mesh is asked for."""


def relayout(tensor: torch.Tensor, layout: Layout) -> DTensor:
    """Return a tensor in another layout; a MATCH spec keeps the present one. Differentiable for DTensors.

    Collective: As `redistribute`. A plain tensor is taken to be the same on every client; nothing is communicated.

    Raises:
        LayoutTypeError: ``layout`` is no Layout, or ``tensor`` no tensor.
        LayoutError: The ranks differ.
    """
    if isinstance(tensor, DTensor):
        return redistribute(tensor, layout)
    return copy_to_mesh(tensor, layout)


def copy_to_mesh(tensor: Any, layout: Layout) -> DTensor:
    """Put a tensor on a mesh: each client cuts its devices' components out of its own copy.

    A DTensor is redistributed. Uneven sizes follow ``torch.chunk``; a MATCH spec of a plain tensor means unsharded.

    Raises:
        LayoutTypeError: ``layout`` is no Layout, or ``tensor`` cannot become a tensor.
        LayoutError: The ranks differ, or a reduction would be pending.
    """
    if not isinstance(layout, Layout):
        raise LayoutTypeError(f"copy_to_mesh needs a Layout; got {type(layout).__name__}")
    if isinstance(tensor, DTensor):
        return redistribute(tensor, layout)
    try:
        whole = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutTypeError(f"copy_to_mesh needs a tensor; got {type(tensor).__name__}: {error}") from error
    if layout.rank != whole.ndim:
        raise LayoutError(f"layout does not fit the tensor; got rank {layout.rank}, expected {whole.ndim}")
    if layout.partial:
        raise LayoutError(
            f"a plain tensor has no terms to be reduced; got partial axes {layout.partial}, expected none"
        )
    specs = [UNSHARDED if spec == MATCH else spec for spec in layout.sharding_specs]
    layout = Layout(specs, layout.mesh)
    regions = (layout.region(device, whole.shape) for device in layout.mesh.local_device_ids())
    made = pack([whole[region.slices()].clone() for region in regions], layout, whole.shape)
    return made if made.components else DTensor([], layout, whole.shape, whole.dtype, device=whole.device)


def call_with_layout(fn: Callable[..., Any], layout: Layout | None, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` and bring its result, a tensor, into ``layout``; None leaves it as it is."""
    result = fn(*args, **kwargs)
    return result if layout is None else relayout(result, layout)


@contextmanager
def run_on(mesh: MeshLike) -> Iterator[Mesh]:
    """Make ``mesh`` the default one inside a ``with`` block; the outer one comes back however the block ends.

    ``with mesh:`` does the same. A ``DeviceMesh`` of PyTorch will do as well.
    """
    with as_mesh(mesh) as active:
        yield active


def get_default_mesh() -> Mesh | None:
    """Return the mesh of the innermost ``with mesh:`` or `run_on` block, if there is one."""
    mesh: Mesh | None = default_mesh.get()
    return mesh


def as_mesh(mesh: MeshLike) -> Mesh:
    """Return a mesh as it is, and the `Mesh` of a PyTorch ``DeviceMesh``.

    Raises:
        MeshTypeError: This is neither.
    """
    return mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
