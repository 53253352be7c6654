"""What format 1 wrote is read for ever. A failure here means that users' checkpoints cannot be read any more."""

import json
import shutil

import numpy as np
import pytest
import tensorstore
import torch
from support.states import bits_of

import dtckpt
from checkpoint.golden import BITS, COMPRESSED_NBYTES, ERAS, FOLDER, KVSTORES, LAYOUTS, VALUES, compressed, tensors
from dtckpt import Layout, Region, SaveOptions, abstract_mesh

MESH = abstract_mesh({"z": 3})


@pytest.fixture(params=[f"{era}/{kvstore}" for era in ERAS for kvstore in KVSTORES])
def path(request, tmp_path):
    # A copy, so that nothing can write to the original.
    return shutil.copytree(FOLDER / request.param, tmp_path / request.param)


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
        assert report.damages == ()
        for name, specs in LAYOUTS.items():
            layout = checkpoint.info(name).layout
            assert layout == Layout(specs, layout.mesh)
            assert (layout.mesh.name, dict(layout.mesh.axis_sizes)) == ("train", {"x": 2, "y": 2})
        contents = {name: info.content_digest for name, info in checkpoint.tensors.items()}
        rows = Region((5, 100), (2, 50))
        assert checkpoint.read("model/large", rows).equal(tensors()["model/large"][rows.slices()])
    if "crc64" in str(path):
        # One tensor is empty: there is nothing of it to compare.
        assert report.num_contents == report.num_tensors - 1
        expected = json.loads((FOLDER / "format-1-crc64" / "contents.json").read_text())
        assert contents == {name: int(digits, 16) for name, digits in expected.items()}
    else:
        assert (report.num_contents, set(contents.values())) == (0, {None})


def test_it_is_laid_out_anew(path, tmp_path):
    dtckpt.reshard(path, tmp_path / "new", mesh=MESH, layouts={"model/w": Layout(["z", "unsharded"], MESH)})
    with dtckpt.open_checkpoint(path) as old, dtckpt.open_checkpoint(tmp_path / "new") as new:
        for name, info in old.tensors.items():
            assert info.content_digest in (None, new.info(name).content_digest)


@pytest.mark.parametrize("kvstore", KVSTORES)
@pytest.mark.parametrize("era", ERAS)
def test_rounded_to_bfloat16(era, kvstore):
    restored = dtckpt.restore(FOLDER / era / f"{kvstore}-bf16")["model/rounded"]
    expected = tensors()["model/rounded"].to(torch.bfloat16).to(torch.float32)
    assert restored.dtype == torch.float32
    assert restored.isnan().tolist() == expected.isnan().tolist()
    assert bits_of(restored[[0, 1, 3]]) == bits_of(expected[[0, 1, 3]])


# --- chunks of Blosc whose bits were shuffled -----------------------------------------------------------------------


@pytest.fixture(params=KVSTORES)
def bits(request, tmp_path):
    return shutil.copytree(FOLDER / BITS / request.param, tmp_path / "run" / "step_00000001")


def is_compressed(path):
    restored = dtckpt.restore(path)
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound
    return all(restored[name].equal(tensor) for name, tensor in compressed().items())


def test_shuffled_bits_are_read(bits, tmp_path):
    assert is_compressed(bits)
    dtckpt.reshard(bits, tmp_path / "new", mesh=MESH)
    assert is_compressed(tmp_path / "new")
    dtckpt.copy(bits, tmp_path / "copy" / bits.name)
    assert is_compressed(tmp_path / "copy" / bits.name)
    (largest,) = sorted(bits.rglob("*"), key=lambda file: file.stat().st_size * file.is_file())[-1:]
    largest.write_bytes(largest.read_bytes()[:-9] + b"damaged..")
    assert dtckpt.scrub(bits.parent, source=tmp_path / "copy").is_sound
    assert is_compressed(bits)


def test_a_save_shares_chunks_of_shuffled_bits(bits, tmp_path):
    """Then the settings in the document differ from the settings that the chunk tells."""
    kvstore = "zarr" if (bits / "zarr.json").exists() else "ocdbt"
    options = SaveOptions(kvstore=kvstore, codec="blosc", chunk_nbytes=COMPRESSED_NBYTES)
    tree = {**compressed(), "more": torch.ones(3)}
    report = dtckpt.save(tmp_path / "s", tree, options=options, base=bits)
    assert report.nbytes_reused > 0.9 * report.nbytes
    if kvstore == "zarr":
        assert '"shuffle": "shuffle"' in (tmp_path / "s/bfloat16/zarr.json").read_text()
        assert (tmp_path / "s/bfloat16/c/0/0").read_bytes()[2] & 0b101 == 0b100  # flags of a chunk: bits, not bytes
    assert is_compressed(tmp_path / "s")
    base = f"file://{tmp_path}/s/"
    for name, tensor in compressed().items():
        where = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if kvstore == "ocdbt" else f"{base}{name}/"
        found = tensorstore.open({"driver": "zarr3", "kvstore": where}, read=True).result().read().result()
        np.testing.assert_array_equal(found.view(np.uint8), tensor.view(torch.uint8).numpy())
