"""Count the bytes that go from device to device when a tensor is laid out anew, from the plan of the exchange."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.redistribution.exchange_plan import plan_exchange


def traffic(source: Layout, target: Layout, shape: tuple[int, ...], nbytes: int) -> npt.NDArray[np.int64]:
    """Return the bytes from every device of the source (rows) to every device of the target (columns).

    Devices with the same number in both meshes are one device. A device keeps elements that it needs and already holds.

    Args:
        source: The layout before.
        target: The layout after.
        shape: Global shape.
        nbytes: Bytes of the whole tensor.
    """
    itemsize = nbytes // max(1, math.prod(shape))
    matrix = np.zeros((source.mesh.size(), target.mesh.size()), np.int64)
    rows, columns = source.mesh.offsets, target.mesh.offsets
    for client in target.mesh.clients:
        plan = plan_exchange(source, target, shape, client)
        moves = [*plan.copies, *(move for moves in plan.receives.values() for move in moves)]
        origins: dict[tuple[int, Region], list[int]] = {}
        for move in moves:
            matrix[rows.of(move.source), columns.of(move.target)] += move.region.numel * itemsize
            origins.setdefault((move.target, move.region), []).append(move.source)
        for move in plan.forwards:
            for origin in origins[move.source, move.region]:
                matrix[rows.of(origin), columns.of(move.target)] += move.region.numel * itemsize
    return matrix
