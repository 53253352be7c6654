"""Restores that read each byte once: every client reads rows of its own, and the redistribute engine hands them on.

A replicated tensor would otherwise be read by every client, and one that is split across its rows, so that every block
has something for everybody, too. That pays where storage is slower than the way between clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dtckpt.checkpoint.leaves import Leaf, host_array, torch_dtype
from dtckpt.checkpoint.reading.checkpoint import Checkpoint, TensorInfo
from dtckpt.checkpoint.restoring.shared_memory import Named
from dtckpt.checkpoint.timing import Phases
from dtckpt.comm import host_memory
from dtckpt.comm.process_groups import is_connected
from dtckpt.comm.torch_device import device_of
from dtckpt.errors import CheckpointError, DtckptError
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution.execute import plan_redistribution, redistribute_into, report_error

MIN_NBYTES = 1 << 20
"""Smaller tensors take one request each way, whoever reads them."""
MIN_READS = 1.5
"""How often each byte would have to be read, over all clients, for sharing to pay."""
BATCH_NBYTES = 64 << 20
"""What a client reads at a time; it is handed on before more is read."""
MAX_NBYTES = 192 << 20
"""A client's part of one tensor, in bytes: it lies in memory beside the destination."""
_MAX_MESHES = 16


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor that the clients of its mesh read together.

    Args:
        name: Its name in the checkpoint.
        leaf: Its memory.
        layout: Its layout, on the mesh as this client sees it.
        rows: The layout in which it is read.
    """

    name: str
    leaf: Leaf
    layout: Layout
    rows: Layout

    @property
    def nbytes(self) -> int:
        """Bytes that the client reads which reads most."""
        mesh = self.rows.mesh
        rows = (-(-size // shards) for size, shards in zip(self.leaf.shape, self.rows.shard_grid, strict=True))
        return math.prod(rows) * torch_dtype(self.leaf.dtype).itemsize * (mesh.size() // mesh.num_clients)


def shareable(checkpoint: Checkpoint, leaves: Sequence[Named]) -> list[Shared]:
    """Return the tensors that are worth reading together, by mesh, in the same order on all clients of each."""
    found: list[Shared] = []
    for name, leaf in leaves:
        info, layout = checkpoint.info(name), leaf.layout
        if layout is None or layout.mesh.num_clients == 1 or not leaf.shape or info.nbytes < MIN_NBYTES:
            continue
        if not layout.mesh.local_device_ids() or not is_connected(layout.mesh.clients):
            continue
        one = Shared(name, leaf, layout, rows_layout(layout, info.row_dim))
        if one.nbytes <= MAX_NBYTES and reads(info, layout) >= MIN_READS:
            found.append(one)
    return sorted(found, key=lambda one: (_key(one.layout.mesh), one.name))


def rows_layout(layout: Layout, dim: int) -> Layout:
    """Return a layout in which every device has rows of its own, along ``dim``; those it wants anyway, if any."""
    axes = [*layout.split_axes[dim], *(axis for axis in layout.mesh.dim_names if axis not in layout.split_axes[dim])]
    specs: list[str | tuple[str, ...]] = [UNSHARDED] * layout.rank
    specs[dim] = tuple(axes)
    return Layout(specs, layout.mesh)


def reads(info: TensorInfo, layout: Layout) -> float:
    """Return how often each byte is read if every client reads what it needs; all take as much as the first."""
    mesh = layout.mesh
    regions = {layout.region(device, info.shape) for device in mesh.devices_of(mesh.clients[0])}
    nbytes = sum(info.read_nbytes(region) for region in regions if not region.is_empty)
    return nbytes * mesh.num_clients / info.nbytes


def announced(shared: Sequence[Shared]) -> dict[str, str]:
    """Return a digest of the tensors of each mesh, by one of the mesh, to be compared with the other clients'."""
    found: dict[str, list[str]] = {}
    for one in shared:
        facts = one.name, one.leaf.shape, one.leaf.dtype, one.layout.sharding_specs
        found.setdefault(_key(one.layout.mesh), []).append(repr(facts))
    return {mesh: _digest(repr(tensors)) for mesh, tensors in list(found.items())[:_MAX_MESHES]}


def agreed(shared: Sequence[Shared], told: Mapping[int, Mapping[str, str]]) -> list[Shared]:
    """Return the tensors that all clients of their mesh will read together.

    Args:
        shared: This client's.
        told: What every client `announced`.
    """
    mine = announced(shared)

    def is_agreed(mesh: Mesh) -> bool:
        key = _key(mesh)
        return key in mine and all(told.get(client, {}).get(key) == mine[key] for client in mesh.clients)

    meshes = {one.layout.mesh: None for one in shared}
    fine = {mesh for mesh in meshes if is_agreed(mesh)}
    return [one for one in shared if one.layout.mesh in fine]


def read_shared(checkpoint: Checkpoint, shared: Sequence[Shared], phases: Phases) -> None:
    """Fill tensors, each byte read by one client. Collective: over the clients of each mesh, with the same tensors.

    Raises:
        DtckptError: This client's read failed, or another's.
    """
    for batch in _batches(shared):
        mesh = batch[0].layout.mesh
        places = dict(zip(mesh.local_device_ids(), map(device_of, mesh.local_devices()), strict=True))
        try:
            read = [_empty(one) for one in batch]
            checkpoint.read_all(
                (
                    (
                        one.name,
                        [
                            (one.rows.region(device, one.leaf.shape), host_array(part))
                            for device, part in parts.items()
                            if part.numel()
                        ],
                    )
                    for one, parts in zip(batch, read, strict=True)
                ),
                count=phases.count,
            )
            plans = [
                plan_redistribution(one.rows, one.layout, one.leaf.shape, torch_dtype(one.leaf.dtype)) for one in batch
            ]
        except Exception as error:
            # The others wait for what this client does not have.
            told = error if isinstance(error, DtckptError) else CheckpointError(f"{type(error).__name__}: {error}")
            report_error(told, [mesh])
            raise
        with phases.measure("move"):
            into = [_components(one) for one in batch]
            moved = [{device: part.to(places[device]) for device, part in parts.items()} for parts in read]
            redistribute_into(plans, moved, into)
            phases.count(sum(part.nbytes for parts in into for part in parts.values()))


def _batches(shared: Sequence[Shared]) -> Iterator[list[Shared]]:
    """Yield tensors of one mesh that are read together, alike on all its clients."""
    batch: list[Shared] = []
    nbytes = 0
    for one in shared:
        if batch and (one.layout.mesh != batch[0].layout.mesh or nbytes + one.nbytes > BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += one.nbytes
    if batch:
        yield batch


def _empty(one: Shared) -> dict[int, torch.Tensor]:
    """Return memory for the rows of this client's devices."""
    return {
        device: host_memory.allocate(one.rows.region(device, one.leaf.shape).shape, torch_dtype(one.leaf.dtype))
        for device in one.rows.mesh.local_device_ids()
    }


def _components(one: Shared) -> dict[int, torch.Tensor]:
    """Return the memory to be filled, by device."""
    memories = (memory.detach() for _, memory in one.leaf.parts)
    return dict(zip(one.layout.mesh.local_device_ids(), memories, strict=True))


@lru_cache(maxsize=64)
def _key(mesh: Mesh) -> str:
    return _digest(repr(mesh.identity))


def _digest(text: str) -> str:
    return f"{bytes_digest(text.encode()):016x}"
