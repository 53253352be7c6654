"""Which tensors the clients read together, each client other rows. Without PyTorch: simulations ask, too."""

from __future__ import annotations

import math

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.layout.layout import UNSHARDED, Layout

MIN_NBYTES = 1 << 20
"""Each client reads smaller tensors itself: sharing would replace one request to storage by one message."""
MIN_READS = 1.5
"""Fewest reads of each byte, over all clients, for which sharing pays."""
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
    """Return the bytes that the client with most rows reads; all clients count these, so they form equal batches."""
    # Rounded up to the largest shard: a client with fewer rows must not put one tensor more into its batch.
    largest = (-(-size // shards) for size, shards in zip(shape, rows.shard_grid, strict=True))
    return math.prod(largest) * itemsize * (rows.mesh.size() // rows.mesh.num_clients)


def rows_layout(layout: Layout, dim: int) -> Layout:
    """Return a layout in which every device has other rows, along ``dim``.

    The axes that split ``dim`` already come first, so that a device reads the rows that it keeps, if it keeps any.
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
