"""TensorFlow's functions on DTensors and layouts: `relayout`, `copy_to_mesh`, `call_with_layout`, `run_on`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dtckpt.comm.torch_private import tree_flatten, tree_unflatten
from dtckpt.dtensor.components import pack
from dtckpt.dtensor.redistribute import meshes_of, redistribute, redistribute_all
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout.device_mesh import MeshLike, as_mesh
from dtckpt.layout.layout import MATCH, UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution.execute import report_error


def relayout(tensor: Any, layout: Any, name: str | None = None) -> Any:
    """Return a tensor, or all tensors of a tree, in other layouts. Differentiable for DTensors.

    The tensors of a tree are redistributed together: boxes that go from one client to another share messages.

    Collective: As `redistribute`. Local for a plain tensor, which must be equal on every client.

    Args:
        tensor: A tensor, a value for `torch.as_tensor`, or a tree (dicts, lists, tuples) with tensors in it.
        layout: A Layout, for all tensors, or a tree of the same structure with one for each; a MATCH spec keeps the
            present spec.
        name: Accepted as in TensorFlow, and ignored: it names an operation of a graph, and there is no graph here.

    Returns:
        A DTensor, or a tree of the same structure. Leaves that are no tensors stay.

    Raises:
        LayoutTypeError: ``layout`` is no Layout, or ``tensor`` no tensor.
        LayoutError: The ranks differ, or the trees do.
    """
    del name
    leaves, structure = tree_flatten(tensor)
    if isinstance(tensor, torch.Tensor) or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        if isinstance(tensor, DTensor):
            return redistribute(tensor, layout, is_counted=True)
        return copy_to_mesh(tensor, layout)
    layouts, layout_structure = tree_flatten(layout)
    if isinstance(layout, Layout):
        layouts = [layout] * len(leaves)
    elif layout_structure != structure:
        error = LayoutError(f"relayout: layouts and tensors are different trees; got {layout_structure}, {structure}")
        report_error(error, meshes_of([*leaves, *layouts]), is_numbered=True)
        raise error
    moving = [number for number, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
    moved = redistribute_all(
        [leaves[number] for number in moving], [layouts[number] for number in moving], is_counted=True
    )
    result = dict(zip(moving, moved, strict=True))
    for number, leaf in enumerate(leaves):
        if number not in result:
            result[number] = copy_to_mesh(leaf, layouts[number]) if isinstance(leaf, torch.Tensor) else leaf
    return tree_unflatten([result[number] for number in range(len(leaves))], structure)


def copy_to_mesh(tensor: Any, layout: Layout, source_layout: Layout | None = None) -> DTensor:
    """Return a DTensor of a plain tensor: each client cuts its devices' components out of its copy.

    Nothing is communicated. Uneven sizes follow ``torch.chunk``; a MATCH spec means unsharded. For a DTensor the call
    redistributes instead, and is collective.

    Args:
        tensor: A tensor, or a value for `torch.as_tensor`.
        layout: The layout of the result.
        source_layout: Accepted as in TensorFlow, and ignored as there: the tensor has its layout.

    Raises:
        LayoutTypeError: ``layout`` is no Layout, or ``tensor`` cannot become a tensor.
        LayoutError: The ranks differ, or a reduction would be pending.
    """
    del source_layout
    if isinstance(tensor, DTensor):
        return redistribute(tensor, layout, is_counted=True)
    if not isinstance(layout, Layout):
        raise LayoutTypeError(f"copy_to_mesh needs a Layout; got {type(layout).__name__}")
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
    result = pack(
        [whole[region.slices()].clone(memory_format=torch.contiguous_format) for region in regions], layout, whole.shape
    )
    return result if result.components else DTensor([], layout, whole.shape, whole.dtype, device=whole.device)


def call_with_layout(fn: Callable[..., Any], layout: Layout | None, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn``, and return its result, a tensor, in ``layout``; None leaves the result as it is."""
    result = fn(*args, **kwargs)
    return result if layout is None else relayout(result, layout)


@contextmanager
def run_on(mesh: MeshLike) -> Iterator[Mesh]:
    """Make ``mesh`` the default mesh inside a ``with`` block; its end, also by an error, restores the outer mesh.

    ``with mesh:`` does the same. ``mesh`` may be a ``DeviceMesh`` of PyTorch.
    """
    with as_mesh(mesh) as active:
        yield active
