"""Windows: their size, their reads, and their division among workers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.resharding.reshard_plan import WINDOW_NBYTES, Units, Windows, share_out
from dtckpt.checkpoint.saving.plan import NO_CLIENT, Holding, TensorSpec, plan_save
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region

MIB = 1 << 20


@st.composite
def grids(draw):
    """A grid of new chunks, and the units of the old ones."""
    shape = draw(st.lists(st.integers(1, 20), max_size=3).map(tuple))
    chunk, old = (tuple(draw(st.integers(1, size)) for size in shape) for _ in range(2))
    return ChunkGrid(shape, chunk), Units(old, tuple(draw(st.integers(1, size)) for size in old))


def boxes_of(grid, windows):
    """The chunks of each window, and the box that they cover."""
    numbers = windows.number(np.arange(grid.num_chunks)).tolist()
    for _, group in itertools.groupby(range(grid.num_chunks), key=lambda chunk: numbers[chunk]):
        chunks = [grid.chunk(number)[1] for number in group]
        offset = tuple(map(min, zip(*(chunk.offset for chunk in chunks), strict=True)))
        stop = tuple(map(max, zip(*(chunk.stop for chunk in chunks), strict=True)))
        yield chunks, Region(offset, tuple(end - start for start, end in zip(offset, stop, strict=True)))


def num_units(units, box):
    """How many units share an element with a box."""
    sizes = zip(box.offset, box.stop, units.chunk, units.unit, strict=True)
    return math.prod(
        len({(at // chunk, at % chunk // unit) for at in range(start, stop)}) for start, stop, chunk, unit in sizes
    )


@given(grids(), st.integers(1, 9000))
def test_windows_are_boxes_that_fit_and_read_what_was_planned(case, most):
    grid, units = case
    windows = Windows.of(grid, 1, units, most)
    read = 0
    numbers = windows.number(np.arange(grid.num_chunks))
    assert numbers.tolist() == sorted(numbers.tolist())
    for chunks, box in boxes_of(grid, windows):
        assert sum(chunk.numel for chunk in chunks) == box.numel
        assert box.numel <= max(most, math.prod(grid.chunk_shape))
        read += num_units(units, box)
    assert read == pytest.approx(num_units(units, Region.full(grid.shape)) * windows.amplification)


@given(grids())
def test_with_room_for_the_tensor_each_unit_is_read_once(case):
    grid, units = case
    assert Windows.of(grid, 1, units, math.prod(grid.shape)).amplification == 1


def test_windows_are_no_larger_than_needed():
    """Rows to columns: all columns of some rows, and not all memory."""
    shape, units = (1 << 16, 4096), Units((1024, 4096), (64, 4096))
    windows = Windows.of(ChunkGrid(shape, (4096, 1024)), 4, units, 1 << 40)
    assert (windows.nbytes, windows.amplification) == (64 * MIB, 1)
    assert Windows.of(ChunkGrid(shape, (64, 4096)), 4, units, 1 << 40).nbytes == WINDOW_NBYTES


def plan_of(*shapes, missing=()):
    boxes = {name: [Holding(Region.full(shape), (0,))] for name, shape in enumerate(shapes)}
    for name in missing:
        rows, *others = shapes[name]
        boxes[name] = [Holding(Region.full((rows // 2, *others)), (0,))]
    specs = [
        TensorSpec(f"{name}", shape, "float32", "float32", tuple(boxes[name])) for name, shape in enumerate(shapes)
    ]
    return plan_save(specs, 1024)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), max_size=6),
    st.integers(1, 5),
    st.integers(1, 64),
)
def test_workers_write_neighbouring_windows_of_about_as_many_bytes(shapes, count, rows):
    plan = plan_of(*shapes, missing=[name for name, shape in enumerate(shapes) if shape[0] % 3 == 2])
    windows = [
        Windows.of(item.grid, 4, Units(*[tuple(min(rows, size) or 1 for size in item.grid.shape)] * 2), 4096)
        for item in plan.tensors
    ]
    shared = share_out(plan, windows, count)
    assert np.array_equal(shared.owners == NO_CLIENT, plan.owners == NO_CLIENT)
    owners = shared.owners[shared.owners != NO_CLIENT].tolist()
    assert owners == sorted(owners)
    assert set(owners) <= set(range(count))
    nbytes = [0] * count
    largest = 0
    for item, cut in zip(shared.tensors, windows, strict=True):
        chunk = 4 * math.prod(item.grid.chunk_shape)
        largest = max(largest, chunk * cut.length)
        by_window = {}
        for number, owner in enumerate(item.owners.tolist()):
            if owner != NO_CLIENT:
                nbytes[owner] += chunk
                assert by_window.setdefault(cut.number(number), owner) == owner
    assert max(nbytes) <= sum(nbytes) / count + largest
