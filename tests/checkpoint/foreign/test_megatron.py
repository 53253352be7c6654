"""Distributed checkpoints of Megatron-Core: checkpoints of four versions, and their metadata."""

import json
import pickle
import shutil

import fsspec
import pytest
import torch

import dtckpt
from dtckpt import errors
from dtckpt.checkpoint.foreign.pickle_syntax import Pairs, PickledCall, parse_pickle
from dtckpt.cli.main import main

from .sample_files import expected, read_all

STEPS = {
    **{f"megatron_versions/v{version}": "iter_0000007" for version in ("0.13.1", "0.15.3", "0.19.0")},
    **{f"megatron/{name}": "iter_0000005" for name in ("tp2pp1_swiglu", "tp2pp2_hetero_bf16")},
}


@pytest.mark.parametrize("name", STEPS)
def test_all_tensors_are_those_that_were_saved(peers, name):
    """In 0.13 and 0.15 the optimizer's are flattened, and Megatron's notes have their shapes."""
    found = read_all(peers / name / STEPS[name])
    for key, fact in expected(peers, name).items():
        assert found[key] == fact, key


@pytest.mark.parametrize("name", STEPS)
def test_every_command_takes_it(peers, name, tmp_path):
    path = peers / name / STEPS[name]
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert not checkpoint.refused
        assert not checkpoint.unread
        assert checkpoint.verify().is_sound
    dtckpt.convert(path, tmp_path / "ours")
    assert main(["diff", str(path), str(tmp_path / "ours"), "--values"]) == 0
    assert main(["inspect", str(path)]) == 0
    assert read_all(tmp_path / "ours") == read_all(path)


@pytest.mark.parametrize("name", STEPS)
def test_the_common_state_is_at_the_top(peers, name):
    """In ``common.pt`` of older versions, in an item of 0.19."""
    restored = dtckpt.restore(peers / name / STEPS[name])
    assert restored["iteration"] == int(STEPS[name][-1])
    assert restored["checkpoint_version"] == 3.0
    assert restored["args"].tensor_model_parallel_size == 2
    assert "common_state/shard_0_1" not in restored


def test_a_flattened_tensor_is_read_by_regions(peers):
    path = peers / "megatron_versions/v0.13.1/iter_0000007"
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    with dtckpt.open_checkpoint(path) as checkpoint:
        whole = checkpoint.read(name)
        for offset, shape in (((0, 1, 2), (2, 3, 5)), ((1, 5, 7), (1, 1, 1)), ((0, 0, 3), (1, 6, 2))):
            region = dtckpt.Region(offset, shape)
            assert torch.equal(checkpoint.read(name, region), whole[region.slices()])


def test_notes(peers):
    with dtckpt.open_checkpoint(peers / "megatron/tp2pp2_hetero_bf16/iter_0000005") as checkpoint:
        texts = "\n".join(checkpoint.notes)
    assert "flat buffers of Megatron's distributed optimizer (dp_reshardable)" in texts
    assert "embedding.word_embeddings.weight: 16 rows are the vocabulary as Megatron padded it" in texts


def test_the_folder_of_a_run_stands_for_its_newest_step(peers, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(peers / "megatron/tp2pp1_swiglu", run)
    assert read_all(run) == read_all(run / "iter_0000005")
    (run / "latest_checkpointed_iteration.txt").write_text("../x")
    with pytest.raises(errors.CheckpointNotFoundError):
        dtckpt.open_checkpoint(run)
    # NeMo's folder.
    (tmp_path / "nemo").mkdir()
    (run / "iter_0000005").rename(tmp_path / "nemo/weights")
    assert dtckpt.restore(tmp_path / "nemo")["iteration"] == 5


def test_where_directories_are_not_listed(peers):
    run = peers / "megatron/tp2pp1_swiglu"
    for file in (file for file in run.rglob("*") if file.is_file()):
        with fsspec.open(f"memory://megatron/{file.relative_to(run)}", "wb") as copy:
            copy.write(file.read_bytes())
    assert read_all("memory://megatron") == read_all(run)


@pytest.mark.parametrize("change", [{"sharded_backend": "zarr"}, {"sharded_backend_version": 2}])
def test_formats_that_are_not_known_are_refused_by_name_and_number(peers, tmp_path, change):
    shutil.copytree(peers / "megatron_versions/v0.19.0/iter_0000007", tmp_path / "step")
    facts = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"} | change
    (tmp_path / "step/metadata.json").write_text(json.dumps(facts))
    with pytest.raises(errors.CheckpointVersionError, match=rf"names format '{facts['sharded_backend']}' of version"):
        dtckpt.open_checkpoint(tmp_path / "step")


def test_a_missing_file_is_named_with_its_regions(peers, tmp_path):
    shutil.copytree(peers / "megatron/tp2pp1_swiglu/iter_0000005", tmp_path / "step")
    (tmp_path / "step/__1_0.distcp").unlink()
    match = r"__1_0\.distcp is missing or cut short: .* bytes, with \S+ \[[0-9:, ]+\], .* and more"
    with pytest.raises(errors.CheckpointCorruptError, match=match):
        dtckpt.open_checkpoint(tmp_path / "step")


def test_a_shape_that_does_not_fit_is_an_error(peers, tmp_path):
    """Never a wrong shape: a tensor is stored in blocks that fill its shape, or the checkpoint is damaged."""
    step = tmp_path / "step"
    shutil.copytree(peers / "megatron_versions/v0.13.1/iter_0000007", step)
    data = (step / ".metadata").read_bytes()
    shapes = dict(dict(parse_pickle(data, "x").state)["mcore_data"])
    (key,) = (
        key for key, facts in shapes.items() if Pairs([("nd_reformulated_orig_global_shape", (2, 6, 8))]) == facts
    )
    assert key.endswith("linear_fc2.weight")
    true, wrong = (pickle.dumps(shape, 4)[-8:-1] for shape in ((2, 6, 8), (2, 6, 9)))
    position = data.index(b"K\x02K\x06K\x08", data.index(b"mcore_data"))
    assert len(true) == len(wrong)
    (step / ".metadata").write_bytes(data[:position] + b"K\x02K\x06K\x09" + data[position + 6 :])
    with pytest.raises(
        errors.CheckpointCorruptError, match=r"of shape \(2, 6, 9\) cannot be stored as \(2, 1, 2, 24\)"
    ):
        dtckpt.open_checkpoint(step)
    assert isinstance(parse_pickle(data, "x"), PickledCall)
