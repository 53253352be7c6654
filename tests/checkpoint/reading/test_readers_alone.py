"""Checkpoints opened by other programs, each in a process that has neither dtckpt nor torch."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from support.states import packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.format.dtypes import DTYPES, EXTENSIONS, zarr_data_type

from . import other_readers

MESH = abstract_mesh({"x": 2, "y": 2})
WHOLE = torch.arange(50 * 6, dtype=torch.float32).reshape(50, 6)
TENSORS = {"top": torch.arange(5), "layer/w": WHOLE, "layer/b": torch.arange(7) > 3, "layer/deep/w": torch.ones(3, 4)}
TENSORS |= {"scalar": torch.tensor(2.5), "layer/half": torch.arange(6.0).half()}
"""Tensors of Zarr's core types, of such names and shapes that the names of dims could clash."""
LOW = {f"low/{name}": tensor_of(name, (4, 3), name) for name in EXTENSIONS}


def save(path, tensors, **options):
    tree = {}
    for name, tensor in tensors.items():
        *folders, last = name.split("/")
        folder = tree
        for each in folders:
            folder = folder.setdefault(each, {})
        folder[last] = tensor
    tree["layer"]["w"] = packed(WHOLE, Layout([("y", "x"), "unsharded"], MESH))
    dtckpt.save(path, tree, options=SaveOptions(chunk_nbytes=128, **options))


def read(reader, path, names):
    command = [sys.executable, other_readers.__file__, reader, str(path), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected(tensors, *, raw_bits=False):
    found = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        found[name] = [zarr_data_type(dtype, raw_bits=raw_bits), list(tensor.shape), data]
    return found


@pytest.mark.share(3, of="readers alone")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_tensorstore(tmp_path, kvstore):
    tensors = TENSORS | LOW
    save(tmp_path / "s", tensors, kvstore=kvstore, codec="zstd" if kvstore == "ocdbt" else None)
    assert read("tensorstore", tmp_path / "s", tensors) == expected(tensors)


@pytest.mark.share(3, of="readers alone")
@pytest.mark.parametrize("reader", ["zarr", "xarray"])
def test_a_group_with_raw_bits(tmp_path, reader):
    tensors = TENSORS | LOW | {f"low/{name}": tensor_of(name, (5,), name) for name in DTYPES if name not in EXTENSIONS}
    save(tmp_path / "s", tensors, kvstore="zarr", codec="zstd", raw_bits=True)
    assert read(reader, tmp_path / "s", tensors) == expected(tensors, raw_bits=True)


def test_without_raw_bits_one_dtype_hides_its_group(tmp_path):
    """What the option is for; once this fails, zarr-python knows the types, and the docs need a word less."""
    save(tmp_path / "s", TENSORS | LOW, kvstore="zarr")
    with pytest.raises(AssertionError, match="No Zarr data type found"):
        read("zarr", tmp_path / "s", LOW)


@pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="pip install orbax-checkpoint")
@pytest.mark.share(3, of="readers alone")
def test_orbax(tmp_path):
    tensors = TENSORS | LOW
    save(tmp_path / "s", tensors)
    assert read("orbax", tmp_path / "s", tensors) == expected(tensors)
