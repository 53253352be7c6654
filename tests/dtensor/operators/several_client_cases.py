"""Calls and optimizer steps whose results must equal the results on plain tensors, on a mesh that may span several
clients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dtckpt
from dtckpt.dtensor import Shard, distribute_module, distribute_tensor
from dtckpt.errors import ReplicaMismatchError

from .silent_faults import S0, S1, SUM, WHOLE, Call, are_equal, faults_of, line, numbers

_LAST = Shard(2)
_OPTIMIZERS: dict[str, Any] = {
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.3, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.3, fused=True),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, fused=True),
}


def sorts() -> Iterator[Call]:
    for each in (S0, S1, SUM):
        for dim in (0, 1):
            for name, function in {
                "sort": lambda x, dim: x.sort(dim, descending=True),
                "topk": lambda x, dim: x.topk(2, dim),
            }.items():
                yield Call(
                    f"{name} along {dim}, {each}",
                    lambda x, function=function, dim=dim: torch.mul(*function(x, dim)),
                    (numbers(5, 3),),
                    (each,),
                )


def batch_norms() -> Iterator[Call]:
    def normalised(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, is_training: bool) -> torch.Tensor:
        mean, variance = weight.detach() * 0, weight.detach() * 0 + 1
        made = functional.batch_norm(images, mean, variance, weight, bias, is_training)
        return made + (mean - variance)[:, None]

    for images, channels in ((S0, WHOLE), (S1, S0), (_LAST, S0), (SUM, WHOLE)):
        for is_training in (True, False):
            yield Call(
                f"batch norm, images {images}, channels {channels}, training {is_training}",
                lambda *given, is_training=is_training: normalised(*given, is_training),
                (numbers(5, 3, 6), numbers(3, seed=2), numbers(3, seed=3)),
                (images, channels, channels),
            )


def einsums() -> Iterator[Call]:
    pair = numbers(5, 3, 2), numbers(5, 2, 3, seed=2)
    for placements in ((S0, WHOLE), (S1, _LAST), (_LAST, S1), (SUM, S0)):
        for text in ("bij,bjk->bik", "bij,bji->b", "bij,cjk->bcik"):
            yield Call(
                f"einsum {text}, {placements}",
                lambda *given, text=text: torch.einsum(text, *given),
                pair,
                placements,
            )


def before_autograd() -> Iterator[Call]:
    """Composites that read or write memory past dispatch, or ask for PyTorch's layout."""

    def rank(matrix: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(matrix.sum(), dtype=torch.int64)
        torch.linalg.matrix_rank(matrix, out=made)
        return made

    values, mask = numbers(5, 4), numbers(5, 4, seed=2) > 0
    for each in (S0, S1, SUM):
        yield Call(f"rank, {each}", rank, (values,), (each,), has_gradient=False)
        for name, function in {
            "masked sum": lambda x, mask: torch.masked.sum(x, 0, mask=mask),
            "masked mean": lambda x, mask: torch.masked.mean(x, mask=mask),
            "masked softmax": lambda x, mask: torch.masked.softmax(x, 1, mask=mask).nan_to_num(),
        }.items():
            yield Call(f"{name}, {each}", function, (values, mask), (each, S0))
        yield Call(
            f"tensor_split, {each}",
            lambda x, at: torch.cat([part * number for number, part in enumerate(torch.tensor_split(x, at))]),
            (values, torch.tensor([1, 4])),
            (each, S0),
        )


def infinities() -> Iterator[Call]:
    values = torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.0, 5.0]])
    for number in (torch.inf, -torch.inf, torch.nan):
        for name, function in {
            "times": lambda x, number: x * number,
            "times in place": lambda x, number: x.clone().mul_(number),
            "sum, scaled": lambda x, number: torch.add(x.new_ones(3), x, alpha=number),
            "list": lambda x, number: torch._foreach_mul([x], number)[0],
        }.items():
            yield Call(
                f"{name} {number}",
                lambda x, function=function, number=number: function(x, number),
                (values,),
                (SUM,),
                has_gradient=False,
            )
    yield Call("divided by zero", lambda x: x / 0.0, (values,), (SUM,), has_gradient=False)
    yield Call("list divided by zero", lambda x: torch._foreach_div([x], 0)[0], (values,), (SUM,), has_gradient=False)


def faults_of_calls() -> list[str]:
    """Return the faults, in all clients' order of the calls."""
    groups = (sorts(), batch_norms(), einsums(), before_autograd(), infinities(), chunked_losses())
    return [fault for group in groups for call in group for fault in faults_of(call)]


def chunked_losses() -> Iterator[Call]:
    """PyTorch 2.12 and older lack them."""
    if not hasattr(functional, "linear_cross_entropy"):
        return
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    for reduction in ("none", "mean"):
        for placements in ((S0, WHOLE, S0), (S1, S0, WHOLE), (SUM, S1, S0)):
            yield Call(
                f"linear_cross_entropy, {reduction}, {placements}",
                lambda *given, how=reduction: functional.linear_cross_entropy(*given, reduction=how, options=options),
                (numbers(5, 3), numbers(4, 3, seed=2), torch.tensor([0, 3, 1, 1, 2])),
                placements,
            )


def faults_of_buffers() -> list[str]:
    """Return which buffers are wrong that differ between clients before a result is written to them."""
    rows, found = distribute_tensor(numbers(5, 3), line(), [S0]), []
    buffer = torch.full((5, 3), float(dtckpt.client_id()))
    if not are_equal(torch.mul(rows, 2, out=buffer), numbers(5, 3) * 2):
        found.append("a buffer that is written to")
    buffer.fill_(dtckpt.client_id())
    try:
        torch.mul(rows, buffer, out=buffer)
    except ReplicaMismatchError:
        return found
    return [*found, "a buffer that is read, too"] if dtckpt.num_clients() > 1 else found


def faults_of_steps() -> list[str]:
    """Return which parameters differ after some steps of optimizers that work on lists."""
    mesh, samples = line(), numbers(9, 7)
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    found = []
    for name, optimizer in _OPTIMIZERS.items():
        plain, ours = copy.deepcopy(made), copy.deepcopy(made)
        distribute_module(ours, mesh, _split)
        for model, rows in ((plain, samples), (ours, distribute_tensor(samples, mesh, [S0]))):
            steps = optimizer(model.parameters())
            for _ in range(3):
                steps.zero_grad()
                model(rows).pow(2).sum().backward()
                steps.step()
        for (label, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            if not are_equal(one.full_tensor().detach(), other):
                found.append(f"{name}: {label}")
    return found


def _split(name: str, module: nn.Module, mesh: Any) -> None:
    """Split the first layer's weights by rows, the second's by columns."""
    if isinstance(module, nn.Linear):
        placement = S0 if name == "0" else S1
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))
