"""Random changes of layout, and their expected results; runs in the tests' process and in client processes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from support.states import MeshMaker, cluster_mesh

import dtckpt
from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Region, abstract_mesh, pack
from dtckpt.dtensor.debug import clear_plan_cache
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.redistribution import exchange, messages

REDUCE = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
    "product": lambda terms: terms.prod(0),
}


def random_axes(rng: random.Random, num_devices: int | None = None) -> dict[str, int]:
    if num_devices is None:
        return {f"a{axis}": rng.randint(1, 4) for axis in range(rng.randint(1, 3))}
    axes, left = {}, num_devices
    while left > 1:
        axes[f"a{len(axes)}"] = size = rng.choice([size for size in range(2, left + 1) if left % size == 0])
        left //= size
    return axes or {"a0": 1}


def random_layout(rng: random.Random, mesh: Mesh, rank: int) -> Layout:
    by_dim: list[list[str]] = [[] for _ in range(rank)]
    partial = {}
    for axis in rng.sample(mesh.dim_names, mesh.ndim):
        kind = rng.random()
        if kind < 0.5 and rank:
            by_dim[rng.randrange(rank)].append(axis)
        elif kind < 0.7:
            partial[axis] = rng.choice(list(REDUCE))
    return Layout([tuple(axes) or UNSHARDED for axes in by_dim], mesh, partial)


def term_of(layout: Layout, device: int) -> tuple[int, ...]:
    place = dict(zip(layout.mesh.dim_names, layout.mesh.coordinate(device), strict=True))
    return tuple(place[axis] for axis in layout.mesh.dim_names if axis in layout.partial)


def component(seed: int, layout: Layout, shape: tuple[int, ...], device: int) -> torch.Tensor:
    """Return a device's part of a tensor whose terms follow from the seed."""
    term = term_of(layout, device)
    rng = np.random.default_rng([seed, *term])
    # Quarters add and multiply exactly, so results do not depend on the order.
    whole = torch.as_tensor(rng.integers(-6, 7, shape), dtype=torch.float64) / 4
    return whole[layout.region(device, shape).slices()].clone()


def tensor(seed: int, layout: Layout, shape: tuple[int, ...]) -> DTensor:
    components = [component(seed, layout, shape, device) for device in layout.mesh.local_device_ids()]
    return pack(components, layout, shape)


