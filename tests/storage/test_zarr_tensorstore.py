"""`TensorStoreWriter`: the memory that it holds."""

import os
from dataclasses import dataclass

import numpy as np
import pytest

from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter


@dataclass
class Array:
    path: str
    grid: ChunkGrid
    stored_dtype: str
    codec: str


SIDE_BY_SIDE = Array("w", ChunkGrid((1024, 1024), (1024, 512)), "float32", NO_CODEC)


@pytest.mark.parametrize(("is_contiguous", "times"), [(True, 1), (False, 2)])
def test_copies_of_chunks_count_as_waiting(tmp_path, is_contiguous, times):
    """TensorStore copies a large chunk whose elements are a part of the rows of an array."""
    region = Region((0, 512), (1024, 512))
    elements = np.ones((1024, 1024), "f4")[region.slices()]
    if is_contiguous:
        elements = np.ascontiguousarray(elements)
    writer = TensorStoreWriter("ocdbt", LocalFolder(tmp_path), 0, is_durable=False, max_pending_nbytes=1 << 30)
    writer.write(SIDE_BY_SIDE, region, elements)
    assert writer._batch.nbytes == times * elements.nbytes
    writer.commit()
    assert writer._batch.writes == []


@pytest.mark.parametrize("shape", [(1000, 1000), (6, 1000)], ids=["large", "small"])
def test_a_chunk_at_the_edge_is_stored_whole_whatever_was_there(tmp_path, shape):
    """TensorStore merges a part of a chunk with what it reads; a file that a power loss cut short cannot be read."""
    array = Array("w", ChunkGrid(shape, (shape[0] // 2 + 1, 700)), "float32", NO_CODEC)
    region = array.grid.region((1, 1))
    elements = np.random.default_rng(0).random(region.shape, "f4")
    file = tmp_path / "w/c/1/1"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"cut short")
    writer = TensorStoreWriter("zarr", LocalFolder(tmp_path), 0, max_pending_nbytes=1 << 30)
    writer.write(array, region, elements, is_kept=True)
    writer.commit()
    stored = np.fromfile(file, "f4").reshape(array.grid.chunk_shape)
    np.testing.assert_array_equal(stored[: region.shape[0], : region.shape[1]], elements)
    assert np.count_nonzero(stored) == np.count_nonzero(elements)


def test_padded_chunks_count_as_waiting_and_are_not_copied(tmp_path):
    array = Array("w", ChunkGrid((1000, 1000), (700, 700)), "float32", NO_CODEC)
    region = array.grid.region((1, 1))
    writer = TensorStoreWriter("ocdbt", LocalFolder(tmp_path), 0, is_durable=False, max_pending_nbytes=1 << 30)
    writer.write(array, region, np.ones(region.shape, "f4"), is_kept=True)
    assert writer._batch.nbytes == 4 * 700 * 700
    writer.commit()


def test_files_of_a_batch_are_settled_after_the_next_one(tmp_path):
    settled = []

    class Watched(LocalFolder):
        def settle(self, names):
            settled.append(list(names))

    row = Array("w", ChunkGrid((1024, 4096), (1024, 512)), "float32", NO_CODEC)
    writer = TensorStoreWriter("ocdbt", Watched(tmp_path), 0, is_cached=False, max_pending_nbytes=4 << 20)
    for start in range(0, 3584, 512):
        writer.write(row, Region((0, start), (1024, 512)), np.ones((1024, 512), "f4"))
    writer.commit()
    names = [name for batch in settled for name in batch]
    assert len(settled) == 4, "one for each batch of two chunks, and one for the last chunk"
    assert settled[0] == []
    assert all(settled[1:])
    assert len(names) == len(set(names))
    assert set(names) < {f"d/{name}" for name in os.listdir(tmp_path / "client_0" / "d")}
