"""Chunk digests: of blocks, of elements that are not contiguous, and bound to name and position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.format.digest import Blocks, as_bytes, bytes_digest, digest_chunk, digest_of_blocks, identify_chunk
from dtckpt.format.grid import ChunkGrid


def chunk_digest(name, index, elements):
    return digest_chunk(name, index, elements, Blocks(0, 1 << 20))[0]


def test_a_digest_is_bound_to_tensor_and_place():
    elements = np.arange(6, dtype=np.float32).reshape(2, 3)
    digests = {
        chunk_digest("w", (0, 1), elements),
        chunk_digest("w", (1, 0), elements),
        chunk_digest("v", (0, 1), elements),
        chunk_digest("w", (0, 1, 0), elements),
        chunk_digest("w", (0,), elements),
        chunk_digest("w", (0, 1), elements + 1),
        chunk_digest("w0", (1,), elements),
    }
    assert len(digests) == 7


def test_a_digest_belongs_to_the_format():
    # Changing these numbers makes every stored checkpoint unreadable.
    assert chunk_digest("w", (0, 1), np.arange(6, dtype="<f4").reshape(2, 3)) == 0x6AA6A33B0C054AC2
    assert chunk_digest("s", (), np.zeros((), "<i8")) == 0xBDC68EB9A2094E95
    elements = np.arange(6, dtype="<f4").reshape(2, 3)
    assert digest_chunk("w", (0, 1), elements, Blocks(0, 1))[0] == 0xCB32AC348F7468A9


@given(st.integers(1, 70000), st.integers(1, 70000), st.integers(1, 70000), st.data())
def test_blocks_cut_chunks_into_rows_of_their_first_long_dim(height, width, chunk, data):
    grid = ChunkGrid((3, height, width), (1, min(chunk, height), width))
    blocks = Blocks.of(grid, 2)
    region = grid.region((data.draw(st.integers(0, 2)), data.draw(st.integers(0, grid.counts[1] - 1)), 0))
    boxes = list(blocks.cut(region))
    assert len(boxes) == blocks.count(region.shape)
    assert sum(box.numel for box in boxes) == region.numel
    start = data.draw(st.integers(0, len(boxes) - 1))
    stop = data.draw(st.integers(start + 1, len(boxes)))
    span = blocks.span(region, start, stop)
    assert blocks.meeting(region, span) == range(start, stop)
    assert sum(box.numel for box in boxes[start:stop]) == span.numel
    assert all(box.numel * 2 <= 256 << 10 or box.shape[blocks.dim] == 1 for box in boxes)


@pytest.mark.parametrize("nbytes", [0, 1, 16, 128, 129, 239, 240, 241, 256, 1024, 100_000])
def test_one_pass_gives_the_digest_and_the_identity(nbytes):
    elements = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
    for blocks in (Blocks(0, 1 << 20), Blocks(0, 300)):
        digest, parts, identity = identify_chunk("w", (0, 1), elements, blocks)
        assert (digest, parts) == digest_chunk("w", (0, 1), elements, blocks)
        assert identity not in (digest, 0)
    changed = np.append(elements[:-1], elements[-1:] ^ 1)
    assert not nbytes or identify_chunk("w", (0, 1), changed, Blocks(0, 300))[2] != identity


def test_an_identity_belongs_to_the_format():
    elements = np.arange(1000, dtype="<f4").reshape(10, 100)
    assert identify_chunk("w", (0, 1), elements, Blocks(0, 1 << 20))[2] == 0x4A2174184A161C6C
    assert identify_chunk("w", (0, 1), elements, Blocks(0, 4))[2] == 0xF93AFBDB7A1B1B9B
    assert identify_chunk("w", (0, 1), elements.T.copy().T, Blocks(0, 4))[2] == 0xF93AFBDB7A1B1B9B


def test_a_chunk_of_blocks_is_bound_to_its_place_through_them():
    elements = np.arange(64, dtype="<i4").reshape(16, 4)
    blocks = Blocks(0, 4)
    digest, parts = digest_chunk("w", (0, 1), elements, blocks)
    assert parts == [bytes_digest(elements[row : row + 4].tobytes()) for row in range(0, 16, 4)]
    assert digest == digest_of_blocks("w", (0, 1), parts)
    swapped = elements.reshape(4, 4, 4)[[1, 0, 2, 3]].reshape(16, 4)
    others = [digest_chunk("w", (0, 1), swapped, blocks), digest_chunk("w", (1, 0), elements, blocks)]
    assert digest not in {other for other, _ in others}


def test_memory_order_does_not_matter():
    elements = np.arange(24, dtype=np.int16).reshape(4, 6)
    assert chunk_digest("w", (0,), elements.T) == chunk_digest("w", (0,), elements.T.copy())
    assert chunk_digest("w", (0,), elements[::2, ::3]) == chunk_digest("w", (0,), elements[::2, ::3].copy())
    assert as_bytes(elements.T).tobytes() == elements.T.tobytes()
    assert chunk_digest("w", (0,), np.zeros((0, 3))) == chunk_digest("w", (0,), np.zeros((3, 0)))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_every_flipped_bit_shows(content, data):
    elements = np.frombuffer(content, np.uint8)
    flipped = elements.copy()
    flipped[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert chunk_digest("w", (0,), elements) != chunk_digest("w", (0,), flipped)
