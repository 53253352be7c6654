"""Random changes of layout that are one collective, run as that and as an exchange of boxes; in client processes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from support import states

import dtckpt
from dtckpt import UNSHARDED, Layout, Mesh
from dtckpt.redistribution.exchange import BoxExchange
from dtckpt.redistribution.layout_change import LayoutChange
from dtckpt.redistribution.native_collective import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    NativeExchange,
    find_collective,
)

GRIDS = ((4,), (2, 2), (4, 1), (1, 4), (2, 1, 2), (1, 2, 2))
SUMS, OTHERS = ("sum", "avg"), ("min", "max", "product")


def mesh_of(sizes: Sequence[int], owners: Sequence[int], client: int, devices: int = 1) -> Mesh:
    """Return a mesh on which device ``i`` is one of client ``owners[i // devices]``."""
    total = math.prod(sizes)
    names = [
        f"/job:worker/replica:0/task:{owners[device // devices]}/device:CPU:{device % devices}"
        for device in range(total)
    ]
    mine = [device for device in range(total) if owners[device // devices] == client]
    axes = [f"a{axis}" for axis in range(len(sizes))]
    return Mesh(axes, np.arange(total).reshape(tuple(sizes)), mine, [names[device] for device in mine], "", names)


def random_change(rng: random.Random, kind: str, client: int) -> LayoutChange:
    """Return a change of layout that is a collective of some kind, over meshes whose clients are in any order."""
    sizes = rng.choice(GRIDS)
    mesh = mesh_of(sizes, rng.sample(range(4), 4), client)
    axes = rng.sample(mesh.dim_names, mesh.ndim)
    tail = [axes.pop() for _ in range(rng.randint(1, len(axes)))]
    rank = rng.randint(1, 3)
    dim = rng.randrange(rank)
    by_dim: list[list[str]] = [[] for _ in range(rank)]
    kept: dict[str, str] = {}
    ops = rng.choice((SUMS, *((other,) for other in OTHERS)))
    for axis in axes:
        if rng.random() < 0.6:
            by_dim[rng.randrange(rank)].append(axis)
        elif rng.random() < 0.5:
            kept[axis] = rng.choice(ops)
    fine = [[*split, *tail] if at == dim else split for at, split in enumerate(by_dim)]
    pending = {**kept, **{axis: rng.choice(ops) for axis in tail}}

    def layout(splits: Sequence[Sequence[str]], partial: dict[str, str]) -> Layout:
        return Layout([tuple(split) or UNSHARDED for split in splits], mesh, partial)

    source, target = {
        ALL_REDUCE: (layout(by_dim, pending), layout(by_dim, kept)),
        ALL_GATHER: (layout(fine, kept), layout(by_dim, kept)),
        REDUCE_SCATTER: (layout(by_dim, pending), layout(fine, kept)),
    }[kind]
    # Only the dim that is gathered or scattered has to be even.
    even = math.prod(mesh.dim_size(axis) for axis in fine[dim])
    shape = tuple(even * rng.randint(0, 3) if at == dim else rng.randint(0, 5) for at in range(rank))
    dtypes = [torch.float64, torch.bfloat16, torch.int64]
    if "min" not in ops and "max" not in ops:
        dtypes.append(torch.complex64)
    if kind == ALL_GATHER:
        dtypes += [torch.bool, torch.float8_e4m3fn, torch.int16]
    return LayoutChange(source, target, shape, rng.choice(dtypes))


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return shape, dtype and bits, wherever the elements lie."""
    return states.bits_of(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor))


def component_of(rng: random.Random, change: LayoutChange, device: int) -> torch.Tensor:
    """Return a device's component, which may lie in memory in another way than it reads."""
    shape = change.source.region(device, change.shape).shape
    # Devices that hold the same part of the same term have the same elements.
    used = {*change.source.partial, *(axis for split in change.source.split_axes for axis in split)}
    place = zip(change.source.mesh.dim_names, change.source.mesh.coordinate(device), strict=True)
    part = sum(10 ** int(axis[1:]) * at for axis, at in place if axis in used)
    generator = torch.Generator().manual_seed(rng.randrange(2**31) + part)
    whole = torch.randint(0, 3, shape, generator=generator)
    made = whole.to(change.dtype)
    if change.dtype.is_complex:
        return torch.complex(whole.float(), whole.float() + 1).conj()
    if rng.random() < 0.3:
        return made.T.contiguous().T if made.ndim == 2 else torch.stack([made, made], -1)[..., 0]
    return made


def check(kind: str, seeds: Sequence[int]) -> list[str]:
    """Compare collectives of one kind with exchanges of boxes; return the faults."""
    client, problems = dtckpt.client_id(), []
    for seed in seeds:
        rng = random.Random(seed)
        change = random_change(rng, kind, client)
        case = f"seed {seed}: {change.source} to {change.target} of {change.shape} {change.dtype}"
        collective = find_collective(change)
        if collective is None or collective.kind != kind:
            problems.append(f"{case} is {collective}")
            continue
        (device,) = change.source.mesh.local_device_ids()
        component = component_of(rng, change, device)
        before = bits_of(component)
        moved = [
            exchange.start([{device: component}])
            for exchange in (NativeExchange(change, collective), BoxExchange([change]))
        ]
        one, other = (transfer.finish()[0][device] for transfer in moved)
        if bits_of(one) != bits_of(other):
            problems.append(f"{case}: {one} is not {other}")
        if bits_of(component) != before:
            problems.append(f"{case}: the source was written to")
        if one.data_ptr() == component.data_ptr() and one.numel():
            problems.append(f"{case}: the result is the source's memory")
    return problems
