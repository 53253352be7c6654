"""Models of transformers in several files of ``torch.save``: read by their index, and no part alone."""

import json
from collections import OrderedDict

import fsspec
import pytest
import torch

import dtckpt
from dtckpt import errors

TENSORS = {"a.w": torch.ones(2, 3), "b.w": torch.arange(4), "c": torch.zeros(0), "d": torch.tensor(1.5)}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    names, weight_map = list(TENSORS), {}
    for number in range(2):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        part = names[number::2]
        # A state dict of a module is an OrderedDict.
        torch.save((dict, OrderedDict)[number]((name, TENSORS[name]) for name in part), path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 60}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


def same(restored):
    return restored.keys() == TENSORS.keys() and all(map(torch.equal, restored.values(), map(TENSORS.get, restored)))


def test_by_the_directory_and_by_the_index(folder, tmp_path):
    assert same(dtckpt.restore(folder))
    assert same(dtckpt.restore(folder / "pytorch_model.bin.index.json"))
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert (checkpoint.format, checkpoint.unread) == ("torch", ())
        assert checkpoint.verify().is_sound
    dtckpt.convert(folder, tmp_path / "new.safetensors")
    assert same(dtckpt.restore(tmp_path / "new.safetensors"))
    for file in folder.iterdir():
        with fsspec.open(f"memory://parts/{file.name}", "wb") as copy:
            copy.write(file.read_bytes())
    assert same(dtckpt.restore("memory://parts"))


def test_a_part_alone_or_missing(folder):
    parts = sorted(folder.glob("*.bin"))
    with pytest.raises(
        errors.CheckpointIncompleteError, match=r"part 1 of 2 .* the index pytorch_model.bin.index.json"
    ):
        dtckpt.restore(parts[0])
    parts[1].unlink()
    with pytest.raises(errors.CheckpointCorruptError, match=f"{parts[1].name} is missing"):
        dtckpt.restore(folder)


def test_an_index_that_does_not_fit(folder):
    (folder / "config.json").write_text("{}")
    index = folder / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["other"] = "pytorch_model-00001-of-00002.bin"
    content["metadata"]["step"] = 3
    index.write_text(json.dumps(content))
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert list(checkpoint.refused) == ["other"]
        assert checkpoint.unread == ("config.json", f"{index.name}: metadata/step")
    torch.save({"a.w": torch.zeros(1)}, folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(errors.CheckpointCorruptError, match=r"'a.w' is in two files"):
        dtckpt.open_checkpoint(folder)
    torch.save(torch.zeros(1), folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(errors.CheckpointCorruptError, match="holds no dict of tensors"):
        dtckpt.open_checkpoint(folder)
    (folder / "other.bin.index.json").write_text("{}")
    with pytest.raises(errors.CheckpointCorruptError, match="holds several models"):
        dtckpt.open_checkpoint(folder)
