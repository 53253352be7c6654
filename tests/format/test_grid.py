"""Chunk grids: numbers, indices and boxes of chunks agree, and a region meets the right chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import RegionError
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    return ChunkGrid(shape, tuple(draw(st.integers(1, 9)) for _ in shape))


@given(grids())
def test_chunks_tile_the_tensor(grid):
    touched = np.zeros(grid.shape, int)
    for number in range(grid.num_chunks):
        index = grid.index(number)
        assert grid.number(index) == number
        region = grid.region(index)
        assert not region.is_empty
        touched[region.slices()] += 1
    assert (touched == 1).all()


@given(grids(), st.data())
def test_meeting_finds_the_chunks_that_share_an_element(grid, data):
    start = tuple(data.draw(st.integers(0, size)) for size in grid.shape)
    shape = tuple(data.draw(st.integers(0, size - low)) for size, low in zip(grid.shape, start, strict=True))
    region = Region(start, shape)
    every = [grid.index(number) for number in range(grid.num_chunks)]
    expected = [index for index in every if grid.region(index).intersect(region) and not region.is_empty]
    assert list(grid.meeting(region)) == expected


def test_scalars_and_tensors_without_elements():
    assert (ChunkGrid((), ()).num_chunks, list(ChunkGrid((), ()).meeting(Region((), ())))) == (1, [()])
    assert ChunkGrid((0, 5), (1, 5)).num_chunks == 0


@pytest.mark.parametrize("chunk_shape", [(2,), (2, 0), (2, -1), (2, 2, 2)])
def test_chunk_shapes_that_do_not_fit(chunk_shape):
    with pytest.raises(RegionError, match="chunk shape does not fit"):
        ChunkGrid((4, 4), chunk_shape)
