"""`local_map`: run a function of plain tensors on the components of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dtckpt.comm.torch_private import TreeSpec, tree_flatten, tree_unflatten
from dtckpt.dtensor.derived_layouts import cached_layout, gradient_layout
from dtckpt.dtensor.local_tensors import from_components, to_components
from dtckpt.dtensor.operators.dispatch import report_failure
from dtckpt.dtensor.operators.operands import common_mesh, unshare
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor
from dtckpt.dtensor.torch_compile import keep_from_tracing
from dtckpt.errors import ComponentError, DtckptError, LayoutError, LayoutTypeError
from dtckpt.layout.device_mesh import MeshLike, require_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement
from dtckpt.redistribution.execute import report_error

Placements = Sequence[Placement] | None
"""Placements of one argument or result; None if it is no DTensor."""


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

    The returned function runs ``func`` once per local device, on the components there of the positional arguments.
    Arguments by name are passed on unchanged. Without a DTensor among the positional arguments, it just calls ``func``.

    Collective: The returned function, over the mesh's clients, in three cases. A result is sharded (clients exchange
    shapes, so uneven shards are right), a result has no placements (clients compare values), or an argument is
    redistributed.

    Args:
        func: Takes and returns plain tensors, other values, and trees of these.
        out_placements: A tuple of one entry per value in the flattened result, or a list of placements for a single
            value. None for a value that is no tensor; for a tensor None means replicated.
        in_placements: One entry per value in the flattened positional arguments; None for a value that is no DTensor.
            The entry of a plain tensor does not matter.
        in_grad_placements: Placements of the components' gradients, one entry per value likewise; None means the
            argument's placements, in which Replicate takes the place of Partial.
        device_mesh: The mesh of all DTensors, arguments and results; default: the mesh of the arguments.
        redistribute_inputs: Redistribute arguments to ``in_placements``. Otherwise, other placements are an error.

    Raises:
        LayoutError: By the returned function: entries do not fit the arguments or results.
        MeshMismatchError: DTensors are on different meshes, or not on ``device_mesh``.
        LayoutTypeError: A result is a DTensor.
        ComponentError: Local devices return different structures, or different values that are no tensors.
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
        tensors = [value for value in flat if isinstance(value, DTensor)]
        with _reported([tensor.device_mesh for tensor in tensors]):
            placements = _entries("in_placements", in_placements, len(flat))
            gradients = _entries("in_grad_placements", in_grad_placements, len(flat))
            mesh_of_all = None if device_mesh is None else require_mesh(device_mesh)
        if not tensors:
            return func(*args, **kwargs)
        first, mesh = tensors[0], common_mesh("local_map", tensors, mesh_of_all)
        with _reported([mesh]):
            layouts = [
                _layout_for(number, value, placements[number], redistribute_inputs) if placements else None
                for number, value in enumerate(flat)
            ]
        inputs = [
            value if layout is None else redistribute(value, layout)
            for value, layout in zip(flat, layouts, strict=True)
        ]
        parts = [
            _parts(value, gradients[number] if gradients else None) if isinstance(value, DTensor) else value
            for number, value in enumerate(inputs)
        ]
        outputs = []
        # A client outside the mesh calls the function too, on an empty tensor: else it would not know the results.
        for device in range(max(1, len(first.components))):
            local = [
                part[device] if isinstance(value, DTensor) else value for part, value in zip(parts, inputs, strict=True)
            ]
            try:
                outputs.append(tree_flatten(func(*tree_unflatten(local, structure), **kwargs)))
            except Exception as error:
                report_failure(error, "the function of local_map", mesh)
                raise
        # Global facts: where they change, all clients find the shapes of the results anew, though only some components
        # change.
        origin = tuple((value.layout, value.shape, value.dtype) for value in inputs if isinstance(value, DTensor))
        return _merge(outputs, out_placements, mesh, origin)

    keep_from_tracing([mapped], with_callees=False)  # ``func`` sees plain tensors only, and may be compiled whole.
    return mapped


def _entries(name: str, placements: Any, count: int) -> list[Placements] | None:
    """Return the entries of an argument of `local_map`, one per flattened argument; None if it was not passed."""
    if placements is None:
        return None
    entries = list(placements)
    if len(entries) != count:
        raise LayoutError(f"local_map: {name} has {len(entries)} entries, expected one per flattened argument, {count}")
    return entries


@contextmanager
def _reported(meshes: Sequence[Mesh]) -> Iterator[None]:
    """Report errors of the body to the clients of meshes: only this client has them, and the others may go on."""
    try:
        yield
    except DtckptError as error:
        report_error(error, meshes)
        raise


def _layout_for(number: int, value: Any, placements: Placements, is_redistributed: bool) -> Layout | None:
    """Return the layout that an argument's entry in ``in_placements`` asks for; None if the argument stays as it is."""
    if not isinstance(value, torch.Tensor):
        if placements is not None:
            raise LayoutError(
                f"local_map: argument {number} is {type(value).__name__}; got placements {placements} for it"
            )
        return None
    if not isinstance(value, DTensor):
        return None
    if placements is None:
        raise LayoutError(f"local_map: argument {number} is a DTensor; got no placements for it in in_placements")
    layout = cached_layout(value.device_mesh, placements, value.ndim)
    if layout == value.layout:
        return None
    if not is_redistributed:
        raise LayoutError(
            f"local_map: argument {number} has placements {list(value.placements)}, expected "
            f"{list(layout.placements)}; redistribute_inputs=True brings it there"
        )
    return layout


