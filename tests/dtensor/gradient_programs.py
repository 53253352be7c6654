"""Programs about gradients, written for `torch.distributed.tensor`; see `dtensor_programs`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .dtensor_programs import Column, grid, line, own_of, shard_rows, whole_of


def gradients(api: Any) -> Any:
    mesh, every = grid(api), line(api)
    shard, whole, seen = api.Shard, api.Replicate(), []
    weight = whole_of(4 * dist.get_world_size(), 6 * dist.get_world_size())
    for on, before, after in (
        (every, [shard(0)], [shard(1)]),
        (every, [shard(0)], [whole]),
        (every, [whole], [shard(0)]),
        (every, [api.Partial()], [whole]),
        (every, [api.Partial()], [shard(0)]),
        (every, [shard(0)], [shard(0)]),
        (mesh, [shard(0), shard(1)], [shard(1), whole]),
        (mesh, [api.Partial(), shard(0)], [shard(0), shard(1)]),
        (mesh, [api.Partial(), shard(0)], [shard(1), whole]),
    ):
        local = own_of(4, 6).requires_grad_()
        out = api.DTensor.from_local(local, on, before).redistribute(placements=after).to_local()
        (out * weight[: out.shape[0], : out.shape[1]]).sum().backward()
        seen.append((out, local.grad))
        local = own_of(4, 6).requires_grad_()
        out = api.DTensor.from_local(local, on, before).full_tensor()
        (out**2 * weight[: out.shape[0], : out.shape[1]]).sum().backward()
        seen.append((out, local.grad))
    return seen


def gradients_of_leaves(api: Any) -> Any:
    mesh, seen = grid(api), []
    for before, after in (
        ([api.Shard(0), api.Replicate()], [api.Replicate(), api.Replicate()]),
        ([api.Replicate(), api.Shard(1)], [api.Shard(0), api.Shard(1)]),
    ):
        leaf = api.distribute_tensor(whole_of(5, 4).requires_grad_(), mesh, before)
        (leaf.redistribute(placements=after).to_local() ** 2).sum().backward()
        is_alike = leaf.grad.placements == leaf.placements
        seen.append((is_alike, isinstance(leaf.grad, api.DTensor), leaf.grad.to_local(), leaf.grad.full_tensor()))
        leaf.grad = None
        (leaf.full_tensor() ** 3).sum().backward()
        seen.append(leaf.grad.to_local())
        leaf.grad = None
        (2 * leaf.to_local() + leaf.redistribute(placements=before).to_local()).sum().backward()
        seen.append(leaf.grad.to_local())
    return seen


def gradient_placements(api: Any) -> Any:
    every, seen = line(api), []
    local = own_of(2, 3).requires_grad_()
    made = api.DTensor.from_local(local, every, [api.Replicate()], grad_placements=[api.Partial()])
    (made.redistribute(placements=[api.Shard(0)]).to_local() * 2).sum().backward()
    # A Partial gradient may be cut into terms at will; the terms' sum is what counts.
    total = local.grad.clone()
    dist.all_reduce(total)
    seen.append(total)
    leaf = api.distribute_tensor(whole_of(4, 3).requires_grad_(), every, [api.Replicate()])
    (leaf.to_local(grad_placements=[api.Partial()]) * (dist.get_rank() + 1)).sum().backward()
    seen.append(leaf.grad.full_tensor())
    leaf = api.distribute_tensor(whole_of(4, 3).requires_grad_(), every, [api.Shard(0)])
    (leaf.full_tensor(grad_placements=[api.Partial()]) * (dist.get_rank() + 1)).sum().backward()
    seen.append(leaf.grad.to_local())
    mesh = grid(api)
    for wanted in ([api.Partial(), api.Replicate()], [api.Replicate(), api.Partial()], [api.Replicate()] * 2):
        leaf = api.distribute_tensor(whole_of(4, 3).requires_grad_(), mesh, [api.Shard(0), api.Replicate()])
        place = sum(mesh.get_local_rank(axis) for axis, one in enumerate(wanted) if one.is_partial())
        (leaf.full_tensor(grad_placements=wanted) * (place + 1)).sum().backward()
        seen.append(leaf.grad.full_tensor())
    return seen


def gradients_of_gradients(api: Any) -> Any:
    every, seen = line(api), []
    for before, after in ((api.Shard(0), api.Shard(1)), (api.Shard(0), api.Replicate()), (api.Partial(), api.Shard(0))):
        local = own_of(4, 4).requires_grad_()
        out = api.DTensor.from_local(local, every, [before]).redistribute(placements=[after]).to_local()
        (first,) = torch.autograd.grad((out**3).sum(), local, create_graph=True)
        (second,) = torch.autograd.grad((first * own_of(4, 4)).sum(), local)
        seen.append((first, second))
    return seen


def copies(api: Any) -> Any:
    every = line(api)
    made = api.distribute_tensor(own_of(5, 3).requires_grad_(), every, [api.Shard(0)])
    with torch.no_grad():
        copied, cloned, cast = copy.deepcopy(made), made.clone(), made.to(torch.float64)
        zeros = torch.zeros_like(made)
        made.to_local().add_(1000)
    model = api.distribute_module(Column(3, 5), every, shard_rows(api))
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.to_local().zero_()
    other.weight.to_local().sum().backward()
    grad = other.weight.grad.to_local().clone()
    other.zero_grad(set_to_none=False)
    return (
        [(each.to_local(), each.dtype, each.placements == (api.Shard(0),)) for each in (copied, cloned, cast, zeros)],
        [(copied.requires_grad, copied.is_leaf, made.data.to_local(), made.is_contiguous(), len(made))],
        [isinstance(other.weight, nn.Parameter), other.weight.to_local(), grad, other.weight.grad.to_local()],
        [(name, each.to_local(), each.dtype) for name, each in other.to(torch.bfloat16).state_dict().items()],
    )


PROGRAMS = (
    gradients,
    gradients_of_leaves,
    gradient_placements,
    gradients_of_gradients,
    copies,
)
