"""Calls in which one client passes other arguments than the rest; for client processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dtckpt
from dtckpt import Replicate, Shard
from dtckpt.dtensor import DTensor, distribute_tensor
from dtckpt.dtensor.experimental import local_map
from dtckpt.errors import DtckptError

from .operator_cases import line, numbers

ODD = 1
"""The client that differs."""


def _rows(*shape: int) -> DTensor:
    return distribute_tensor(numbers(*shape), line(), [Shard(0)])


def _places(wrong: bool) -> DTensor:
    """Return indices, split over the clients, of which one is out of range on the odd client."""
    index = torch.arange(6) % 4
    placed = distribute_tensor(index, line(), [Shard(0)])
    if wrong:
        placed.to_local()[-1] = 99
    return placed


def _whole(tensor: torch.Tensor) -> DTensor:
    return distribute_tensor(tensor, line(), [Replicate()])


def _sized(*sizes: int, wrong: bool) -> DTensor:
    """Return one of two vectors, both of which every client has."""
    return [_whole(numbers(size)) for size in sizes][wrong]


def _meshed(wrong: bool) -> DTensor:
    """Return one of two tensors on different meshes, both of which every client has."""
    other = dtckpt.create_distributed_mesh([("other", dtckpt.num_clients())])
    return [_rows(6, 4), distribute_tensor(numbers(6, 4), other, [Shard(0)])][wrong]


def _from_local(**options: Any) -> DTensor:
    return DTensor.from_local(torch.ones(2, 3), line(), [Shard(0)], **options)


def _mapped(result: Callable[[torch.Tensor], Any]) -> DTensor:
    return local_map(result, out_placements=[Shard(0)])(_rows(6, 4))


CALLS: dict[str, Callable[[bool], Any]] = {
    "index": lambda wrong: _whole(numbers(4, 3))[_places(wrong)].sum(),
    "row of a table": lambda wrong: torch.embedding(_whole(numbers(4, 3)), _places(wrong)).sum(),
    "shape": lambda wrong: (_rows(6, 4) + _sized(4, 5, wrong=wrong)).sum(),
    "shape of a product": lambda wrong: _rows(6, 4).t() @ _sized(6, 5, wrong=wrong),
    "shape of whole tensors": lambda wrong: _rows(6) * (_whole(numbers(6)) + _sized(6, 5, wrong=wrong)).sum(),
    "shape in place": lambda wrong: _rows(6, 4).add_(_sized(4, 5, wrong=wrong)),
    "shape in a list": lambda wrong: torch._foreach_add([_rows(6)], [_sized(6, 5, wrong=wrong)])[0],
    "argument": lambda wrong: _rows(6, 4).sum(3 if wrong else 0),
    "view": lambda wrong: _rows(6, 4).view(5 if wrong else 12, -1).sum(),
    "dtype": lambda wrong: (_rows(6, 4).float() if wrong else _rows(6, 4)).sum(),
    "mesh": lambda wrong: (_rows(6, 4) + _meshed(wrong)).sum(),
    "function": lambda wrong: distribute_tensor(numbers(7), line(), [Shard(0)]) if wrong else _from_local(),
    "random operator": lambda wrong: torch.rand_like(_rows(6, 4)) if wrong else _rows(6, 4).sum(),
    "strides": lambda wrong: _from_local(stride=(1,) if wrong else (3, 1)),
    "gradient placements": lambda wrong: _from_local(grad_placements=3 if wrong else None),
    "gradient's shape": lambda wrong: _from_local(grad_placements=[Shard(1 if wrong else 0)]).sum(),
    "forward_dtype": lambda wrong: _rows(6).redistribute(
        placements=[Replicate()], forward_dtype="float" if wrong else torch.float64
    ),
    "local_map's function": lambda wrong: _mapped(lambda part: part[[9 if wrong else 0]]),
    "local_map's result": lambda wrong: _mapped(lambda part: 3 if wrong else part[:1]),
    "local_map's arguments": lambda wrong: local_map(
        torch.neg, [Replicate()], in_placements=([Replicate()],), redistribute_inputs=not wrong
    )(_rows(6, 4)),
    "operator": lambda wrong: _rows(6, 4).amax() if wrong else _rows(6, 4).sum(),
}


def call(name: str, *, odd: int | None = ODD) -> tuple[tuple[str, str], bool]:
    """Return the error of a call that one client (None: each) makes otherwise, and whether the next one is right."""
    error_of = ("", "")
    try:
        CALLS[name](odd in {None, dtckpt.client_id()}).full_tensor()
    except (DtckptError, RuntimeError, IndexError) as error:
        error_of = type(error).__name__, str(error)
    total = _rows(6, 4).sum().full_tensor()
    return error_of, torch.allclose(total, numbers(6, 4).sum())
