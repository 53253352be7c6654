"""Redistributions that are under way while their clients go on; runs in client processes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from support.states import packed

import dtckpt
from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Replicate, Shard
from dtckpt.dtensor.redistribute import redistribute, redistribute_all
from dtckpt.errors import DtckptError

from . import batch_cases
from .native_collective_cases import bits_of, mesh_of


def _everyone() -> Mesh:
    clients = dtckpt.num_clients()
    return mesh_of((clients,), range(clients), dtckpt.client_id())


def check(seeds: Sequence[int]) -> list[str]:
    """Start some redistributions of one device per client, end them in another order on each; return the faults."""
    client, problems = dtckpt.client_id(), []
    for seed in seeds:
        rng, own = random.Random(seed), random.Random(1000 * seed + client)
        meshes = [_one_device_each(rng) for _ in range(2)]
        flights: list[tuple[DTensor, Layout, DTensor]] = []
        for number in range(rng.randint(1, 6)):
            shape = batch_cases.random_shape(rng)
            dtype = rng.choice((*batch_cases.NUMBERS, *batch_cases.MOVED_ONLY))
            source, target = (batch_cases.random_layout(rng, rng.choice(meshes), len(shape), dtype) for _ in range(2))
            one = batch_cases.tensor(10 * seed + number, source, shape, dtype)
            flights.append((one, target, redistribute(one, target, is_async=True)))
        # Those whose end needs no one else: in an order of this client's own, some never.
        mine = [number for number in range(len(flights)) if number % 2]
        dropped = set()
        for number in own.sample(mine, len(mine)):
            _, _, moved = flights[number]
            way = own.randrange(4)
            if way == 0:
                dropped.add(number)
                del moved
                flights[number] = (*flights[number][:2], flights[number][0])
            elif way == 1:
                moved.to_local()
            else:
                _ = moved.components
        # Those whose end is another collective.
        further: dict[int, DTensor] = {}
        for number in rng.sample(range(len(flights)), len(flights)):
            if number not in mine:
                one, _, moved = flights[number]
                further[number] = redistribute(moved, one.layout, is_async=rng.random() < 0.5)
        for number, (one, target, moved) in enumerate(flights):
            expected = redistribute(one, target)
            case = f"seed {seed}, {number}: {one.layout} to {target} of {tuple(one.shape)} {one.dtype}"
            if number not in dropped and not _are_same(moved, expected):
                problems.append(f"{case}: {moved.components} is not {expected.components}")
            if number in further and not _are_same(further[number], redistribute(expected, one.layout)):
                problems.append(f"{case}: and back")
    return problems


def _one_device_each(rng: random.Random) -> Mesh:
    clients = dtckpt.num_clients()
    sizes = rng.choice([sizes for sizes in ((clients,), (1, clients), (2, clients // 2)) if _fits(sizes, clients)])
    return mesh_of(sizes, rng.sample(range(clients), clients), dtckpt.client_id())


def _fits(sizes: Sequence[int], clients: int) -> bool:
    return torch.Size(sizes).numel() == clients


def _are_same(one: DTensor, other: DTensor) -> bool:
    return [bits_of(part) for part in one.components] == [bits_of(part) for part in other.components]


def read(way: str) -> list[bool]:
    """Read results that are under way in one way, the first one first and the last one first."""
    mesh = _everyone()
    whole = torch.arange(24.0 * 5).view(24, 5)
    rows, columns = Layout(["a0", UNSHARDED], mesh), Layout([UNSHARDED, "a0"], mesh)
    ways = {
        "components": lambda tensor: tensor.components[0],
        "to_local": lambda tensor: tensor.to_local(),
        "full_tensor": lambda tensor: tensor.full_tensor(),
        "redistribute": lambda tensor: tensor.redistribute(placements=[Replicate()]).to_local(),
        "redistribute_async": lambda tensor: tensor.redistribute(placements=[Replicate()], async_op=True).to_local(),
        "detach": lambda tensor: tensor.detach().to_local(),
        "clone": lambda tensor: tensor.clone().to_local(),
        "repr": repr,
    }
    seen = []
    for order in (1, -1):
        wholes = [whole + number for number in range(4)]
        moved = [packed(each, rows).redistribute(placements=[Shard(1)], async_op=True) for each in wholes]
        for each, one in list(zip(wholes, moved, strict=True))[::order]:
            got, expected = ways[way](one), ways[way](packed(each, columns))
            seen.append(got == expected if way == "repr" else torch.equal(got, expected))
    return seen


def drop_results() -> list[bool]:
    """Drop results unread on one client after the other; the others' must come, as must what is asked for next."""
    mesh, client = _everyone(), dtckpt.client_id()
    whole = torch.arange(300.0 * 200 * 8).view(300, 200 * 8)
    rows, columns = Layout(["a0", UNSHARDED], mesh), Layout([UNSHARDED, "a0"], mesh)
    seen = []
    for dropping in range(dtckpt.num_clients()):
        moved = [packed(whole + number, rows).redistribute(placements=[Shard(1)], async_op=True) for number in range(3)]
        if client == dropping:
            del moved[1:]
        for number, one in enumerate(moved):
            seen.append(torch.equal(one.to_local(), packed(whole + number, columns).to_local()))
        seen.append(torch.equal(packed(whole, rows).full_tensor(), whole))
    return seen


