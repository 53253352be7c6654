"""Plan `dtckpt.checkpoint.restoring.read_once`: which tensors clients read together, and in which rows; pure."""

from __future__ import annotations

import math

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.layout.layout import UNSHARDED, Layout

MIN_NBYTES = 1 << 20
"""Smaller tensors are read by each client: they take one request to storage, or one message, all the same."""
MIN_READS = 1.5
"""How often each byte would be read, over all clients, at least, for sharing to pay."""
MAX_NBYTES = 192 << 20
"""Bound on the bytes of a client's rows of one tensor: they lie in memory beside the destination."""


def pays(info: TensorInfo, layout: Layout, itemsize: int) -> bool:
    """Tell whether the clients of a mesh should read a tensor together.

    Args:
        info: The tensor.
        layout: The layout that it is restored to.
        itemsize: Bytes of an element in memory.
    """
    if layout.mesh.num_clients == 1 or not info.shape or info.nbytes < MIN_NBYTES:
        return False
    rows = rows_layout(layout, info.row_dim)
    return rows_nbytes(rows, info.shape, itemsize) <= MAX_NBYTES and reads_per_byte(info, layout) >= MIN_READS


def rows_nbytes(rows: Layout, shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes that a client reads: those of the client that reads most, so that all clients batch alike."""
    # Rounded up to the largest shard: a client with fewer rows must not put one tensor more into its batch.
    largest = (-(-size // shards) for size, shards in zip(shape, rows.shard_grid, strict=True))
    return math.prod(largest) * itemsize * (rows.mesh.size() // rows.mesh.num_clients)


def rows_layout(layout: Layout, dim: int) -> Layout:
    """Return a layout in which every device has rows of its own, along ``dim``.

    The axes that split ``dim`` already come first, so that a device reads rows that it keeps, where there are such.
    """
    axes = [*layout.split_axes[dim], *(axis for axis in layout.mesh.dim_names if axis not in layout.split_axes[dim])]
    specs: list[str | tuple[str, ...]] = [UNSHARDED] * layout.rank
    specs[dim] = tuple(axes)
    return Layout(specs, layout.mesh)


def reads_per_byte(info: TensorInfo, layout: Layout) -> float:
    """Return how often each byte is read if every client reads for itself, taking the first client as typical."""
    mesh = layout.mesh
    regions = {layout.region(device, info.shape) for device in mesh.devices_of(mesh.clients[0])}
    nbytes = sum(info.read_nbytes(region) for region in regions if not region.is_empty)
    return nbytes * mesh.num_clients / info.nbytes
