"""Functions that client processes run, on gradients, mapped functions and plain tensors; each returns its observations.

They are apart from the tests so that a client need not import custom operators and optimizers: these import the
compiler.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from support.states import cluster_mesh
from torch import nn
from torch.nn.utils import clip_grad_norm_

import dtckpt
from dtckpt import Mesh, Shard
from dtckpt.comm import observers
from dtckpt.dtensor import distribute_module, distribute_tensor
from dtckpt.dtensor.experimental import implicit_replication, local_map


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).sin()


@contextmanager
def counting() -> Iterator[list[object]]:
    """Collect the communication; unlike `CommDebugMode` this does not import the compiler."""
    seen: list[object] = []
    with observers.observed_by(seen.append):
        yield seen


def line() -> Mesh:
    return cluster_mesh({"x": dtckpt.num_clients()}, dtckpt.num_clients(), dtckpt.client_id())


def data_parallel_steps():
    """Two micro-batches on a data-parallel mesh; return what each part communicated, and what became of the model."""
    mesh = line()
    layers = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    torch.manual_seed(0)
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    plain = copy.deepcopy(layers)
    distribute_module(layers, mesh)
    samples = numbers(1030, 7).float()
    counts, layouts, norms = [], [], []
    for model, rows in ((layers, distribute_tensor(samples, mesh, [Shard(0)])), (plain, samples)):
        with counting() as passes:
            for _ in range(2):
                model(rows).pow(2).sum().backward()
        found = [torch.Tensor.grad.__get__(parameter) for parameter in model.parameters()]
        layouts.append([getattr(one, "placements", ()) for one in found])
        with counting() as reading:
            for parameter in model.parameters():
                _ = parameter.grad
        with counting() as again, torch.no_grad():
            norm = clip_grad_norm_(model.parameters(), 0.01)
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        counts.append([len(mode) for mode in (passes, reading, again)])
        norms.append(norm.item())
    values = [
        (ours.full_tensor().detach(), theirs.detach(), ours.placements, ours.grad.placements)
        for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True)
    ]
    return counts[0], layouts[0], norms, values


def uneven_over_clients():
    mesh = line()
    tensor = distribute_tensor(numbers(10, 3), mesh, [Shard(0)]).requires_grad_()
    made = local_map(lambda part: torch.cat([part, part * 2], 1), [Shard(0)])(tensor)
    made.sum().backward()
    return tuple(made.shape), made.full_tensor().detach(), tensor.grad.full_tensor()


def batches_of_changing_sizes():
    """A smaller batch, of 5 rows after 8, changes the shards of the last two of four clients only."""
    mesh = line()
    double = local_map(lambda part: (part * 2, part[:, :1]), ([Shard(0)], [Shard(0)]), ([Shard(0)],))
    wrong = []
    for size in (8, 8, 5, 7, 8, 6, 1, 5):
        made = double(distribute_tensor(numbers(size, 3), mesh, [Shard(0)]))
        wanted = numbers(size, 3) * 2, numbers(size, 3)[:, :1]
        wrong += [size for one, other in zip(made, wanted, strict=True) if not one.full_tensor().equal(other)]
    known = distribute_tensor(numbers(8, 3), mesh, [Shard(0)])
    with counting() as seen:
        double(known)
    return wrong, len(seen)


def beside_plain():
    mesh = line()
    tensor, plain = distribute_tensor(numbers(10, 3), mesh, [Shard(0)]), numbers(3)
    counts = []
    with implicit_replication():
        with implicit_replication(), counting() as mode:
            made = tensor + plain
        counts.append(len(mode))
        with counting() as mode:
            made = tensor + plain
        counts.append(len(mode))
    with counting() as mode:
        made = tensor + plain
    return counts, len(mode), made.full_tensor()
