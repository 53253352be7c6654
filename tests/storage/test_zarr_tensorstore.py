"""`TensorStoreWriter`: what it holds in memory."""

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
