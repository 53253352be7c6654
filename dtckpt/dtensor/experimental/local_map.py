"""`local_map`: a function of plain tensors, run on the components of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dtckpt.dtensor import autograd, factories
from dtckpt.dtensor.operators.operands import unshare
from dtckpt.dtensor.tensor import DTensor
from dtckpt.dtensor.tensorflow_names import MeshLike
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: MeshLike | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that runs ``func`` on their components. Differentiable. Without func, a decorator.

    The function is run once per local device. Arguments by name are handed on as they are. Without a DTensor among the
    positional arguments it is plain ``func``.

    Collective: The returned function, over the mesh's clients, if it has a sharded result (they exchange shapes, so
    uneven shards are right), one without placements (they compare values), or redistributes an argument.

    Args:
        func: Takes and returns plain tensors, other values, and trees of these.
        out_placements: A tuple of one entry per value in the flattened result, or a list of placements for the only
            one. None for what is no tensor; for a tensor it means replicated.
        in_placements: One entry per value in the flattened positional arguments, None for what is no DTensor; plain
            tensors may have any.
        in_grad_placements: Placements that gradients of the components are in, entries likewise; None means the
            argument's own, Partial as Replicate.
        device_mesh: The mesh of the results; default that of the first DTensor.
        redistribute_inputs: Bring arguments into ``in_placements``; otherwise others are an error.

    Raises:
        LayoutError: By the returned function: entries do not fit the arguments or results.
        LayoutTypeError: A result is a DTensor.
        ComponentError: Local devices return other structures, or other values that are no tensors.
    """
    options = (out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs)
    if func is None:
        return functools.partial(_decorated, options)
    return _decorated(options, func)


def _decorated(options: tuple[Any, ...], func: Callable[..., Any]) -> Callable[..., Any]:
    out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs = options

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = tree_flatten(args)
        wanted = _entries("in_placements", in_placements, len(flat))
        gradients = _entries("in_grad_placements", in_grad_placements, len(flat))
        first = next((value for value in flat if isinstance(value, DTensor)), None)
        if first is None:
            return func(*args, **kwargs)
        mesh = first.device_mesh if device_mesh is None else factories.require_mesh(device_mesh)
        placed = [
            _placed(number, value, wanted[number] if wanted else None, bool(wanted), redistribute_inputs)
            for number, value in enumerate(flat)
        ]
        parts = [
            _parts(value, gradients[number] if gradients else None) if isinstance(value, DTensor) else value
            for number, value in enumerate(placed)
        ]
        made = []
        for device in range(max(1, len(first.components))):
            local = [
                part[device] if isinstance(value, DTensor) else value for part, value in zip(parts, placed, strict=True)
            ]
            made.append(tree_flatten(func(*tree_unflatten(local, structure), **kwargs)))
        return _together(made, out_placements, mesh)

    return mapped


def _entries(name: str, given: Any, count: int) -> list[Placements] | None:
    """Return placements per flattened argument; None if there are none."""
    if given is None:
        return None
    entries = list(given)
    if len(entries) != count:
        raise LayoutError(f"local_map: {name} has {len(entries)} entries, expected one per flattened argument, {count}")
    return entries


def _placed(number: int, value: Any, wanted: Placements, is_checked: bool, is_redistributed: bool) -> Any:
    """Return an argument in the placements that are wanted of it."""
    if not is_checked:
        return value
    if not isinstance(value, torch.Tensor):
        if wanted is not None:
            raise LayoutError(f"local_map: argument {number} is {type(value).__name__}; got placements {wanted} for it")
        return value
    if not isinstance(value, DTensor):
        return value
    if wanted is None:
        raise LayoutError(f"local_map: argument {number} is a DTensor; got no placements for it in in_placements")
    layout = autograd.from_placements(value.device_mesh, wanted, value.ndim)
    if layout == value.layout:
        return value
    if not is_redistributed:
        raise LayoutError(
            f"local_map: argument {number} has placements {list(value.placements)}, expected "
            f"{list(layout.placements)}; redistribute_inputs=True brings it there"
        )
    return autograd.redistribute(value, layout)


def _parts(tensor: DTensor, gradient: Placements) -> Sequence[torch.Tensor]:
    """Return a tensor's components, to which may be written; on a client outside the mesh, one without elements."""
    unshare(tensor)
    layout = (
        autograd.gradient_layout(tensor.layout)
        if gradient is None
        else autograd.from_placements(tensor.device_mesh, gradient, tensor.ndim)
    )
    return autograd.components_of(tensor, layout) or (torch.empty(0, dtype=tensor.dtype),)


def _together(made: Sequence[tuple[list[Any], TreeSpec]], out_placements: Any, mesh: Mesh) -> Any:
    """Return the results of all local devices as one."""
    first, structure = made[0]
    if any(other != structure for _, other in made):
        raise ComponentError("local_map: the function returns other structures on other local devices")
    entries = out_placements if isinstance(out_placements, tuple) else (out_placements,)
    if len(entries) != len(first):
        raise LayoutError(f"local_map: out_placements has {len(entries)} entries; the function returns {len(first)}")
    results = [_result([one[number] for one, _ in made], entry, mesh) for number, entry in enumerate(entries)]
    return tree_unflatten(results, structure)


def _result(values: Sequence[Any], placements: Placements, mesh: Mesh) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor):
        if placements is not None:
            raise LayoutError(f"local_map: got placements {placements} for a result that is {type(first).__name__}")
        if any(type(value) is not type(first) or value != first for value in values[1:]):
            raise ComponentError(f"local_map: local devices return other values, {values!r}; expected one or a tensor")
        return first
    if any(isinstance(value, DTensor) for value in values):
        raise LayoutTypeError("local_map: the function returns a DTensor, expected a plain tensor")
    layout = autograd.from_placements(mesh, placements, first.ndim)
    is_known = placements is not None and not any(layout.split_axes)
    shape = tuple(first.shape) if is_known else None
    return autograd.tensor_of(values, layout, shape=shape, run_check=placements is None)
