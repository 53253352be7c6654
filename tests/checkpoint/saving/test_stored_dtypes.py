"""Tensors that are rounded when they are stored, chosen by name."""

import re

import pytest
import torch
from support.states import bits_of

import dtckpt
from checkpoint import client_cases
from dtckpt import SaveOptions, abstract_mesh
from dtckpt.errors import ConfigError

BASE = torch.randn(50, generator=torch.Generator().manual_seed(1))
TREE = {
    "model": {"w": BASE, "norm": BASE.clone()},
    "optimizer": {"m": BASE.clone(), "half": BASE.half(), "step": torch.tensor(3)},
}


def stored(tmp_path, **options):
    dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(**options))
    restored = dtckpt.restore(tmp_path / "s")
    found = {}
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        for name, info in checkpoint.tensors.items():
            group, _, key = name.partition("/")
            tensor, original = restored[group][key], TREE[group][key]
            rounded = original.to(info.stored_dtype).to(original.dtype)
            assert bits_of(tensor) == bits_of(rounded), name
            if info.stored_dtype != info.dtype:
                assert not tensor.equal(original)
                found[name] = str(info.stored_dtype)
    return found


BF16 = "torch.bfloat16"


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ({"stored_dtypes": {"optimizer/*": "bfloat16"}}, {"optimizer/m": BF16}),
        ({"stored_dtypes": {"*norm": "float32", "model/*": "bfloat16"}}, {"model/w": BF16}),
        ({"stored_dtypes": {"model/*": "bfloat16", "*norm": "float32"}}, {"model/norm": BF16, "model/w": BF16}),
        (
            {"stored_dtypes": {"*norm": "float32"}, "save_as_bf16": True},
            {"model/w": BF16, "optimizer/m": BF16},
        ),
        ({"stored_dtypes": (("model/?", "bfloat16"),), "codec": "zstd"}, {"model/w": BF16}),
        ({}, {}),
    ],
)
def test_the_first_match_decides(tmp_path, options, rounded):
    assert stored(tmp_path, **options) == rounded


@pytest.mark.parametrize("pattern", ["optimiser/*", "optimizer/half", "optimizer/step"])
def test_a_pattern_that_matches_nothing_to_round(tmp_path, pattern):
    with pytest.raises(ConfigError, match=re.escape(f"no float32 tensor matches '{pattern}'")):
        stored(tmp_path, stored_dtypes={"model/*": "bfloat16", pattern: "bfloat16"})
    assert list(tmp_path.iterdir()) == []


def test_reshard_keeps_them(tmp_path):
    mesh = abstract_mesh({"x": 2})
    stored(tmp_path, stored_dtypes={"model/w": "bfloat16"})
    dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=mesh)
    with dtckpt.open_checkpoint(tmp_path / "t") as checkpoint:
        kinds = {name: info.stored_dtype for name, info in checkpoint.tensors.items()}
    assert (kinds["model/w"], kinds["model/norm"]) == (torch.bfloat16, torch.float32)
    for options in (SaveOptions(stored_dtypes={"*": "bfloat16"}), SaveOptions(save_as_bf16=True)):
        with pytest.raises(ConfigError, match="keeps stored dtypes"):
            dtckpt.reshard(tmp_path / "s", tmp_path / "u", mesh=mesh, options=options)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["stored dtypes", "order of stored dtypes", "codec", "pattern"])
def test_clients_that_disagree(pool, tmp_path, kind):
    answers = pool.run(client_cases.save_differently, f"{tmp_path}/s", 3, kind, clients=3)
    if kind == "pattern":
        assert {answer.error for answer in answers} == {"ConfigError"}
        assert all("no float32 tensor matches 'v'" in answer.text for answer in answers)
    else:
        assert {answer.error for answer in answers} == {"SaveDisagreementError"}
        assert all("different options" in answer.text for answer in answers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_one_client_alone_may_show_its_progress(pool, tmp_path):
    pool.values(client_cases.save_differently, f"{tmp_path}/s", 3, "progress", clients=3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