def _parts(tensor: DTensor, gradient: Placements) -> Sequence[torch.Tensor]:
    """Return a tensor's components for reads and writes; on a client outside the mesh, one without elements."""
    # The function may write to its arguments in place, for one device at a time.
    unshare(tensor)
    layout = (
        gradient_layout(tensor.layout) if gradient is None else cached_layout(tensor.device_mesh, gradient, tensor.ndim)
    )
    return to_components(tensor, layout) or (torch.empty(0, dtype=tensor.dtype),)


def _merge(
    outputs: Sequence[tuple[list[Any], TreeSpec]], out_placements: Any, mesh: Mesh, origin: tuple[Any, ...]
) -> Any:
    """Merge the results of all local devices: their tensors are the components of DTensors.

    Args:
        outputs: Per local device, the flattened result and its structure.
        out_placements: As for `local_map`.
        mesh: The mesh of the results.
        origin: Layouts, shapes and dtypes of the arguments that are DTensors.
    """
    first, structure = outputs[0]
    with _reported([mesh]):
        if any(other != structure for _, other in outputs):
            raise ComponentError("local_map: the function returns other structures on other local devices")
        entries = out_placements if isinstance(out_placements, tuple) else (out_placements,)
        if len(entries) != len(first):
            raise LayoutError(
                f"local_map: out_placements has {len(entries)} entries; the function returns {len(first)}"
            )
        by_result = [[values[number] for values, _ in outputs] for number in range(len(entries))]
        layouts = [_layout_of(values, entry, mesh) for values, entry in zip(by_result, entries, strict=True)]
    results = [
        values[0] if layout is None else _result(values, layout, (number, origin), is_checked=entry is None)
        for number, (values, layout, entry) in enumerate(zip(by_result, layouts, entries, strict=True))
    ]
    return tree_unflatten(results, structure)


def _layout_of(values: Sequence[Any], placements: Placements, mesh: Mesh) -> Layout | None:
    """Return the layout of a result, one value per local device; None if it is no tensor."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        if placements is not None:
            raise LayoutError(f"local_map: got placements {placements} for a result that is {type(first).__name__}")
        # 1, 1.0 and True are equal, but not one value.
        if any(type(value) is not type(first) or value != first for value in values[1:]):
            raise ComponentError(f"local_map: local devices return other values, {values!r}; expected one or a tensor")
        return None
    if any(isinstance(value, DTensor) for value in values):
        raise LayoutTypeError("local_map: the function returns a DTensor, expected a plain tensor")
    return cached_layout(mesh, placements, first.ndim)


def _result(components: Sequence[torch.Tensor], layout: Layout, origin: Any, *, is_checked: bool) -> DTensor:
    # Of a result that no axis splits, one component says the shape; shards may be uneven, so clients exchange theirs.
    is_known = not is_checked and not any(layout.split_axes)
    shape = tuple(components[0].shape) if is_known else None
    return from_components(components, layout, shape=shape, run_check=is_checked, origin=origin)


keep_from_tracing(list(globals().values()))
