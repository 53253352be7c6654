"""Trees of tensors that change their layouts together; runs in client processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from support import states
from torch.utils._pytree import tree_leaves, tree_map

import dtckpt
from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Partial, Replicate, Shard, pack, relayout
from dtckpt.comm.collectives import PairwiseCollectives
from dtckpt.comm.observers import Communication, observed_by
from dtckpt.dtensor.redistribute import redistribute_all
from dtckpt.errors import LayoutError
from dtckpt.redistribution.exchange import BoxExchange
from dtckpt.redistribution.layout_change import LayoutChange

from .native_collective_cases import bits_of, mesh_of

NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
MOVED_ONLY = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16)
OPS = ("sum", "avg", "min", "max", "product")


def random_mesh(rng: random.Random) -> Mesh:
    """Return a mesh over all clients or some, whose devices are theirs in any order, one or two of each."""
    clients = dtckpt.num_clients()
    owners = rng.sample(range(clients), rng.choice((clients, clients, rng.randint(1, clients))))
    devices = rng.choice((1, 1, 2))
    sizes, left = [], len(owners) * devices
    while left > 1:
        sizes.append(rng.choice([size for size in range(2, left + 1) if left % size == 0]))
        left //= sizes[-1]
    if rng.random() < 0.2:
        sizes.insert(rng.randint(0, len(sizes)), 1)
    return mesh_of(sizes or (1,), owners, dtckpt.client_id(), devices)


def random_layout(rng: random.Random, mesh: Mesh, rank: int, dtype: torch.dtype) -> Layout:
    by_dim: list[list[str]] = [[] for _ in range(rank)]
    partial = {}
    for axis in rng.sample(mesh.dim_names, mesh.ndim):
        chance = rng.random()
        if chance < 0.5 and rank:
            by_dim[rng.randrange(rank)].append(axis)
        elif chance < 0.65 and dtype in NUMBERS:
            partial[axis] = rng.choice(OPS)
    return Layout([tuple(axes) or UNSHARDED for axes in by_dim], mesh, partial)


def whole_of(seed: int, term: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return one term of a tensor: small numbers."""
    values = torch.from_numpy(np.random.default_rng([seed, *term]).integers(0, 4, shape)).to(torch.float64)
    return torch.complex(values, values - 1).to(dtype) if dtype.is_complex else values.to(dtype)


