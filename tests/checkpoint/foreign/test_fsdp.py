"""What FSDP1 writes: sharded by torch.distributed.checkpoint, whole, and one file for each process."""

import json
import math
import shutil

import pytest
import torch

import dtckpt
from dtckpt import errors
from dtckpt.checkpoint.foreign.fsdp_fields import starts_in_flat
from dtckpt.cli.main import main

from .sample_files import expected, facts, read_all

TEMPLATE = {
    "embed.weight": [7, 5],
    "blocks.0.weight": [6, 5],
    "blocks.0.bias": [6],
    "blocks.1.weight": [5, 6],
    "blocks.1.bias": [5],
    "head.weight": [7, 5],
}
FLATS = ("_flat_param", "blocks.0._flat_param", "blocks.1._flat_param")
KINDS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def folder(peers, tmp_path):
    return shutil.copytree(peers / "fsdp/fsdp1_flat_2", tmp_path / "local")


def test_sharded_by_torch_distributed_checkpoint(peers):
    found = read_all(peers / "fsdp/fsdp1_orig_2/sharded")
    for name, fact in expected(peers, "fsdp/fsdp1_orig_2").items():
        assert found[name.replace("optim/", "optim/state/")] == fact, name


def test_whole(tmp_path):
    """``FULL_STATE_DICT``: a plain file, whose optimizer state has the parameters' names."""
    state = {"w": {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}
    full = {"model": {"w": torch.arange(2.0)}, "optim": {"state": state, "param_groups": [{"params": ["w"]}]}}
    torch.save(full, tmp_path / "full.pt")
    restored = dtckpt.restore(tmp_path / "full.pt")
    assert torch.equal(restored["optim"]["state"]["w"]["exp_avg"], torch.ones(2))


def test_flat_parameters_are_vectors_without_a_template(peers, folder):
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert (dict(checkpoint.refused), checkpoint.unread) == ({}, ())
        assert "names and shapes are in no file" in checkpoint.notes[0]
        starts = dict.fromkeys(FLATS, 0)
        for rank in range(2):
            own = expected(peers, f"fsdp/fsdp1_flat_2_rank{rank}")
            for number, name in enumerate(FLATS):
                (size,) = own[name][0]
                region = dtckpt.Region((starts[name],), (size,))
                assert facts(checkpoint.read(f"module/{name}", region)) == own[name]
                for kind in KINDS:
                    if own[f"optim/{number}/{kind}"][0] == [size]:  # else its vector is padded
                        moment = checkpoint.read(f"optimizer/state/{name}/{kind}", region)
                        assert facts(moment) == own[f"optim/{number}/{kind}"]
                starts[name] += size
            assert facts(checkpoint.read("module/seen")) == own["seen"]
        assert list(starts.values()) == [math.prod(checkpoint.tensors[f"module/{name}"].shape) for name in FLATS]


def test_a_template_gives_parameters_and_moments_their_names(folder):
    flat = dtckpt.restore(folder)
    (folder / "template.json").write_text(json.dumps(TEMPLATE))
    restored = dtckpt.restore(folder)
    assert list(restored["module"]) == ["embed.weight", "head.weight", *list(TEMPLATE)[1:5], "seen"]
    assert restored["optimizer"]["param_groups"][0]["params"] == list(restored["module"])[:-1]
    states = {name: flat["optimizer"]["state"][name] for name in FLATS}
    for name, shape in TEMPLATE.items():
        owner = name[: len("blocks.0.")] if name.startswith("blocks") else ""
        whole = f"{owner}_flat_param"
        own = [each for each in TEMPLATE if each.startswith("blocks") == bool(owner) and each.startswith(owner)]
        start = sum(math.prod(TEMPLATE[each]) for each in own[: own.index(name)])
        part = slice(start, start + math.prod(shape))
        assert torch.equal(restored["module"][name], flat["module"][whole][part].reshape(shape))
        for kind in KINDS:
            moment = states[whole][kind][part].reshape(shape)
            assert torch.equal(restored["optimizer"]["state"][name][kind], moment)
        assert restored["optimizer"]["state"][name]["step"] == 2


def test_every_command_takes_it(folder, tmp_path):
    (folder / "template.json").write_text(json.dumps(TEMPLATE))
    dtckpt.convert(folder, tmp_path / "ours")
    assert main(["diff", str(folder), str(tmp_path / "ours"), "--values"]) == 0
    assert main(["inspect", str(folder)]) == 0
    assert main(["verify", str(folder)]) == 0
    assert read_all(tmp_path / "ours") == read_all(folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({**TEMPLATE, "head.weight": [7, 6]}, "'_flat_param' has 70 elements, .* have 77"),
        ({"embed.weight": [70]}, r"'blocks.0._flat_param' has 36 elements"),
        ([1], "is no template"),
        ({"w": "abc"}, "is no template"),
        ({"w": [-1]}, "is no template"),
    ],
)
def test_a_template_that_does_not_fit_is_an_error(folder, template, reason):
    (folder / "template.json").write_text(json.dumps(template))
    with pytest.raises(errors.CheckpointCorruptError, match=reason):
        dtckpt.open_checkpoint(folder)


def test_parameters_that_begin_at_16_bytes():
    """As with ``use_orig_params=True``."""
    template = {"a": (3,), "b": (2, 2), "c": (1,)}
    assert starts_in_flat({"_flat_param": (9, "float32")}, template, 2) == {"_flat_param": {"a": 0, "b": 4, "c": 8}}
    assert starts_in_flat({"_flat_param": (10, "float32")}, template, 2) == {"_flat_param": {"a": 0, "b": 4, "c": 8}}
    assert starts_in_flat({"_flat_param": (8, "float32")}, template, 2) == {"_flat_param": {"a": 0, "b": 3, "c": 7}}


def test_a_missing_file_is_named_with_its_regions(folder):
    (folder / "local_rank1.pt").unlink()
    lost = r"_flat_param \[35:70\], blocks.0._flat_param \[18:36\], blocks.1._flat_param \[18:35\]"
    with pytest.raises(errors.CheckpointCorruptError, match=rf"process 1 of 2 is missing .*; it held {lost}"):
        dtckpt.open_checkpoint(folder)


def test_a_file_twice_is_an_error(folder):
    shutil.copy(folder / "local_rank0.pt", folder / "local_rank1.pt")
    with pytest.raises(errors.CheckpointCorruptError, match="expected one that no other file is of"):
        dtckpt.open_checkpoint(folder)


def test_a_file_alone_says_where_the_rest_is(folder):
    with dtckpt.open_checkpoint(folder / "local_rank0.pt") as checkpoint:
        assert "open the folder with the files of all processes" in checkpoint.refused["_flat_param"].message


def test_files_of_processes_that_are_no_shards(tmp_path):
    torch.save({"seed": 1}, tmp_path / "rng_rank0.pt")
    with pytest.raises(errors.CheckpointNotFoundError, match="no sets of them with FSDP's shards: rng"):
        dtckpt.open_checkpoint(tmp_path)