def change_sources_afterwards() -> list[bool]:
    """Write to the source when its redistribution is complete here: no client's result changes."""
    mesh = _everyone()
    whole = torch.arange(24.0 * 6).view(24, 6)
    rows, columns = Layout(["a0", UNSHARDED], mesh), Layout([UNSHARDED, "a0"], mesh)
    seen = []
    for _ in range(5):
        source = packed(whole, rows)
        moved = source.redistribute(placements=[Shard(1)], async_op=True)
        got = moved.to_local()
        source.components[0].fill_(-1)
        seen.append(torch.equal(got, packed(whole, columns).to_local()))
    return seen


def gradients() -> list[bool]:
    """Send gradients back through results that were under way, alone and in a batch."""
    mesh, client = _everyone(), dtckpt.client_id()
    clients = dtckpt.num_clients()
    whole = torch.arange(float(4 * clients * 5)).view(4 * clients, 5)
    columns = Layout([UNSHARDED, "a0"], mesh)
    seen = []
    for together in (False, True):
        local = whole[4 * client : 4 * client + 4].clone().requires_grad_()
        fixed = whole[4 * client : 4 * client + 4].clone()
        rows = [DTensor.from_local(part, mesh, [Shard(0)], shape=whole.shape) for part in (local, fixed)]
        if together:
            moved, other = redistribute_all(rows, [columns, columns], is_async=True)
        else:
            moved, other = (redistribute(each, columns, is_async=True) for each in rows)
        seen.append(moved.requires_grad and not other.requires_grad)
        ((moved.to_local() ** 2).sum() + other.to_local().sum()).backward()
        seen.append(torch.equal(local.grad, 2 * local.detach()))
        seen.append(torch.equal(other.to_local(), packed(whole, columns).to_local()))
    return seen


def read_failed_results() -> tuple[list[str], bool]:
    """Read results of a batch for which clients want different layouts, each twice; then redistribute again.

    Returns:
        The errors, and whether what came afterwards is right.
    """
    mesh, client = _everyone(), dtckpt.client_id()
    whole = torch.arange(24.0 * 5).view(24, 5)
    layout = Layout([UNSHARDED, "a0"], mesh) if client else Layout.replicated(mesh, 2)
    rows = [packed(whole + number, Layout(["a0", UNSHARDED], mesh)) for number in range(2)]
    moved = redistribute_all(rows, [layout, layout], is_async=True)
    errors = []
    for one in (*moved, *moved):
        try:
            one.to_local()
        except DtckptError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, torch.equal(rows[0].full_tensor(), whole)


def drop_conflicting_results() -> bool:
    """Drop results that clients want differently; return whether what comes afterwards is right."""
    mesh, client = _everyone(), dtckpt.client_id()
    whole = torch.arange(24.0 * 5).view(24, 5)
    rows = packed(whole, Layout(["a0", UNSHARDED], mesh))
    rows.redistribute(placements=[Shard(1) if client else Replicate()], async_op=True)
    return torch.equal(rows.full_tensor(), whole)
