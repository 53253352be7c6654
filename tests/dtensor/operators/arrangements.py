"""Arrangements: ways to distribute all tensor arguments of one call on a mesh, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from dtckpt import Layout, Mesh, Partial, Placement, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import DTensor, pack

LAST = -1
Placements = tuple[Placement, ...]


class Arrangement(Protocol):
    """How the arguments of a call are distributed."""

    name: str

    def distribute(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        """Return the tensor that stands for ``tensor``, an argument's ``position``-th; no part of it is shared."""

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result as a plain tensor; `TypeError` if a plain one came where a distributed one is due."""


@dataclass(frozen=True)
class Plain:
    """Tensors as they are: a trial of the trials."""

    name: str = "plain"

    def distribute(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)  # as DTensors are

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class Placed:
    """DTensors on devices that all belong to this process.

    Args:
        name: Name in reports.
        axes: Axes of the mesh and their sizes.
        cycle: Placements of the arguments, one after the other and again from the start.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    cycle: tuple[Placements, ...]

    @cached_property
    def mesh(self) -> Mesh:
        return abstract_mesh(dict(self.axes))

    def distribute(self, tensor: torch.Tensor, position: int) -> DTensor:
        wanted = [possible_placement(each, tensor) for each in self.cycle[position % len(self.cycle)]]
        return distribute_terms(tensor.detach(), Layout.from_placements(self.mesh, wanted, tensor.ndim))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            raise TypeError(f"a plain {type(tensor).__name__} of shape {tuple(tensor.shape)} among DTensors")
        whole = tensor.full_tensor()
        if whole.shape != tensor.shape or whole.dtype != tensor.dtype:
            raise TypeError(
                f"a DTensor of {tuple(tensor.shape)} {tensor.dtype} that holds {tuple(whole.shape)} {whole.dtype}"
            )
        return whole


def possible_placement(placement: Placement, tensor: torch.Tensor) -> Placement:
    """Return the placement, or Replicate where a tensor of that rank or dtype cannot have it."""
    if isinstance(placement, Shard):
        return Shard(placement.dim % tensor.ndim) if tensor.ndim else Replicate()
    if isinstance(placement, Partial) and tensor.dtype == torch.bool:
        return Replicate()
    return placement


def distribute_terms(whole: torch.Tensor, layout: Layout) -> DTensor:
    """Return a DTensor of the values of ``whole``; where reductions are pending the terms' sum is exact.

    The terms differ in sign, so that an operator which is applied to terms, though it is not linear, shows.
    """
    mesh, parts = layout.mesh, []
    for device in mesh.local_device_ids():
        place = dict(zip(mesh.dim_names, mesh.coordinate(device), strict=True))
        term = whole
        for axis in layout.partial:
            term = term_of(term, place[axis], mesh.dim_size(axis))
        parts.append(term[layout.region(device, tuple(whole.shape)).slices()].clone())
    return pack(parts, layout, tuple(whole.shape))


def term_of(values: torch.Tensor, place: int, count: int) -> torch.Tensor:
    """Return one of the ``count`` terms that ``values`` is the sum of."""
    if not (values.is_floating_point() or values.is_complex()):
        return values + count * (count - 1) // 2 if place == 0 else torch.full_like(values, place).neg()
    # Twice the value less the value: nothing is rounded. Zeros keep their sign; what could overflow is one term alone.
    factor = 1.0 if count == 1 else {0: 2.0, 1: -1.0}.get(place, 0.0)
    term = torch.where(values == 0, values, values * factor)
    return torch.where(values.abs() < 1e30, term, values if place == 0 else torch.zeros_like(values))


_LINE = (("x", 3),)
"""Three devices, as few dims of the samples are multiples of three."""
_GRID = (("x", 2), ("y", 2))

ARRANGEMENTS: tuple[Placed, ...] = (
    Placed("first dim", _LINE, ((Shard(0),),)),
    Placed("mixed", _LINE, ((Shard(0),), (Shard(LAST),), (Replicate(),), (Partial("sum"),))),
    Placed("2-D: first and last dim", _GRID, ((Shard(0), Shard(LAST)),)),
    Placed("partial", _LINE, ((Partial("sum"),),)),
    Placed("2-D: partial and first dim", _GRID, ((Partial("sum"), Shard(0)),)),
    Placed("last dim", _LINE, ((Shard(LAST),),)),
    Placed(
        "2-D: mixed",
        _GRID,
        ((Shard(LAST), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Partial("sum")), (Shard(LAST), Replicate())),
    ),
    Placed("2-D: first dim twice", _GRID, ((Shard(0), Shard(0)),)),
    Placed("replicated", _LINE, ((Replicate(),),)),
    Placed("2-D: replicated and last dim", _GRID, ((Replicate(), Shard(LAST)),)),
)
"""In an order in which any few that follow each other differ much."""


def torch_arrangements() -> Sequence[Arrangement]:
    """Return arrangements of PyTorch's own DTensors on one device, of which a process group is made."""
    import torch.distributed as dist
    from torch.distributed import tensor as theirs

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = theirs.init_device_mesh("cpu", (1,))

    @dataclass(frozen=True)
    class Theirs:
        name: str
        placement: Callable[[torch.Tensor], Any]

        def distribute(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
            return theirs.distribute_tensor(tensor.detach().clone(), mesh, [self.placement(tensor)])

        def whole(self, tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, theirs.DTensor):
                raise TypeError(f"a plain tensor of shape {tuple(tensor.shape)} among DTensors")
            return tensor.full_tensor()

    return (
        Theirs("replicated", lambda _: theirs.Replicate()),
        Theirs("first dim", lambda tensor: theirs.Shard(0) if tensor.ndim else theirs.Replicate()),
    )
