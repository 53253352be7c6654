"""What format 1 wrote is read for ever. A failure here means that users' checkpoints cannot be read any more."""

import json
import shutil

import pytest
import torch
from states import bits_of

import dtckpt
from dtckpt import Layout, Region, abstract_mesh

from .golden import FOLDER, KVSTORES, LAYOUTS, VALUES, tensors

MESH = abstract_mesh({"z": 3})


@pytest.fixture(params=KVSTORES)
def path(request, tmp_path):
    # A copy, so that nothing can write to the original.
    return shutil.copytree(FOLDER / "format-1" / request.param, tmp_path / "s")


def test_every_tensor_and_value_is_what_it_was(path):
    expected = {name: whole for name, whole in tensors().items() if name != "model/rounded"}
    restored = dtckpt.restore(path)
    assert {key: restored[key] for key in VALUES} == VALUES
    assert set(restored) == {*expected, *VALUES}
    for name, whole in expected.items():
        assert (restored[name].dtype, bits_of(restored[name])) == (whole.dtype, bits_of(whole)), name


def test_layouts_contents_and_digests(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.manifest.format_version == 1
        report = checkpoint.verify()
        # One tensor is empty: there is nothing of it to compare.
        assert (report.damages, report.num_contents) == ((), report.num_tensors - 1)
        for name, specs in LAYOUTS.items():
            layout = checkpoint.info(name).layout
            assert layout == Layout(specs, layout.mesh)
            assert (layout.mesh.name, dict(layout.mesh.axis_sizes)) == ("train", {"x": 2, "y": 2})
        contents = {name: f"{info.content_digest:016x}" for name, info in checkpoint.tensors.items()}
        rows = Region((5, 100), (2, 50))
        assert checkpoint.read("model/large", rows).equal(tensors()["model/large"][rows.slices()])
    assert contents == json.loads((FOLDER / "format-1" / "contents.json").read_text())


def test_it_is_laid_out_anew(path, tmp_path):
    dtckpt.reshard(path, tmp_path / "new", mesh=MESH, layouts={"model/w": Layout(["z", "unsharded"], MESH)})
    with dtckpt.open_checkpoint(path) as old, dtckpt.open_checkpoint(tmp_path / "new") as new:
        assert {name: info.content_digest for name, info in old.tensors.items()} == {
            name: info.content_digest for name, info in new.tensors.items()
        }


@pytest.mark.parametrize("kvstore", KVSTORES)
def test_rounded_to_bfloat16(kvstore):
    restored = dtckpt.restore(FOLDER / "format-1" / f"{kvstore}-bf16")["model/rounded"]
    expected = tensors()["model/rounded"].to(torch.bfloat16).to(torch.float32)
    assert restored.dtype == torch.float32
    assert restored.isnan().tolist() == expected.isnan().tolist()
    assert bits_of(restored[[0, 1, 3]]) == bits_of(expected[[0, 1, 3]])
