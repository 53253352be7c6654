"""Choose a tensor's chunk grid from the boxes that clients hold.

One client writes a chunk, once, so the grid should have a line at every edge of a box. A regular grid has one if its
step divides the position of every edge; the greatest common divisor of the positions is the coarsest such step. Nested
uneven splits can make it tiny (50257 rows over 2x2: 1 row). Then the grid follows the even split instead, and the few
rows between a box edge and the next grid line are sent to the chunk's owner before it writes:

    edges of the boxes   0        12565        25129        37693        50257
    grid lines           0        12565        25130        37695        50257

Row 25129 is held by client 2, but lies in the second chunk, which client 1 owns; so client 2 sends it to client 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region

MAX_CHUNKS_PER_BOX = 8
"""How many times finer than its boxes a grid may be, per dim, before rows are sent instead."""
ALWAYS_FINE = 64
"""For a dim that is cut into no more steps than this, rows are never sent."""


def choose_grid(
    shape: Sequence[int],
    itemsize: int,
    boxes: Iterable[Region],
    max_nbytes: int,
    *,
    is_whole: bool = True,
    steps_per_box: int = 1,
) -> ChunkGrid:
    """Choose the chunk grid of a tensor.

    Args:
        shape: Global shape.
        itemsize: Bytes per stored element.
        boxes: The distinct regions that clients hold.
        max_nbytes: Chunks larger than this are cut where a cut lines up with the boxes.
        is_whole: Whether the boxes cover the tensor. If not, every box edge gets a grid line.
        steps_per_box: Chunks per box and dim of a grid that follows the even split; the more there are, the fewer
            elements lie in chunks that a box edge cuts.
    """
    edges = [{0, size} for size in shape]
    for box in boxes:
        for dim, (start, stop) in enumerate(zip(box.offset, box.stop, strict=True)):
            edges[dim].update((start, stop))
    steps = [
        _step(sorted(dim_edges), size, is_whole, steps_per_box) for dim_edges, size in zip(edges, shape, strict=True)
    ]
    chunk = [max(1, min(step, size)) for step, size in zip(steps, shape, strict=True)]
    for dim, size in enumerate(shape):
        nbytes = itemsize * math.prod(chunk)
        if nbytes <= max_nbytes:
            break
        limit = max(1, max_nbytes * chunk[dim] // nbytes)
        chunk[dim] = _cut(chunk[dim], limit, is_free=len(edges[dim]) == 2 or steps[dim] >= size)
    return ChunkGrid(tuple(shape), tuple(chunk))


def _step(edges: list[int], size: int, is_whole: bool, steps_per_box: int) -> int:
    """Return the grid step of one dim, from its sorted box edges."""
    common = math.gcd(*(edge for edge in edges if edge != size)) or size
    boxes = len(edges) - 1
    if not is_whole or size <= ALWAYS_FINE * common or size <= MAX_CHUNKS_PER_BOX * boxes * common:
        return common
    return -(-size // (boxes * steps_per_box))


def _cut(step: int, limit: int, *, is_free: bool) -> int:
    """Return a step of at most ``limit`` that keeps lines at the multiples of ``step``.

    Where no box edge lies inside the dim any step will do. Otherwise it must divide ``step``; when only slivers
    do (a prime step), the step stays and a later dim is cut.
    """
    if is_free:
        return -(-step // -(-step // limit))
    return next((size for size in range(limit, limit // 4, -1) if step % size == 0), step)
