"""Programs that are run on plain tensors and on DTensors in several layouts, and whose results are compared."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtckpt import Partial, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import DTensor, distribute_tensor
from dtckpt.errors import OperatorError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement

LINE, GRID = abstract_mesh({"x": 2}), abstract_mesh({"x": 2, "y": 2})
PLACES: list[tuple[Mesh, list[Placement]]] = [
    (LINE, [Replicate()]),
    (LINE, [Shard(0)]),
    (LINE, [Shard(1)]),
    (GRID, [Shard(1), Shard(0)]),
    (LINE, [Partial()]),
]

Program = Callable[..., Any]
Places = Sequence[tuple[Mesh, list[Placement]]]


def matrices() -> list[torch.Tensor]:
    return [torch.arange(24.0).reshape(4, 6) / 10 + 0.3, torch.linspace(-1, 2, 24).reshape(4, 6).clone()]


def assert_as_plain(
    program: Program, *, requires_grad: bool = False, versions: bool = False, places: Places = PLACES
) -> None:
    """Run a program of two matrices on plain tensors and on DTensors, and compare its results or errors.

    Args:
        program: Returns tensors and other values, in lists, tuples and dicts.
        requires_grad: Whether the matrices require grad.
        versions: Whether to compare the version counters of the tensors, too.
        places: Meshes and placements of the DTensors.
    """
    wanted = _outcome(program, [one.requires_grad_(requires_grad) for one in matrices()], versions)
    for mesh, placements in places:
        tensors = [distribute_tensor(one, mesh, placements).requires_grad_(requires_grad) for one in matrices()]
        found = _outcome(program, tensors, versions)
        for one, other in zip(_flat(found), _flat(wanted), strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, msg=lambda text: f"{placements}: {text}")  # noqa: B023
            else:
                assert one == other, (placements, found, wanted)


def _outcome(program: Program, tensors: list[torch.Tensor], versions: bool) -> Any:
    try:
        return _described(program(*tensors), versions)
    except OperatorError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        # Texts of errors name shapes of components, or operators that plain tensors do not call.
        return type(error)


def _described(value: Any, versions: bool) -> Any:
    if isinstance(value, list | tuple):
        return [_described(one, versions) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    facts = value.requires_grad, value.is_leaf, value.grad_fn is None, value._is_view(), value.is_inference()
    version = value._version if versions and not value.is_inference() else None
    whole = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    return [whole.clone(), value.stride(), int(value.storage_offset()), facts, version]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value
