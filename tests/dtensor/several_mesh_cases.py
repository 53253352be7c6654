"""Gradient clipping and LBFGS of parameters on several meshes, compared with plain tensors on every client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtckpt
from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

ORDERS = [2.0, 1.0, 0.0, 3.0, float("inf"), -float("inf")]

Placed = list[tuple[Any, Any]]
"""Mesh and placements of each parameter; None for a plain one."""


def on_devices() -> dict[str, Placed]:
    """Return the places of parameters on meshes of devices of one client."""
    line, other, grid = (dtckpt.abstract_mesh(axes) for axes in ({"x": 4}, {"y": 2}, {"x": 2, "y": 2}))
    return {
        "two meshes": [(line, [Shard(0)]), (grid, [Shard(1), Replicate()]), (line, [Replicate()])],
        "plain ones, too": [(None, None), (other, [Shard(1)]), (line, [Shard(1)]), (None, None)],
    }


def on_clients() -> dict[str, Placed]:
    """Return the places of parameters on meshes of four clients: maybe no client has all parameters."""
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    first, last, middle = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3], [1, 2]))
    return {
        "same clients": [(line, [Shard(0)]), (grid, [Shard(1), Replicate()]), (None, None)],
        "a part of the clients": [(first, [Shard(0)]), (line, [Shard(1)])],
        "disjoint": [(first, [Shard(0)]), (last, [Shard(1)]), (first, [Replicate()])],
        "overlapping": [(last, [Shard(0)]), (middle, [Replicate()]), (first, [Shard(1)]), (None, None)],
    }


def places() -> dict[str, Placed]:
    return on_clients() if dist.is_initialized() else on_devices()


def parameters(placed: Placed) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return parameters with gradients, on their meshes, and the same plain."""
    torch.manual_seed(0)
    ours, plain = [], []
    for number, (mesh, placements) in enumerate(placed):
        value, gradient = torch.randn(5, 3), torch.arange(-4.0, 11.0).reshape(5, 3) * (number + 1)
        for kind, made in ((None, plain), (mesh, ours)):
            on_mesh = [one if kind is None else distribute_tensor(one, kind, placements) for one in (value, gradient)]
            made.append(nn.Parameter(on_mesh[0].clone()))
            made[-1].grad = on_mesh[1].clone()
    return ours, plain


def differing(ours: Sequence[Any], plain: Sequence[Any], what: str) -> list[str]:
    """Return a line if tensors differ; each client looks at tensors that it has a part of."""
    for one, other in zip(ours, plain, strict=True):
        if isinstance(one, DTensor):
            whole = one.detach().full_tensor()
            if one.device_mesh.is_remote():
                continue
            one = whole  # noqa: PLW2901  (as the plain one)
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
            return [f"{what}: got {one}, expected {other}"]
    return []


def faults_of_norms(foreach: bool | None) -> list[str]:
    """Return how norms and clipped gradients differ from the same on plain parameters."""
    faults = []
    for name, placed in places().items():
        for order in ORDERS:
            what = f"{name}, order {order}, foreach {foreach}"
            ours, plain = parameters(placed)
            norm = nn.utils.clip_grad_norm_(ours, 1.5, order, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(plain, 1.5, order, foreach=foreach)
            faults += [] if norm.item() == pytest.approx(expected.item()) else [f"{what}: got {norm}"]
            faults += differing([one.grad for one in ours], [one.grad for one in plain], what)
            ours, plain = parameters(placed)
            norm = nn.utils.get_total_norm([one.grad for one in ours], order, foreach=foreach)
            nn.utils.clip_grads_with_norm_(ours, 1.5, norm, foreach=foreach)
            nn.utils.clip_grads_with_norm_(plain, 1.5, norm.full_tensor(), foreach=foreach)
            faults += differing([one.grad for one in ours], [one.grad for one in plain], f"{what}, in two calls")
            ours, _ = parameters(placed)
            nn.utils.clip_grads_with_norm_(ours, 1.5, norm.full_tensor(), foreach=foreach)
            faults += differing([one.grad for one in ours], [one.grad for one in plain], f"{what}, by a plain norm")
        ours, plain = parameters(placed)
        for each in (ours, plain):
            nn.utils.clip_grad_value_(each, 2.0, foreach=foreach)
        faults += differing([one.grad for one in ours], [one.grad for one in plain], f"{name}, values")
    return faults


def texts_of_infinite_norms() -> list[str]:
    """Return the errors of norms that are not finite; all clients have the same."""
    texts = []
    for placed in places().values():
        ours, _ = parameters(placed)
        ours[0].grad.mul_(float("inf"))
        try:
            nn.utils.clip_grad_norm_(ours, 1.5, error_if_nonfinite=True)
        except RuntimeError as error:
            texts.append(str(error)[:60])
    return texts


def faults_of_lbfgs(line_search: str | None) -> list[str]:
    """Return how losses and parameters after steps of LBFGS differ from the same on plain parameters."""
    faults = []
    for name, placed in places().items():
        both = parameters(placed)
        losses = [_losses(each, line_search) for each in both]
        what = f"{name}, {line_search}"
        if not torch.allclose(*(torch.tensor(each) for each in losses), rtol=1e-4):
            faults.append(f"{what}: got losses {losses}")
        faults += differing(*both, what)
    return faults


def _losses(each: list[nn.Parameter], line_search: str | None) -> list[float]:
    """Return the losses of some steps, as every client knows them; the last parameter has no gradient."""
    optimizer = torch.optim.LBFGS(each, lr=0.4, max_iter=5, line_search_fn=line_search)

    def closure() -> float:
        optimizer.zero_grad()
        norms = []
        with torch.no_grad():
            for number, parameter in enumerate(each):
                off = parameter - number
                parameter.grad = off + off**3 if parameter is not each[-1] else None
                norms += [off, off**2 / 2**0.5]
            return float(nn.utils.get_total_norm(norms) ** 2 / 2)

    return [float(optimizer.step(closure)) for _ in range(2)]