def put_together(layout: Layout, shape: tuple[int, ...], parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return the whole tensor that all devices' components make up, by plain arithmetic."""
    terms: dict[tuple[int, ...], torch.Tensor] = {}
    for device, part in parts:
        whole = terms.setdefault(term_of(layout, device), torch.zeros(shape, dtype=torch.float64))
        whole[layout.region(device, shape).slices()] = part
    for axis in reversed([axis for axis in layout.mesh.dim_names if axis in layout.partial]):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for term, whole in sorted(terms.items()):
            groups.setdefault(term[:-1], []).append(whole)
        terms = {term: REDUCE[layout.partial[axis]](torch.stack(group)) for term, group in groups.items()}
    return terms[()]


def expected(seed: int, layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    return put_together(
        layout, shape, [(device, component(seed, layout, shape, device)) for device in layout.mesh.device_ids]
    )


def check_one_process(seed: int, make_mesh: MeshMaker = abstract_mesh) -> None:
    """Move a random tensor between random layouts on meshes of this process, and its gradient back."""
    rng = random.Random(seed)
    source_mesh = make_mesh(random_axes(rng))
    target_mesh = source_mesh if rng.random() < 0.5 else make_mesh(random_axes(rng))
    shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
    source, target = (random_layout(rng, mesh, len(shape)) for mesh in (source_mesh, target_mesh))
    before = tensor(seed, source, shape)
    whole = expected(seed, source, shape)
    after = redistribute(before, target)
    assert after.layout == target
    assert tuple(after.shape) == shape
    for device, part in zip(target_mesh.device_ids, after.components, strict=True):
        assert part.shape == target.region(device, shape).shape
    result = put_together(target, shape, list(zip(target_mesh.device_ids, after.components, strict=True)))
    torch.testing.assert_close(result, whole)
    torch.testing.assert_close(before.full_tensor().cpu(), whole)
    replicas: dict[tuple[Region, tuple[int, ...]], torch.Tensor] = {}
    for device, part in zip(target_mesh.device_ids, after.components, strict=True):
        other = replicas.setdefault((target.region(device, shape), term_of(target, device)), part)
        assert torch.equal(part, other), "replicas differ"


def check_gradient(seed: int, clients: int = 1, devices: int = 1) -> None:
    """Send the gradient of a random change of layout back: it equals the given gradient, in the source's layout."""
    rng = random.Random(seed)
    if clients > 1:
        meshes = [_mesh(rng, clients, devices, dtckpt.client_id()) for _ in range(2)]
    else:
        meshes = [abstract_mesh(random_axes(rng)) for _ in range(2)]
    meshes[1] = rng.choice(meshes)
    shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
    source, target = (random_layout(rng, mesh, len(shape)) for mesh in meshes)
    leaf = tensor(seed, source, shape).requires_grad_()
    moved = redistribute(leaf, target)
    # The gradient of a term is the gradient of the whole value.
    given = tensor(seed + 1, Layout(target.sharding_specs, target.mesh), shape)
    moved.backward(given)
    assert leaf.grad.layout == Layout(source.sharding_specs, source.mesh)
    expected_part = expected(seed + 1, given.layout, shape)
    for device, part in zip(source.mesh.local_device_ids(), leaf.grad.components, strict=True):
        assert torch.equal(part, expected_part[source.region(device, shape).slices()]), seed


# --- in client processes ------------------------------------------------------------------------------------------


def check_clients(seeds: Sequence[int], devices: int, kind: str = "CPU") -> list[str]:
    """Move random tensors between meshes over all clients, or parts of them; return the faults."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    problems = []
    for seed in seeds:
        rng = random.Random(seed)
        meshes = [_mesh(rng, clients, devices, client, kind) for _ in range(2)]
        if rng.random() < 0.4:
            meshes[1] = meshes[0]
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))
        source, target = (random_layout(rng, mesh, len(shape)) for mesh in meshes)
        target = Layout(target.sharding_specs, target.mesh)
        after = redistribute(tensor(seed, source, shape), target)
        whole = expected(seed, source, shape)
        for device, part in zip(target.mesh.local_device_ids(), after.components, strict=True):
            expected_part = whole[target.region(device, shape).slices()]
            if not torch.allclose(part.cpu(), expected_part):
                problems.append(
                    f"seed {seed}, {source} to {target} of {shape}: device {device}: {part} is not {expected_part}"
                )
        if not torch.allclose(tensor(seed, source, shape).full_tensor().cpu(), whole):
            problems.append(f"seed {seed}: full_tensor from {source} of {shape}")
    return problems


def check_gradients(seeds: Sequence[int], devices: int) -> None:
    for seed in seeds:
        check_gradient(seed, dtckpt.num_clients(), devices)


def check_clients_in_many_messages(seeds: Sequence[int], devices: int) -> list[str]:
    """As `check_clients`, while boxes count as large, and few messages as many."""
    sizes = [
        (messages, "LARGE_NBYTES", 24),
        (messages, "MESSAGE_NBYTES", 64),
        (exchange, "PIECE_NBYTES", 32),
        (exchange, "IN_FLIGHT_NBYTES", 100),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in sizes]
    clear_plan_cache()
    try:
        for module, name, size in sizes:
            setattr(module, name, size)
        return check_clients(seeds, devices)
    finally:
        for module, name, size in before:
            setattr(module, name, size)
        clear_plan_cache()


def _mesh(rng: random.Random, clients: int, devices: int, client: int, kind: str = "CPU") -> Mesh:
    return cluster_mesh(random_axes(rng, clients * devices), clients, client, kind)


def gradients_over_clients(kind: str = "CPU") -> list[str]:
    """Send gradients back through from_local, redistribute and to_local."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients}, clients, client, kind)
    rows, cols = Layout(["x", UNSHARDED], mesh), Layout([UNSHARDED, "x"], mesh)
    whole = torch.arange(float(5 * 7)).reshape(5, 7)
    local = whole[rows.region(client, (5, 7)).slices()].clone().requires_grad_()
    problems = []
    moved = DTensor.from_local(local, mesh, [dtckpt.Shard(0)]).redistribute(placements=[dtckpt.Shard(1)])
    if tuple(moved.shape) != (5, 7):
        problems.append(f"shape {tuple(moved.shape)}")
    part = moved.to_local()
    expected_part = whole[cols.region(client, (5, 7)).slices()]
    if not torch.equal(part.detach().cpu(), expected_part):
        problems.append(f"values {part}")
    (part**3).sum().backward()
    if not torch.allclose(local.grad, 3 * local.detach() ** 2):
        problems.append(f"gradient {local.grad}")
    term = torch.full((3,), float(client + 1), requires_grad=True)
    total = DTensor.from_local(term, mesh, [dtckpt.Partial()]).redistribute(placements=None).to_local()
    if not torch.equal(total.detach().cpu(), torch.full((3,), clients * (clients + 1) / 2)):
        problems.append(f"sum {total}")
    (total.cpu() * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    if not torch.equal(term.grad, torch.tensor([1.0, 2.0, 3.0])):
        problems.append(f"gradient of a term {term.grad}")
    return problems


def copies_that_differ() -> None:
    mesh = cluster_mesh({"x": dtckpt.num_clients()}, dtckpt.num_clients(), dtckpt.client_id())
    local = torch.full((2,), float(dtckpt.client_id() == 1))
    try:
        dtckpt.pack([local], Layout.replicated(mesh, 1), run_check=True)
    finally:
        assert local.unique().numel() == 1, "the caller's tensor was written to"
