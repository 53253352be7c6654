"""The methods of `DTensor` that need operators, and the table that binds them to the class.

`dtckpt.dtensor.tensor` has their signatures and docstrings, and imports no operator. Importing this module fills
`DTensor._methods`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.dtensor import local_tensors, serialization, torch_checkpoint
from dtckpt.dtensor.components import shared_failure, strides_of
from dtckpt.dtensor.derived_layouts import cached_layout, gradient_layout
from dtckpt.dtensor.operators import plain_tensors, view_tracking
from dtckpt.dtensor.redistribute import count_unchanged, redistribute
from dtckpt.dtensor.tensor import DTensor, Methods, described
from dtckpt.errors import DtckptError, LayoutError, LayoutTypeError
from dtckpt.layout.device_mesh import MeshLike, require_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.placement import Placement
from dtckpt.pictures.notebook import drawn
from dtckpt.pictures.sharding import Subject
from dtckpt.redistribution import execute


def _from_local(
    local_tensor: torch.Tensor,
    device_mesh: MeshLike | None,
    placements: Sequence[Placement] | None,
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    mesh = require_mesh(device_mesh)
    try:
        if not isinstance(local_tensor, torch.Tensor):
            raise LayoutTypeError(f"from_local needs a tensor; got {type(local_tensor).__name__}")
        layout = cached_layout(mesh, placements, local_tensor.ndim)
        gradient = None if grad_placements is None else Layout.from_placements(mesh, grad_placements, layout.rank)
        stride = None if stride is None else strides_of(stride, layout.rank)
    except DtckptError as error:
        # If clients exchange summaries, the others wait for this client's summary, and the error takes its place.
        if shape is None or run_check:
            raise shared_failure(error, mesh) from None
        execute.report_error(error, [mesh], is_numbered=True)
        raise
    made = local_tensors.from_local(
        local_tensor, layout, shape=shape, stride=stride, gradient=gradient, run_check=run_check
    )
    if shape is not None and not run_check:
        execute.count_local_call([(layout, layout, made.shape, made.dtype)], is_assumed=True)
    return made


def _to_local(tensor: DTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    if grad_placements is None:
        return local_tensors.to_local(tensor, gradient_layout(tensor._layout))
    return local_tensors.to_local(tensor, Layout.from_placements(tensor.device_mesh, grad_placements, tensor.ndim))


def _full_tensor(tensor: DTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    if grad_placements is None:
        return local_tensors.full_tensor(tensor)
    try:
        gradient = local_tensors.whole_gradient_layout(tensor, grad_placements)
    except DtckptError as error:
        execute.report_error(error, [tensor.device_mesh])
        raise
    return local_tensors.full_tensor(tensor, gradient)


def _redistribute(
    tensor: DTensor,
    device_mesh: MeshLike | None,
    placements: Sequence[Placement] | None,
    *,
    async_op: bool,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    is_same_mesh = device_mesh is None or device_mesh is tensor._layout.mesh
    is_plain = is_same_mesh and forward_dtype is None and backward_dtype is None
    # Most calls change nothing, and cost this comparison, a new wrapper, and a count.
    if is_plain and isinstance(placements, list | tuple) and tuple(placements) == tensor.placements:
        count_unchanged(tensor)
        return view_tracking.differentiable_alias(tensor)
    mesh = tensor.device_mesh
    try:
        if device_mesh is not None:
            mesh = require_mesh(device_mesh)
        layout = cached_layout(mesh, placements, tensor.ndim)
    except DtckptError as error:
        # Report on both meshes, since clients of either mesh may wait for this client's messages.
        execute.report_error(error, [tensor.device_mesh, mesh], is_numbered=True)
        raise
    moved = redistribute(
        tensor,
        layout,
        forward_dtype=forward_dtype,
        backward_dtype=backward_dtype,
        is_async=async_op,
        is_counted=True,
    )
    return view_tracking.differentiable_alias(tensor) if moved is tensor else moved


def _gradient_of(tensor: DTensor, stored: torch.Tensor) -> DTensor:
    """Return the gradient that a backward pass has stored, in the layout that `DTensor.grad` promises."""
    gradient = plain_tensors.gradient_to_dtensor(stored, tensor.device_mesh)
    layout = gradient_layout(tensor._layout)
    return gradient if gradient._layout == layout else redistribute(gradient, layout)


def _gradient_to_store(tensor: DTensor, gradient: torch.Tensor) -> DTensor:
    """Return a gradient that a program assigns, in the layout that `DTensor.grad` promises."""
    if not isinstance(gradient, DTensor):
        raise LayoutTypeError(f"the gradient of a DTensor is a DTensor; got {type(gradient).__name__}")
    if gradient.device_mesh != tensor.device_mesh:
        raise LayoutError(
            f"gradient: got {described(gradient.layout)}, expected one on the mesh of the tensor, "
            f"{described(tensor.layout)}"
        )
    layout = gradient_layout(tensor._layout)
    is_fitting = gradient._layout == layout or gradient.shape != tensor.shape
    return gradient if is_fitting else view_tracking.in_layout(gradient, layout)


def _draw(tensor: DTensor) -> str | None:
    subject = Subject(tensor.layout, tuple(tensor.shape))
    return drawn(subject, f"{type(tensor).__name__} of {tensor.dtype}")


DTensor._methods = Methods(
    from_local=_from_local,
    to_local=_to_local,
    full_tensor=_full_tensor,
    redistribute=_redistribute,
    validate_gradient=view_tracking.validate_gradient,
    become_alias=view_tracking.become_alias,
    gradient_of=_gradient_of,
    gradient_to_store=_gradient_to_store,
    reduce=serialization.reduce,
    shallow_copy=serialization.shallow_copy,
    deepcopy=serialization.deepcopy,
    chunk_list=torch_checkpoint.chunk_list,
    write_items=torch_checkpoint.write_items,
    shard_at=torch_checkpoint.shard_at,
    draw=_draw,
)
