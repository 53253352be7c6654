"""Blocks of planned files: each element is in one block, at its place; no block is too large."""

import math
import random

import numpy as np
import pytest

from dtckpt.checkpoint.converting.export import ExportedTensor
from dtckpt.checkpoint.converting.file_plan import MAX_GAP_NBYTES, FileSlot, c_boxes, plan_blocks
from dtckpt.layout.region import Region


class Info:
    """The facts about a tensor that a plan asks for."""

    def __init__(self, shape, chunk_shape):
        self.shape, self.chunk_shape = shape, chunk_shape


def random_shape(rng):
    return tuple(rng.randrange(1, 12) for _ in range(rng.randrange(4)))


@pytest.mark.parametrize("seed", range(80))
def test_boxes_follow_each_other_in_c_order(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    offset = tuple(rng.randrange(size) for size in shape)
    region = Region(offset, tuple(rng.randrange(1, size - at + 1) for size, at in zip(shape, offset, strict=True)))
    chunk = tuple(rng.randrange(1, size + 1) for size in shape)
    for max_nbytes in (1, 8, 40, 300, 1 << 20):
        numbers = np.arange(math.prod(region.shape)).reshape(region.shape)
        seen = []
        for box in c_boxes(region, 4, max_nbytes, chunk):
            assert 4 * box.numel <= max(4, max_nbytes)
            seen += numbers[box.relative_to(region).slices()].reshape(-1).tolist()
        assert seen == list(range(numbers.size))


def test_boxes_end_where_chunks_end():
    boxes = list(c_boxes(Region((5, 0), (40, 10)), 1, 170, (8, 10)))
    assert [box.offset[0] for box in boxes] == [5, 16, 32]
    # Chunks that are too large for a box are cut anywhere.
    assert [box.offset[0] for box in c_boxes(Region((5, 0), (10, 10)), 1, 40, (20, 10))] == [5, 9, 13]
    assert list(c_boxes(Region((0, 0), (0, 3)), 4, 100, (1, 3))) == []


@pytest.mark.parametrize("seed", range(30))
def test_blocks_cover_all_slots(seed):
    rng = random.Random(seed)
    slots, end = [], 8
    for number in range(8):
        shape = random_shape(rng)
        tensor = ExportedTensor(f"t{number}", Info(shape, shape), rng.choice(["int8", "float32", "float64"]))
        end += rng.choice([0, 0, 3, MAX_GAP_NBYTES + 1])
        slots.append(FileSlot(tensor, Region.full(shape), end))
        end += slots[-1].nbytes
    for max_nbytes in (64, 1000, 1 << 20):
        filled = np.zeros(end, np.int64)
        for block in plan_blocks(slots, max_nbytes):
            assert block.nbytes <= max_nbytes
            for part in block.parts:
                assert 0 <= part.start <= block.nbytes - part.nbytes
                at = block.offset + part.start
                first = np.ravel_multi_index(part.region.offset, part.slot.region.shape) if part.region.ndim else 0
                assert at == part.slot.offset + first * part.slot.tensor.itemsize
                filled[at : at + part.nbytes] += 1
        expected = np.zeros(end, np.int64)
        for slot in slots:
            expected[slot.offset : slot.offset + slot.nbytes] = 1
        assert np.array_equal(filled, expected)
