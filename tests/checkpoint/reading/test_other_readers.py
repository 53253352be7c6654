"""Checkpoints opened by other programs: nothing of dtckpt is used to read here."""

import json

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from support.states import packed

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.format.codecs import CODECS
from dtckpt.format.dtypes import DTYPES

BITS = {"float4_e2m1fn_x2": np.uint8, "complex32": np.uint32}

MESH = abstract_mesh({"x": 2, "y": 2})
TREE = {
    "layer": {"w": torch.arange(50 * 6, dtype=torch.float32).reshape(50, 6), "w/m": torch.arange(7) - 3},
    "step": torch.tensor(12),
    "none": torch.zeros(0, 3),
    "zeros": torch.zeros(40, 40),
    "n": 5,
}


def saved(tmp_path, kvstore, codec=None):
    tree = {
        **TREE,
        "layer": {**TREE["layer"], "w": packed(TREE["layer"]["w"], Layout([("y", "x"), "unsharded"], MESH))},
    }
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore, codec=codec, chunk_nbytes=128))
    return tmp_path / "s"


PATHS = {"layer/w/%self": TREE["layer"]["w"], "layer/w/m": TREE["layer"]["w/m"], "step": TREE["step"]}
PATHS |= {"none": TREE["none"], "zeros": TREE["zeros"]}


@pytest.mark.filterwarnings("ignore:Object at dtckpt.manifest is not recognized")
@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_opens_the_zarr_kind(tmp_path, codec):
    root = zarr.open_group(saved(tmp_path, "zarr", codec), mode="r")
    assert sorted(root.keys()) == ["layer", "none", "step", "zeros"]
    assert sorted(root["layer/w"].keys()) == ["%self", "m"]
    for path, tensor in PATHS.items():
        array = root[path]
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array[...], tensor.numpy())
    assert root["layer/w/%self"].attrs["dtckpt"]["sharding_specs"] == [["y", "x"], "unsharded"]
    assert root["layer/w/%self"].attrs["dtckpt"]["name"] == "layer/w"


NOISE = {name: torch.randn(700, 500).to(getattr(torch, name)) for name in ("float16", "float32", "float64", "bfloat16")}
"""Chunks of more than one block of Blosc."""


@pytest.mark.filterwarnings("ignore:Object at dtckpt.manifest is not recognized")
@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_opens_large_chunks(tmp_path, codec):
    dtckpt.save(tmp_path / "s", NOISE, options=SaveOptions(kvstore="zarr", codec=codec, raw_bits=True))
    root = zarr.open_group(tmp_path / "s", mode="r")
    for name, tensor in NOISE.items():
        found = root[name][...]
        np.testing.assert_array_equal(found.view(np.uint8), tensor.view(torch.uint8).numpy())


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("codec", CODECS)
def test_tensorstore_opens_large_chunks(tmp_path, kvstore, codec):
    dtckpt.save(tmp_path / "s", NOISE, options=SaveOptions(kvstore=kvstore, codec=codec))
    for name, tensor in NOISE.items():
        base = f"file://{tmp_path}/s/"
        where = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if kvstore == "ocdbt" else f"{base}{name}/"
        found = ts.open({"driver": "zarr3", "kvstore": where}, read=True).result().read().result()
        np.testing.assert_array_equal(found.view(np.uint8), tensor.view(torch.uint8).numpy())


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("codec", CODECS)
def test_tensorstore_opens_both_kinds(tmp_path, kvstore, codec):
    base = f"file://{saved(tmp_path, kvstore, codec)}/"
    for path, tensor in PATHS.items():
        where = (
            {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            if kvstore == "ocdbt"
            else f"{base}{path.replace('%', '%25')}/"
        )
        array = ts.open({"driver": "zarr3", "kvstore": where}, read=True).result()
        assert tuple(array.shape) == tuple(tensor.shape)
        named = [each["name"] for each in array.spec().to_json()["metadata"]["codecs"]]
        assert named == ["bytes", *([] if codec == "none" else [codec])]
        np.testing.assert_array_equal(array.read().result(), tensor.numpy())


def test_every_dtype_is_a_zarr_data_type(tmp_path):
    names = [name for name in DTYPES if name not in BITS]
    tree = {name: torch.ones(3).to(getattr(torch, name)) for name in names}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore="zarr"))
    for name in names:
        array = ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/s/{name}/"}, read=True).result()
        assert array.dtype.name == name
        assert array.read().result().astype(np.complex128).tolist() == [1, 1, 1]
        assert json.loads((tmp_path / "s" / name / "zarr.json").read_text())["data_type"] == name


@pytest.mark.filterwarnings("ignore:Object at dtckpt.manifest is not recognized")
def test_the_bits_of_other_dtypes_are_integers(tmp_path):
    pair = torch.tensor([0x2F, 0x40], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)  # -6 and 1, 0 and 2
    half = torch.tensor([1.5, -2.0], dtype=torch.float16).view(torch.complex32)
    dtckpt.save(tmp_path / "s", {"pair": pair, "half": half}, options=SaveOptions(kvstore="zarr"))
    root = zarr.open_group(tmp_path / "s", mode="r")
    for name, tensor in {"pair": pair, "half": half}.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert (root[name].dtype, root[name].attrs["dtckpt"]["dtype"]) == (BITS[dtype], dtype)
    packed_pairs = root["pair"][...]
    numbers = np.stack([packed_pairs & 15, packed_pairs >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
    assert numbers.astype(np.float32).tolist() == [[-6, 1], [0, 2]]
    assert root["half"][...].view(np.float16).tolist() == [1.5, -2]
