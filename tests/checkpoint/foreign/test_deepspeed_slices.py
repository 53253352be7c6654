"""Tensor parallelism, pipelines with it, and experts: checkpoints of DeepSpeed made by its rules."""

import re

import pytest
import torch

import dtckpt
from dtckpt import errors

from . import deepspeed_cases as cases

MODEL = "mp_rank_{:02d}_model_states.pt"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
LAYER = "layer_{:02d}-model_{:02d}-model_states.pt"
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"\d+.norm.weight", r"\d+.down.bias"],
    "parameter_with_row_parallelism_patterns": [r"\d+.down.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.gate_up.weight"],
    "vocabulary_parameter_patterns": [r"0.embed.weight"],
}
SHAPES = {
    "0.embed.weight": (8, 3),
    "1.norm.weight": (3,),
    "1.gate_up.weight": (8, 3),
    "1.down.weight": (3, 8),
    "1.down.bias": (3,),
    "1.up.bias": (4,),
}


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    cases.install(monkeypatch)


def sliced(name, value, count):
    """Return the slices of a parameter, by the rules of `INFO`."""
    if name in ("1.norm.weight", "1.down.bias"):
        return [value] * count
    if name == "1.gate_up.weight":
        gates, ups = (half.chunk(count) for half in value.chunk(2))
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    return list(value.chunk(count, 1 if name == "1.down.weight" else 0))


def write_slices(folder, info=INFO, degree=2, **fields):
    """Write the model in slices by ZeRO 2 of two processes; return the parameters."""
    whole = cases.parameters([SHAPES])[0]
    files = {}
    for rank in range(degree):
        own = [{name: sliced(name, value, degree)[rank].contiguous() for name, value in whole.items()}]
        more = {} if info is None else {"universal_checkpoint_info": info}
        files[MODEL.format(rank)] = cases.model_file(own, mp_world_size=degree, **more, **fields)
        for process, file in enumerate(cases.joined(own, 2)):
            files[OPTIMIZER.format(process, rank)] = file
    cases.write(folder, files)
    return whole


@pytest.mark.parametrize("degree", [2, 4])
def test_slices_are_joined_by_the_patterns_in_the_files(tmp_path, degree):
    shapes = SHAPES
    whole = write_slices(tmp_path / "step", degree=degree)
    with dtckpt.open_checkpoint(tmp_path / "step") as checkpoint:
        assert not checkpoint.refused
        assert {name for name in checkpoint.tensors if name.startswith("module/")} == {f"module/{n}" for n in shapes}
        for name, value in whole.items():
            assert torch.equal(checkpoint.read(f"module/{name}"), value), name
            assert torch.equal(checkpoint.read(f"optimizer/state/{name}/exp_avg"), value + 0.25), name
        region = dtckpt.Region((1, 2), (2, 5))
        assert torch.equal(checkpoint.read("module/1.down.weight", region), whole["1.down.weight"][1:3, 2:7])
        assert any("joined as universal_checkpoint_info tells" in note for note in checkpoint.notes)
        assert checkpoint.verify().is_sound
    dtckpt.convert(tmp_path / "step", tmp_path / "ours")
    assert torch.equal(dtckpt.restore(tmp_path / "ours")["module"]["1.gate_up.weight"], whole["1.gate_up.weight"])


def test_a_slice_without_its_optimizer_is_an_error(tmp_path):
    write_slices(tmp_path / "step")
    for process in range(2):
        (tmp_path / "step" / OPTIMIZER.format(process, 1)).unlink()
    with pytest.raises(errors.CheckpointCorruptError, match="a slice of the model has no optimizer"):
        dtckpt.open_checkpoint(tmp_path / "step")


def test_sixteen_bit_copies_in_place_of_missing_vectors_are_named(tmp_path):
    """A stage of a pipeline whose optimizer files are gone, and a checkpoint without any."""
    write_pipeline(tmp_path / "step")
    for file in (tmp_path / "step").glob("*_mp_rank_0[23]_optim_states.pt"):
        file.unlink()
    with dtckpt.open_checkpoint(tmp_path / "step") as checkpoint:
        assert any("the optimizer's files of mp_rank_02 are missing" in note for note in checkpoint.notes)


def test_values_that_differ_by_slice_stay_apart(tmp_path):
    write_slices(tmp_path / "step")
    for rank in range(2):
        content = torch.load(tmp_path / "step" / MODEL.format(rank), weights_only=False)
        torch.save(content | {"rng": torch.tensor([rank]), "seed": rank}, tmp_path / "step" / MODEL.format(rank))
    restored = dtckpt.restore(tmp_path / "step")
    assert (restored["seed"], restored["rng"].item(), restored["global_steps"]) == (0, 0, 7)
    assert (restored["mp_01"]["seed"], restored["mp_01"]["rng"].item()) == (1, 1)
    assert "global_steps" not in restored["mp_01"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parameter_with_sub_params": [1]}, "does not know how parameter_with_sub_params cuts them"),
        ({"tp_replicated_parameter_patterns": ["(a+)+$"]}, r"does not know the pattern '\(a\+\)\+\$'"),
        ({"tp_replicated_parameter_patterns": [".*.*.*x"]}, r"does not know the pattern"),
        ({"tp_replicated_parameter_patterns": [r"\Z"]}, r"does not know the pattern"),
        (None, "no file tells how to join them"),
    ],
)
def test_slices_stay_apart_with_the_reason(tmp_path, change, reason):
    whole = write_slices(tmp_path / "step", None if change is None else INFO | change)
    with dtckpt.open_checkpoint(tmp_path / "step") as checkpoint:
        assert torch.equal(checkpoint.read("mp_01/module/1.down.weight"), whole["1.down.weight"][:, 4:])
        (note,) = (note for note in checkpoint.notes if "kept apart" in note)
        assert re.search(reason, note)


