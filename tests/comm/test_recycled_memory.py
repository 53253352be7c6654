"""`RecycledMemory`: memory is lent once at a time, and comes back."""

import math

import numpy as np

from dtckpt.comm.recycled_memory import RECYCLED_NBYTES, RecycledMemory


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_the_last_view_is_gone():
    memory = RecycledMemory(math.inf)
    first = memory.take(2 * RECYCLED_NBYTES)
    view = first.view(np.float32).reshape(2, -1)[1]
    place = address(first)
    del first
    other = memory.take(2 * RECYCLED_NBYTES)
    assert address(other) != place, "a view of the first one is left"
    del view
    # A little less fits, too.
    assert address(memory.take(2 * RECYCLED_NBYTES - 1)) == place


def test_free_memory_of_another_size_goes_where_the_bound_needs_it():
    memory = RecycledMemory(4 * RECYCLED_NBYTES)
    lent = [memory.take(2 * RECYCLED_NBYTES) for _ in range(2)]
    lent.clear()
    assert len(memory.take(4 * RECYCLED_NBYTES)) == 4 * RECYCLED_NBYTES
    assert memory._nbytes == 4 * RECYCLED_NBYTES


def test_small_memory_is_left_to_the_c_library():
    memory = RecycledMemory(math.inf)
    assert len(memory.take(RECYCLED_NBYTES - 1)) == RECYCLED_NBYTES - 1
    assert memory._nbytes == 0