def elsewhere(rng: random.Random, part: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor that may lie in memory in another way than it reads."""
    way = rng.randrange(5)
    if way == 0:
        return part.mT.contiguous().mT if part.ndim > 1 else part
    if way == 1:
        return torch.stack([part, part], -1)[..., 1]
    if way == 2 and part.is_complex():
        return part.conj().resolve_conj().conj()
    if way == 3 and part.ndim:
        return torch.cat([part, part])[part.shape[0] :]
    return part.clone()


def tensor(seed: int, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    mesh = layout.mesh
    pending = [mesh.axis_index(axis) for axis in layout.partial]
    parts, rng = [], random.Random(seed)
    for device in mesh.local_device_ids():
        place = mesh.coordinate(device)
        term = whole_of(seed, [place[at] for at in pending], shape, dtype)
        parts.append(elsewhere(rng, term[layout.region(device, shape).slices()]))
    return pack(parts, layout, shape) if parts else DTensor([], layout, shape, dtype)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((0, 1, 2, 3, 4, 5, 8, 9)) for _ in range(rng.randint(0, 3)))


def random_tree(rng: random.Random, seed: int) -> tuple[Any, Any]:
    """Return a tree of tensors, and one of layouts expected."""
    meshes = [random_mesh(rng) for _ in range(rng.randint(1, 3))]
    tensors, layouts = [], []
    for number in range(rng.randint(1, 7)):
        shape, dtype = random_shape(rng), rng.choice((*NUMBERS, *MOVED_ONLY))
        source, target = (random_layout(rng, rng.choice(meshes), len(shape), dtype) for _ in range(2))
        tensors.append(tensor(100 * seed + number, source, shape, dtype))
        layouts.append(target)
    return {"first": tensors[:2], "more": (tensors[2:], None)}, {"first": layouts[:2], "more": (layouts[2:], None)}


def check(seeds: Sequence[int]) -> list[str]:
    """Compare trees moved together with their tensors moved one by one; return the faults."""
    problems = []
    for seed in seeds:
        rng = random.Random(seed)
        tree, layouts = random_tree(rng, seed)
        before = [[bits_of(part) for part in leaf.components] for leaf in tree_leaves(tree) if leaf is not None]
        together = relayout(tree, layouts)
        listed = [leaf for leaf in tree_leaves(tree) if leaf is not None]
        expected = [leaf for leaf in tree_leaves(layouts) if leaf is not None]
        moved = [leaf for leaf in tree_leaves(together) if leaf is not None]
        for number, (one, layout, got) in enumerate(zip(listed, expected, moved, strict=True)):
            case = f"seed {seed}, {number}: {one.layout} to {layout} of {tuple(one.shape)} {one.dtype}"
            alone = relayout(one, layout)
            if got.layout != layout or got.dtype != one.dtype:
                problems.append(f"{case}: got {got.layout} {got.dtype}")
            if [bits_of(part) for part in got.components] != [bits_of(part) for part in alone.components]:
                problems.append(f"{case}: {got.components} is not {alone.components}")
            if not one.layout.partial and not layout.partial:
                whole = whole_of(100 * seed + number, [], tuple(one.shape), one.dtype)
                for device, part in zip(layout.mesh.local_device_ids(), got.components, strict=True):
                    if bits_of(part) != bits_of(whole[layout.region(device, whole.shape).slices()]):
                        problems.append(f"{case}: device {device} has {part} of {whole}")
            if [bits_of(part) for part in one.components] != before[number]:
                problems.append(f"{case}: the source was written to")
    return problems


def strides() -> list[str]:
    """Move boxes that count as contiguous, although their strides differ from the strides of a contiguous tensor of
    their shape."""
    client, problems = dtckpt.client_id(), []
    # One element, cut out of more.
    mesh = mesh_of((4,), range(4), client)
    part = (torch.arange(4.0).view(2, 2) + client)[:1, 1]
    whole = pack([part], Layout(["a0"], mesh), (4,)).full_tensor()
    if whole.tolist() != [1.0, 2.0, 3.0, 4.0]:
        problems.append(f"single elements: {whole}")
    # Terms that arrive where their sum goes: one row, in pieces.
    grid = mesh_of((2, 2), range(4), client)
    change = LayoutChange(
        Layout([UNSHARDED, "a1"], grid, {"a0": "sum"}), Layout([UNSHARDED, UNSHARDED], grid), (1, 6), torch.float32
    )
    row, column = divmod(client, 2)
    term = torch.full((1, 3), 10.0 * row + column)
    made = BoxExchange([change]).start([{client: term}]).finish()[0][client]
    if made.tolist() != [[10.0] * 3 + [12.0] * 3]:
        problems.append(f"sum of pieces: {made}")
    return problems


# --- how many messages ---------------------------------------------------------------------------------------------


def _rows(whole: torch.Tensor, mesh: Mesh) -> DTensor:
    return states.packed(whole, Layout(["a0", *[UNSHARDED] * (whole.ndim - 1)], mesh))


def messages(number: int, size: int) -> tuple[list[tuple[int, int]], list[Communication], list[str]]:
    """Move square tensors from rows to columns together.

    Returns:
        How many messages this client sent and received per exchange; what observers saw; and the faults.
    """
    clients = dtckpt.num_clients()
    mesh = mesh_of((clients,), range(clients), dtckpt.client_id())
    wholes = [torch.arange(size * size, dtype=torch.float64).view(size, size) + n for n in range(number)]
    tensors = [_rows(whole, mesh) for whole in wholes]
    counts: list[tuple[int, int]] = []
    exchange = PairwiseCollectives.exchange

    def counted(self: PairwiseCollectives, sends: Any, receives: Any, *others: Any) -> Any:
        counts.append((len(sends), len(receives)))
        return exchange(self, sends, receives, *others)

    seen: list[Communication] = []
    with mock.patch.object(PairwiseCollectives, "exchange", counted), observed_by(seen.append):
        moved = relayout(tensors, Layout([UNSHARDED, "a0"], mesh))
    wrong = [text for one, whole in zip(moved, wholes, strict=True) for text in states.differences(one, whole)]
    return counts, seen, wrong


def trees_that_differ() -> tuple[str, bool]:
    """Give one layout too few on one client; then redistribute again.

    Returns:
        What is raised, and whether what came afterwards is right.
    """
    clients, client = dtckpt.num_clients(), dtckpt.client_id()
    mesh = mesh_of((clients,), range(clients), client)
    whole = torch.arange(24.0).view(4, 6)
    tensors = [_rows(whole, mesh), _rows(whole + 1, mesh)]
    layouts = [Layout([UNSHARDED, "a0"], mesh)] * 2
    try:
        relayout(tensors, layouts[client == 0 :])
    except LayoutError as error:
        return str(error), all(not states.differences(one, whole) for one in relayout(tensors[:1], layouts[:1]))
    return "", False


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients() -> list[str]:
    """Send gradients back through a batch, of which some outputs are not used; return the faults."""
    clients, client = dtckpt.num_clients(), dtckpt.client_id()
    mesh = mesh_of((clients,), range(clients), client)
    whole = torch.arange(float(6 * clients)).view(clients, 6)
    problems = []

    def leaves() -> dict[str, torch.Tensor]:
        return {
            "used": (whole[client : client + 1] + 1).requires_grad_(),
            "twice": (whole[client : client + 1] + 2).requires_grad_(),
            "unused": (whole[client : client + 1] + 3).requires_grad_(),
            "fixed": whole[client : client + 1] + 4,
            "counts": torch.full((1, 6), client),
            "term": (whole[0] + client).requires_grad_(),
        }

    def tensors(local: dict[str, torch.Tensor]) -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(
                part,
                mesh,
                [Partial()] if name == "term" else [Shard(0)],
                shape=(6,) if name == "term" else (clients, 6),
            )
            for name, part in local.items()
        }

    def layout(one: DTensor) -> Layout:
        return Layout.from_placements(mesh, [Replicate() if one.ndim == 1 else Shard(1)], one.ndim)

    def run_back(moved: dict[str, DTensor], local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        loss = (moved["used"].to_local() ** 2).sum() + 3 * moved["twice"].to_local().sum()
        loss = loss + (moved["twice"].to_local() ** 3).sum() + (moved["term"].to_local() ** 2).sum()
        loss.backward()
        return {name: part.grad for name, part in local.items()}

    alone, together = leaves(), leaves()
    one_by_one = {name: relayout(one, layout(one)) for name, one in tensors(alone).items()}
    batch = tensors(together)
    moved = relayout(batch, tree_map(layout, batch))
    for name, one in moved.items():
        if one.requires_grad != one_by_one[name].requires_grad:
            problems.append(f"{name} requires grad: {one.requires_grad}")
    expected = run_back(one_by_one, alone)
    got = run_back(moved, together)
    for name, gradient in got.items():
        same = gradient is expected[name] or (gradient is not None and torch.equal(gradient, expected[name]))
        if not same:
            problems.append(f"gradient of {name}: {gradient} is not {expected[name]}")
    if not torch.equal(got["used"], 2 * together["used"].detach()):
        problems.append(f"gradient: {got['used']}")
    with torch.no_grad():
        if any(one.requires_grad for one in redistribute_all(list(batch.values()), [*map(layout, batch.values())])):
            problems.append("a gradient is expected where none is")
    return problems
