"""Plans of reads of pieces: whatever the pieces' shapes and strides, the spans give the elements of the regions."""

import math
import random

import numpy as np
import pytest

from dtckpt.checkpoint.reading.piece_reads import plan_spans
from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor
from dtckpt.errors import RegionError, RegionNotFoundError
from dtckpt.layout.region import Region


def random_region(rng, shape):
    offset = tuple(rng.randrange(size) for size in shape)
    return Region(offset, tuple(rng.randrange(1, size - start + 1) for size, start in zip(shape, offset, strict=True)))


def random_pieces(rng, region):
    """Cut a region into boxes, again and again."""
    if region.numel > 1 and rng.random() < 0.7:
        dim = rng.choice([dim for dim, size in enumerate(region.shape) if size > 1])
        at = rng.randrange(1, region.shape[dim])
        lengths = ((0, at), (at, region.shape[dim] - at))
        for start, length in lengths:
            offset = tuple(first + start * (axis == dim) for axis, first in enumerate(region.offset))
            shape = tuple(length if axis == dim else size for axis, size in enumerate(region.shape))
            yield from random_pieces(rng, Region(offset, shape))
    else:
        yield region


def stored(rng, elements, regions):
    """Put boxes into a file, in C order, transposed, or with gaps; return the pieces and the file."""
    file = bytearray(rng.randbytes(3))
    pieces = []
    for region in regions:
        order = rng.sample(range(region.ndim), region.ndim) if rng.random() < 0.5 else range(region.ndim)
        gap = rng.choice([0, 0, 5])
        strides, step = [0] * region.ndim, 1
        for dim in reversed(order):
            strides[dim], step = step, step * region.shape[dim] + gap
        offset, nbytes = len(file), elements.itemsize * max(1, step)
        file += rng.randbytes(nbytes)
        view = np.ndarray(region.shape, elements.dtype, file, offset, [elements.itemsize * each for each in strides])
        view[...] = elements[region.slices()]
        del view
        is_dense = not gap and list(order) == sorted(order)
        pieces.append(Piece(region, "f", offset, None if is_dense and rng.random() < 0.5 else tuple(strides)))
    return tuple(pieces), bytes(file)


@pytest.mark.parametrize("seed", range(60))
def test_spans_give_the_elements(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(5)))
    elements = np.arange(math.prod(shape), dtype=rng.choice(["<i2", "<i4", "<i8"])).reshape(shape)
    pieces, file = stored(rng, elements, list(random_pieces(rng, Region.full(shape))))
    tensor = PieceTensor("w", shape, elements.dtype.name, pieces)
    for max_gap, max_nbytes in ((0, 1 << 20), (1 << 20, 1 << 20), (8, 40), (0, 1)):
        regions = [random_region(rng, shape) for _ in range(3)]
        buffers = [np.zeros(region.shape, elements.dtype) for region in regions]
        nbytes = 0
        for span in plan_spans(tensor, regions, max_gap=max_gap, max_nbytes=max_nbytes):
            assert 0 <= span.start < span.stop <= len(file)
            assert span.nbytes <= max(max_nbytes, elements.itemsize)
            data = file[span.start : span.stop]
            box = np.ndarray(span.shape, elements.dtype, data, 0, span.strides)
            if span.is_dense:
                assert data == np.ascontiguousarray(box).tobytes()
            buffers[span.number][span.target or ...] = box
            nbytes += span.nbytes
        for region, buffer in zip(regions, buffers, strict=True):
            assert np.array_equal(buffer, elements[region.slices()])
        wanted = sum(buffer.nbytes for buffer in buffers)
        assert nbytes >= wanted
        # Without gaps, only what is wanted is read; cut into pieces, a region has no gap between two of its elements.
        assert nbytes == wanted or max_gap


def test_expanded_elements_are_read_once():
    tensor = PieceTensor("w", (1000, 3), "float32", (Piece(Region.full((1000, 3)), "f", 8, (0, 1)),))
    (span,) = plan_spans(tensor, [Region.full((1000, 3))], max_gap=0, max_nbytes=1 << 20)
    assert (span.start, span.stop, span.shape, span.strides) == (8, 20, (1000, 3), (0, 4))
    assert not span.is_dense


def test_what_is_not_there():
    row = Piece(Region((0, 0), (1, 4)), "f", 0)
    tensor = PieceTensor("w", (2, 4), "float32", (row,))
    assert list(plan_spans(tensor, [row.region, Region((1, 1), (1, 0))], max_gap=0, max_nbytes=99))
    with pytest.raises(RegionNotFoundError, match="'w' was saved in part"):
        plan_spans(tensor, [Region((0, 1), (2, 1))], max_gap=0, max_nbytes=99)
    for region in (Region((0, 0), (3, 4)), Region((0,), (1,))):
        with pytest.raises(RegionError, match="outside tensor 'w'"):
            plan_spans(tensor, [region], max_gap=0, max_nbytes=99)
