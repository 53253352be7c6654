"""Operators on lists of tensors, as ``_foreach_add_``, whose tensors are on several meshes: one call for each mesh.

An optimizer updates the parameters of a whole model in one call, and parts of the model may be on different meshes, or
plain::

    _foreach_add_([p0, p1, p2, p3], [g0, g1, g2, g3])    0 and 2 on one mesh, 1 on another, 3 plain

        _foreach_add_([p0, p2], [g0, g2])
        _foreach_add_([p1], [g1])
        _foreach_add_([p3], [g3])    a call on plain tensors, as each client has them, also outside all meshes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, Operator, raise_versions, signature_of, tensors_in
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.mesh import Mesh


@dataclass(frozen=True)
class MeshGroup:
    """The part of a call at some indices of its lists, such as all indices with tensors on one mesh, or on none.

    Args:
        indices: Its indices in the lists of the call.
        args: Positional arguments, with the items of lists at these indices only.
        kwargs: Arguments by name, likewise.
    """

    indices: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def split_by_mesh(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[MeshGroup]:
    """Return a call's groups, in the order in which their meshes come first in the lists.

    Args:
        args: Positional arguments. Items of lists belong together if they stand at one index; other arguments belong to
            every group.
        kwargs: Arguments by name.

    Returns:
        No group if there is a tensor on one mesh at each index, or if tensors at one index are on several.
    """
    lists = _lists_of_tensors(args, kwargs)
    if len({len(one) for one in lists}) != 1:
        return []
    meshes = [{one.device_mesh for one in row if isinstance(one, DTensor)} for row in zip(*lists, strict=True)]
    by_mesh: defaultdict[Mesh | None, list[int]] = defaultdict(list)
    for index, one in enumerate(meshes):
        by_mesh[next(iter(one), None)].append(index)
    if len(by_mesh) < 2 or any(len(one) > 1 for one in meshes):
        return []

    return [_group(args, kwargs, indices, len(meshes)) for indices in by_mesh.values()]


def split_by_index(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[MeshGroup]:
    """Return a call's groups, one for each index of its lists."""
    count = len(_lists_of_tensors(args, kwargs)[0])
    return [_group(args, kwargs, [index], count) for index in range(count)]


def _group(args: Sequence[Any], kwargs: Mapping[str, Any], indices: Sequence[int], count: int) -> MeshGroup:
    """Return the group of these indices of lists of this length."""

    def part(value: Any) -> Any:
        is_by_index = isinstance(value, list | tuple) and len(value) == count
        return [value[index] for index in indices] if is_by_index else value

    return MeshGroup(tuple(indices), tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()})


def _lists_of_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Sequence[Any]]:
    return [value for value in (*args, *kwargs.values()) if _is_list_of_tensors(value)]


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value)


def run_groups(func: Operator, groups: Sequence[MeshGroup], dispatch: Callable[..., Any]) -> list[Any] | None:
    """Run an operator group by group; return its results in the order of the lists, None if it writes in place.

    Collective: As the operator, over the clients of one mesh after another.
    """
    results: dict[int, Any] = {}
    for group in groups:
        has_mesh = any(isinstance(one, DTensor) for one in tensors_in((*group.args, *group.kwargs.values())))
        found = (dispatch if has_mesh else _run_on_plain_tensors)(func, group.args, group.kwargs)
        results.update(zip(group.indices, found or (), strict=False))
    return [results[index] for index in sorted(results)] if results else None


def _run_on_plain_tensors(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on plain tensors as autograd would, below which it is called."""
    results = func(*args, **kwargs)
    call = Call(func, tuple(args), kwargs)
    raise_versions(func, tensors_in([call[name] for name in signature_of(func).written]))
    return results
