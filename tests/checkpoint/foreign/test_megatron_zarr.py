"""Megatron's checkpoints of the kind ``zarr``, written by its rules: an array for each tensor, and ``common.pt``."""

import json
import shutil

import fsspec
import numpy as np
import pytest
import torch

import dtckpt
from dtckpt import errors
from dtckpt.cli.main import main

from .sample_files import read_all

WEIGHTS = "decoder.layers.mlp.linear_fc1.weight"


def write_array(folder, name, elements, chunks, dtype=None, **changes):
    """Write an array in whole chunks, of which those at the edge are padded."""
    (folder / name).mkdir(parents=True)
    shape = elements.shape
    document = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": dtype or elements.dtype.str,
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
    }
    (folder / name / ".zarray").write_text(json.dumps(document | changes))
    padding = [(0, -size % chunk) for size, chunk in zip(shape, chunks, strict=True)]
    padded = np.pad(elements, padding, mode="edge") if padding else elements
    for index in np.ndindex(*(size // chunk for size, chunk in zip(padded.shape, chunks, strict=True))):
        box = tuple(slice(at * chunk, (at + 1) * chunk) for at, chunk in zip(index, chunks, strict=True))
        (folder / name / (".".join(map(str, index)) or "0")).write_bytes(padded[box].tobytes())


@pytest.fixture
def step(tmp_path):
    folder = tmp_path / "run" / "iter_0000007"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    write_array(folder, WEIGHTS, np.arange(60, dtype="<f4").reshape(2, 5, 6), (1, 2, 3))
    bits = torch.arange(12).bfloat16().view(torch.int16).numpy().reshape(3, 4)
    write_array(folder, "output_layer.weight", bits, (2, 4), "bfloat16")
    write_array(folder, "optimizer.state.exp_avg.x", np.full((), 2.5, "<f4"), ())
    (folder / "rng_state").mkdir()
    for rank in range(2):
        torch.save(
            [{"seed": rank, "torch_rng_state": torch.tensor([rank])}], folder / f"rng_state/shard_0.{rank}_1.2.pt"
        )
    (folder / f"{WEIGHTS}.sync").mkdir()
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    return folder


def test_tensors_values_and_sharded_objects(step):
    restored = dtckpt.restore(step.parent)
    assert torch.equal(restored[WEIGHTS], torch.arange(60.0).reshape(2, 5, 6))
    assert torch.equal(restored["output_layer.weight"], torch.arange(12).bfloat16().reshape(3, 4))
    assert restored["optimizer.state.exp_avg.x"] == 2.5
    assert (restored["iteration"], restored["rng_state/shard_0.1_1.2"][0]["seed"]) == (7, 1)
    with dtckpt.open_checkpoint(step) as checkpoint:
        assert checkpoint.format == "megatron"
        assert (dict(checkpoint.refused), checkpoint.unread) == ({}, ())
        region = dtckpt.Region((1, 1, 2), (1, 3, 3))
        assert torch.equal(checkpoint.read(WEIGHTS, region), restored[WEIGHTS][region.slices()])


def test_every_command_takes_it(step, tmp_path):
    dtckpt.convert(step, tmp_path / "ours")
    assert main(["diff", str(step), str(tmp_path / "ours"), "--values"]) == 0
    assert main(["inspect", str(step)]) == 0
    assert main(["verify", str(step)]) == 0
    assert read_all(tmp_path / "ours") == read_all(step)


def test_where_directories_are_not_listed(step):
    for file in (file for file in step.rglob("*") if file.is_file()):
        with fsspec.open(f"memory://megatron_zarr/{file.relative_to(step)}", "wb") as copy:
            copy.write(file.read_bytes())
    assert read_all("memory://megatron_zarr") == read_all(step)


def test_a_missing_chunk_is_named_with_its_region(step):
    (step / WEIGHTS / "1.2.0").unlink()
    match = r"linear_fc1.weight' are missing: .*/1\.2\.0 with \[1:2, 4:5, 0:3\]"
    with pytest.raises(errors.CheckpointCorruptError, match=match):
        dtckpt.open_checkpoint(step)


def test_other_files_are_named(step):
    (step / WEIGHTS / "9.9.9").write_bytes(b"x")
    (step / "odd").mkdir()
    with dtckpt.open_checkpoint(step) as checkpoint:
        assert checkpoint.unread == (f"{WEIGHTS}/9.9.9",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"zarr_format": 3}, "got 3 as zarr_format"), ({"compressor": {"id": "blosc"}}, "got 'blosc' as compressor")],
)
def test_arrays_that_are_not_known_are_refused_by_name(step, changes, reason):
    shutil.rmtree(step / "output_layer.weight")
    write_array(step, "output_layer.weight", np.zeros((3, 4), "<f4"), (2, 4), **changes)
    with dtckpt.open_checkpoint(step) as checkpoint:
        assert checkpoint.read(WEIGHTS).shape == (2, 5, 6)
        with pytest.raises(errors.CheckpointVersionError, match=reason):
            checkpoint.read("output_layer.weight")


@pytest.mark.parametrize("change", [{"sharded_backend": "other"}, {"sharded_backend_version": 2}])
def test_formats_that_are_not_known_are_refused_by_name_and_number(step, change):
    facts = {"sharded_backend": "zarr", "sharded_backend_version": 1} | change
    (step / "metadata.json").write_text(json.dumps(facts))
    with pytest.raises(errors.CheckpointVersionError, match=r"expected 'zarr' of version 1"):
        dtckpt.open_checkpoint(step)


def test_a_document_may_not_claim_more_chunks_than_there_are_files(step):
    document = json.loads((step / WEIGHTS / ".zarray").read_text()) | {"shape": [1, 1, 200_000], "chunks": [1, 1, 1]}
    (step / WEIGHTS / ".zarray").write_text(json.dumps(document))
    with pytest.raises(errors.CheckpointCorruptError, match="are missing"):
        dtckpt.open_checkpoint(step)
