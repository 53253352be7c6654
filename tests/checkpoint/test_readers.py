"""Checkpoints opened by other programs: nothing of dtckpt is used to read here."""

import json

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from states import packed

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.format.codecs import CODECS

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
    from dtckpt.format.dtypes import DTYPES

    tree = {name: torch.ones(3).to(getattr(torch, name)) for name in DTYPES}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore="zarr"))
    for name in DTYPES:
        array = ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/s/{name}/"}, read=True).result()
        assert array.dtype.name == name
        assert array.read().result().astype(np.complex128).tolist() == [1, 1, 1]
        assert json.loads((tmp_path / "s" / name / "zarr.json").read_text())["data_type"] == name