def test_a_version_that_is_not_known_is_refused_by_number(tmp_path):
    write_slices(tmp_path / "step", INFO | {"universal_checkpoint_version": 0.9})
    with pytest.raises(errors.CheckpointVersionError, match=r"universal_checkpoint_version 0\.9, expected one of 0\.1"):
        dtckpt.open_checkpoint(tmp_path / "step")


def test_means_of_slices_are_refused_by_name(tmp_path):
    write_slices(tmp_path / "step", INFO | {"parameter_to_average_patterns": [r"1\.up\.bias"]})
    with dtckpt.open_checkpoint(tmp_path / "step") as checkpoint:
        assert "module/1.up.bias" in checkpoint.refused
        with pytest.raises(errors.TreeError, match="the mean of its slices"):
            checkpoint.read("module/1.up.bias")
        assert checkpoint.read("module/1.down.weight").shape == (3, 8)


def write_pipeline(folder, info=INFO):
    """Write two stages of two slices each; return the parameters."""
    stages = [{"0.embed.weight": (8, 3)}, {"1.down.weight": (3, 8), "1.norm.weight": (3,)}]
    whole = cases.parameters(stages)
    files = {}
    for stage, group in enumerate(whole):
        for rank in range(2):
            own = [{name: sliced(name, value, 2)[rank].contiguous() for name, value in group.items()}]
            mp = 2 * stage + rank
            content = {"universal_checkpoint_info": info} if info else {}
            files[MODEL.format(mp)] = cases.model_file(own, module=None, mp_world_size=4, **content)
            for process, file in enumerate(cases.joined(own, 2)):
                files[OPTIMIZER.format(process, mp)] = file
            layer = {name.partition(".")[2]: value.bfloat16() for name, value in own[0].items()}
            files[LAYER.format(stage, rank)] = layer | {"mean": torch.full((2,), float(stage))}
    cases.write(folder, files)
    return {name: value for group in whole for name, value in group.items()}


@pytest.mark.parametrize("info", [INFO, None])
def test_stages_of_a_pipeline_with_slices(tmp_path, info):
    whole = write_pipeline(tmp_path / "step", info)
    with dtckpt.open_checkpoint(tmp_path / "step") as checkpoint:
        assert (dict(checkpoint.refused), checkpoint.unread) == ({}, ())
        for name, value in whole.items():
            if info:
                assert torch.equal(checkpoint.read(f"module/{name}"), value), name
            else:
                assert torch.equal(checkpoint.read(f"mp_01/module/{name}"), sliced(name, value, 2)[1]), name
        top = "" if info else "mp_01/"
        assert torch.equal(checkpoint.read(f"{top}module/1.mean"), torch.ones(2))


def test_a_missing_layer_is_named(tmp_path):
    write_pipeline(tmp_path / "step")
    (tmp_path / "step" / LAYER.format(1, 0)).unlink()
    with pytest.raises(
        errors.CheckpointCorruptError, match=r"layer_01-model_00-model_states.pt is missing; it would hold"
    ):
        dtckpt.open_checkpoint(tmp_path / "step")


# --- experts ----------------------------------------------------------------------------------------------------------


def write_experts(folder, *, num_optimizers=2):
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts."
    files = {MODEL.format(0): cases.model_file(cases.parameters([{"dense": (3,)}]), param_shapes=None, num_experts=[3])}
    for expert in range(3):
        name = f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"
        files[name] = {f"{prefix}{expert}.weight": torch.full((2, 2), float(expert))}
    for rank in range(num_optimizers):
        state = {"state": {0: {"exp_avg": torch.full((3,), float(rank))}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        files[f"expp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer": state}
    return cases.write(folder, files), prefix


def test_experts_are_parameters_of_the_module(tmp_path):
    folder, prefix = write_experts(tmp_path / "step")
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert (dict(checkpoint.refused), checkpoint.unread) == ({}, ())
        assert checkpoint.read(f"module/{prefix}2.weight").tolist() == [[2.0, 2.0], [2.0, 2.0]]
    restored = dtckpt.restore(folder)
    assert restored["optimizer"]["expp_rank_1_mp_rank_00"]["state"][0]["exp_avg"].tolist() == [1.0] * 3
    assert restored["module"]["dense"].shape == (3,)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_missing_expert_is_named(tmp_path, lost):
    """Also the last one, which only the number of experts tells."""
    folder, _ = write_experts(tmp_path / "step")
    (folder / f"layer_0_expert_{lost}_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(
        errors.CheckpointCorruptError, match=rf"layer_0_expert_{lost}_mp_rank_00.* is missing; it would"
    ):
        dtckpt.open_checkpoint(folder)


def test_vectors_of_zero_with_experts_are_left_with_a_note(tmp_path):
    folder, _ = write_experts(tmp_path / "step", num_optimizers=0)
    cases.write(folder, {OPTIMIZER.format(0, 0): cases.joined(cases.parameters([{"dense": (3,)}]), 1)[0]})
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == (OPTIMIZER.format(0, 0),)
        assert any("the 16-bit parameters" in note for note in checkpoint.notes)
