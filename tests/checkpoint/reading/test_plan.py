"""What a reader needs: every element of every region once, whether the plan is kept or made anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.reading.plan import plan_reads
from dtckpt.errors import RegionError
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region


@st.composite
def wanted(draw):
    """A grid, and regions of it."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    grid = ChunkGrid(shape, tuple(draw(st.integers(1, max(1, size))) for size in shape))
    regions = []
    for _ in range(draw(st.integers(1, 3))):
        bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        regions.append(Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
    return grid, tuple(regions)


@given(wanted(), st.booleans())
def test_every_wanted_element_comes_once(drawn, by_blocks):
    grid, regions = drawn
    whole = np.arange(np.prod(grid.shape, dtype=int)).reshape(grid.shape)
    found = [np.full(region.shape, -1) for region in regions]
    parts = list(plan_reads(grid, 100_000, regions, by_blocks=by_blocks))
    for part in parts:
        assert part.chunk == grid.region(part.index) == grid.region(grid.index(part.number))
        assert part.chunk.contains(part.box)
        assert part.nbytes == 100_000 * part.box.numel
        assert by_blocks or part.is_whole
        for position, of_box, of_region in part.uses:
            assert (found[position][of_region] == -1).all()
            found[position][of_region] = whole[part.box.slices()][of_box]
    assert len({part.number for part in parts}) == len(parts)
    for region, elements in zip(regions, found, strict=True):
        assert (elements == whole[region.slices()]).all()


@pytest.mark.parametrize("region", [Region((0,), (5,)), Region((0, 0), (1, 1))])
def test_regions_outside_are_refused(region):
    with pytest.raises(RegionError, match="outside"):
        plan_reads(ChunkGrid((4,), (2,)), 4, (region,), by_blocks=True)
