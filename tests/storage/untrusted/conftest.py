"""Checkpoints to tamper with, and data that decompresses to far more."""

import struct

import numcodecs
import numpy as np
import pytest
import torch

import dtckpt
from dtckpt import SaveOptions

from .untrusted_checkpoints import ELEMENTS


@pytest.fixture(params=["ocdbt", "zarr"])
def kvstore(request):
    return request.param


@pytest.fixture
def saved(tmp_path, kvstore):
    """A checkpoint with chunks of several blocks, small chunks, and values."""
    tree = {"w": torch.arange(300_000, dtype=torch.float32), "small": ELEMENTS, "tiny": torch.ones(3), "step": 7}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore, fsync=False))
    return tmp_path / "s"


BOMB_NBYTES = (2 << 30) - (1 << 20)


@pytest.fixture(scope="session")
def bombs():
    """Data of a few KB or MB that decompresses to 2 GB, by codec."""
    blosc = numcodecs.blosc.compress(bytes(1 << 20), b"zstd", 9, 2)
    # Blosc takes as much memory as the header states, and then fails.
    stated = blosc[:4] + struct.pack("<I", BOMB_NBYTES) + blosc[8:]
    zeros = np.zeros(BOMB_NBYTES, np.uint8)
    return {
        "zstd": numcodecs.zstd.compress(zeros.data, 3),
        "blosc": numcodecs.blosc.compress(zeros.data, b"lz4", 1, 0),
        "stated": stated,
    }
