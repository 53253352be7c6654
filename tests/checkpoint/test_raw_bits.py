"""Dtypes that Zarr's core specification lacks, described to other readers as integers of the same bits."""

import json

import pytest
import torch
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.cli.main import main
from dtckpt.errors import ConfigError
from dtckpt.format.dtypes import DTYPES, EXTENSIONS, zarr_data_type

MESH = abstract_mesh({"x": 2})
TREE = {name: tensor_of(name, (5, 3), name) for name in DTYPES}
TREE |= {"rounded": torch.arange(10.0), "sharded": packed(TREE["bfloat16"], Layout(["x", "unsharded"], MESH))}


def documents_of(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound
        return {name: json.loads((path / name / "zarr.json").read_text()) for name in checkpoint.tensors}


def digests_of(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        return {
            name: (info.dtype, info.stored_dtype, info.content_digest, [chunk.digest for chunk in info.chunks])
            for name, info in checkpoint.tensors.items()
        }


def raw_bits_of(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound
        return checkpoint.manifest.raw_bits


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_only_the_documents_change(tmp_path, kvstore, codec):
    options = {"kvstore": kvstore, "codec": codec, "stored_dtypes": {"rounded": "bfloat16"}}
    dtckpt.save(tmp_path / "plain", TREE, options=SaveOptions(**options))
    dtckpt.save(tmp_path / "raw", TREE, options=SaveOptions(**options, raw_bits=True))
    assert (raw_bits_of(tmp_path / "plain"), raw_bits_of(tmp_path / "raw")) == (False, True)
    assert digests_of(tmp_path / "raw") == digests_of(tmp_path / "plain")
    plain, raw = dtckpt.restore(tmp_path / "plain"), dtckpt.restore(tmp_path / "raw")
    assert {name: bits_of(tensor) for name, tensor in raw.items()} == {k: bits_of(v) for k, v in plain.items()}
    if kvstore == "zarr":
        for file in (tmp_path / "plain").rglob("c/*"):
            if file.is_file():
                assert file.read_bytes() == (tmp_path / "raw" / file.relative_to(tmp_path / "plain")).read_bytes()


def test_every_document_is_of_zarrs_core(tmp_path):
    dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(kvstore="zarr", raw_bits=True, save_as_bf16=True))
    for name, document in documents_of(tmp_path / "s").items():
        dtype = {"rounded": "float32", "sharded": "bfloat16"}.get(name, name)
        stored = "bfloat16" if dtype == "float32" else dtype
        assert document["data_type"] == zarr_data_type(stored, raw_bits=True)
        ours = document["attributes"]["dtckpt"]
        assert (ours["dtype"], ours.get("stored_dtype", document["data_type"])) == (dtype, stored)


def test_a_new_layout_keeps_it_unless_told_otherwise(tmp_path):
    tree = {name: TREE[name] for name in EXTENSIONS}
    path = tmp_path / "s"
    for raw_bits in (False, True):
        dtckpt.save(path, tree, options=SaveOptions(kvstore="zarr", raw_bits=raw_bits, overwrite=True))
        for asked, expected in {None: raw_bits, False: False, True: True}.items():
            options = SaveOptions(kvstore="zarr", raw_bits=asked, overwrite=True)
            dtckpt.reshard(path, tmp_path / "new", mesh=MESH, options=options)
            assert raw_bits_of(tmp_path / "new") is expected
            contents = [facts[2] for facts in digests_of(path).values()]
            assert [facts[2] for facts in digests_of(tmp_path / "new").values()] == contents
            types = {document["data_type"] for document in documents_of(tmp_path / "new").values()}
            assert types == ({"uint8", "uint16"} if expected else {*EXTENSIONS})


def test_workers_and_the_command_line(tmp_path, capsys):
    dtckpt.save(tmp_path / "s", {"w": TREE["bfloat16"]}, options=SaveOptions(raw_bits=True))
    for worker in (0, 1):
        arguments = ["reshard", tmp_path / "s", tmp_path / "two", "--mesh=x=2", "--workers=2", f"--worker={worker}"]
        assert main([*map(str, arguments), "--format=zarr"]) == 0
    assert documents_of(tmp_path / "two")["w"]["data_type"] == "uint16"
    arguments = ["reshard", str(tmp_path / "two"), str(tmp_path / "plain"), "--mesh=x=1", "--no-raw-bits"]
    assert main(arguments) == 0
    assert (raw_bits_of(tmp_path / "two"), raw_bits_of(tmp_path / "plain")) == (True, False)
    capsys.readouterr()
    for name in ("two", "plain"):
        assert main(["inspect", str(tmp_path / name)]) == 0
        assert ("\nraw bits    bfloat16 and float8 are " in capsys.readouterr().out) is (name == "two")
        assert main(["inspect", "--json", str(tmp_path / name)]) == 0
        assert json.loads(capsys.readouterr().out)["raw_bits"] is (name == "two")


def test_workers_that_disagree_write_nothing_together(tmp_path, capsys):
    dtckpt.save(tmp_path / "s", {"w": TREE["bfloat16"]})
    command = ["reshard", str(tmp_path / "s"), str(tmp_path / "new"), "--mesh=x=2", "--workers=2"]
    assert main([*command, "--worker=0", "--raw-bits"]) == main([*command, "--worker=1", "--no-raw-bits"]) == 0
    assert not (tmp_path / "new").exists()
    assert "waits for 1 part: 0" in capsys.readouterr().out
    assert main([*command, "--worker=1", "--raw-bits"]) == 0
    assert raw_bits_of(tmp_path / "new") is True


def test_a_bad_option():
    with pytest.raises(ConfigError, match="option raw_bits must be True or False; got 1"):
        SaveOptions(raw_bits=1)
