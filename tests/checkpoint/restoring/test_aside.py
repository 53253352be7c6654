"""Restores into memory beside a target: the target stays as it is until they are applied."""

import numpy as np
import pytest
import torch
from torch import nn

import dtckpt
from dtckpt.checkpoint.leaves import as_leaf
from dtckpt.checkpoint.parts.held_boxes import BoxContent
from dtckpt.checkpoint.restoring.aside import AsideMemory
from dtckpt.checkpoint.restoring.restore import chooser_of, stage_restore
from dtckpt.errors import CheckpointCorruptError, CheckpointError
from dtckpt.layout.region import Region


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed, "tied": model[0].weight}


def state(tree):
    return {name: tensor.clone() for name, tensor in tree["model"].state_dict().items()}


def same(first, second):
    return all(first[name].equal(second[name]) for name in first)


def stage(path, target, aside):
    return stage_restore(path, chooser_of(path), target, aside, options=dtckpt.RestoreOptions())


def test_a_target_changes_when_a_restore_is_applied(tmp_path):
    saved, target, aside = trained(1), trained(2), AsideMemory()
    dtckpt.save(tmp_path / "c", saved)
    before, moment = state(target), target["optimizer"].state_dict()["state"][0]["exp_avg"].clone()
    addresses = [parameter.data_ptr() for parameter in target["model"].parameters()]
    staged = stage(tmp_path / "c", target, aside)
    assert same(before, state(target))
    assert target["step"] == 2
    assert target["optimizer"].state_dict()["state"][0]["exp_avg"].equal(moment)
    assert staged.apply() is target
    assert same(state(saved), state(target))
    assert target["step"] == 1
    assert not target["optimizer"].state_dict()["state"][0]["exp_avg"].equal(moment)
    assert addresses == [parameter.data_ptr() for parameter in target["model"].parameters()]


def test_memory_is_used_again_and_shrinks(tmp_path):
    aside, target = AsideMemory(), {"a": torch.zeros(100), "b": torch.zeros(50)}
    dtckpt.save(tmp_path / "c", {"a": torch.ones(100), "b": torch.ones(50)})
    stage(tmp_path / "c", target, aside)
    memory = dict(aside._memory)
    stage(tmp_path / "c", target, aside).apply()
    assert aside._memory == memory
    assert aside.nbytes == 600
    dtckpt.save(tmp_path / "d", {"a": torch.ones(100)})
    stage(tmp_path / "d", {"a": target["a"]}, aside)
    assert aside.nbytes == 400


def test_a_bound_is_kept(tmp_path):
    dtckpt.save(tmp_path / "c", {"a": torch.ones(100)})
    aside = AsideMemory(max_nbytes=399)
    with pytest.raises(CheckpointError, match="memory beside the target would take"):
        stage(tmp_path / "c", {"a": torch.zeros(100)}, aside)
    assert aside.nbytes == 0


def test_damage_leaves_the_target_as_it_was(tmp_path):
    target = {"a": torch.zeros(1 << 16)}
    dtckpt.save(tmp_path / "c", {"a": torch.ones(1 << 16)}, options=dtckpt.SaveOptions(kvstore="zarr"))
    chunk = max((tmp_path / "c").rglob("c/*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointCorruptError):
        stage(tmp_path / "c", target, AsideMemory())
    assert not target["a"].any()


def test_views_and_other_dtypes_are_filled(tmp_path):
    dtckpt.save(tmp_path / "c", {"q": torch.ones(4, 3), "k": torch.full((3, 4), 2.0)})
    fused = torch.zeros(8, 3, dtype=torch.bfloat16)
    target = {"q": fused[:4], "k": fused[4:].T}
    options = dtckpt.RestoreOptions(cast="any")
    path = tmp_path / "c"
    stage_restore(path, chooser_of(path), target, AsideMemory(), options=options).apply()
    assert fused[:4].eq(1).all()
    assert fused[4:].eq(2).all()


def test_what_memory_holds_is_forgotten_with_the_memory():
    """Else other memory at the same address would count as filled."""
    aside, target = AsideMemory(), {"a": torch.zeros(100), "b": torch.zeros(100)}
    content = BoxContent("a", Region((0,), (100,)), "float32", 1, Region((0,), (100,)), 1)

    def note(names):
        for leaf in aside.beside(as_leaf(target[name], name) for name in names):
            memory = leaf.components[0].numpy()
            assert aside.held.is_private(memory)
            aside.held.note(memory, content)
        return memory

    memory = note("ab")
    assert aside.held.has(memory, content)
    assert not aside.held.is_private(np.zeros(100))
    memory = note("ab")
    assert aside.held.has(memory, content)
    aside.beside([as_leaf(target["b"], "b")])
    assert not aside.held.has(memory, content)
    assert aside.held.has(note("b"), content)
    aside.clear()
    assert not aside.held.has(memory, content)
    assert not aside.held.is_private(memory)
