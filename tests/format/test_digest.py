import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.format.digest import as_bytes, chunk_digest


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
