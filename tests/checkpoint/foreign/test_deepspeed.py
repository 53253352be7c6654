"""Checkpoints of DeepSpeed: real ones of all stages, and shapes of them that a small run does not write."""

import math
import shutil

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtckpt
from dtckpt import errors
from dtckpt.cli.main import main

from . import deepspeed_cases as cases
from .sample_files import expected, facts, read_all

SAMPLES = ("z1_fp32_2", "z1_bf16_2_bf16opt", "z2_bf16_2", "z3_bf16_2")
UNIVERSAL = ("z2_bf16_2_universal", "z3_bf16_2_universal")
GROUPS = [{"a.weight": (4, 3), "a.bias": (5,)}, {"b.weight": (2, 3, 4), "b.scale": ()}]
MODEL, ZERO_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    cases.install(monkeypatch)


def our_name(name):
    kind, _, parameter = name.partition("/")
    return f"module/{parameter}" if kind in ("fp32", "zero_to_fp32") else f"optimizer/state/{parameter}/{kind}"


@pytest.mark.parametrize("name", SAMPLES)
def test_all_tensors_are_those_of_deepspeeds_own_tools(peers, name):
    """The fp32 parameters of the live optimizer and of zero_to_fp32, and the moments of ds_to_universal."""
    found = read_all(peers / "deepspeed" / name)
    for key, fact in expected(peers, f"deepspeed/{name}").items():
        assert found[our_name(key)] == fact, key
    for key, (_, *elements) in expected(peers, f"deepspeed/{name}.moments").items():
        # There a tied or frozen parameter is a copy of the 16-bit module.
        if our_name(key) not in ("module/head.weight", "module/frozen.weight"):
            assert list(found[our_name(key)][1:]) == elements, key


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_checkpoints(peers, name):
    found = read_all(peers / "deepspeed" / name)
    base = name.removesuffix("_universal")
    shapes = {name: shape for name, (shape, *_) in read_all(peers / "deepspeed" / base).items()}
    for key, (_, *elements) in expected(peers, f"deepspeed/{base}.moments").items():
        assert found[our_name(key)] == (shapes[our_name(key)], *elements), key


@pytest.mark.parametrize("name", [*SAMPLES, *UNIVERSAL])
def test_every_command_takes_it(peers, name, tmp_path):
    path = peers / "deepspeed" / name
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert (dict(checkpoint.refused), checkpoint.unread) == ({}, ())
        assert checkpoint.verify().is_sound
    dtckpt.convert(path, tmp_path / "ours")
    assert main(["diff", str(path), str(tmp_path / "ours"), "--values"]) == 0
    assert main(["inspect", str(path)]) == 0
    assert read_all(tmp_path / "ours") == read_all(path)


@pytest.mark.parametrize("name", ["z2_bf16_2", "z3_bf16_2"])
def test_the_tree_is_that_of_a_training_script(peers, name):
    restored = dtckpt.restore(peers / "deepspeed" / name)
    assert (restored["epoch"], restored["note"], restored["global_steps"]) == (2, "client", 3)
    assert restored["lr_scheduler"]["last_epoch"] == 3
    groups = restored["optimizer"]["param_groups"]
    assert [(group["weight_decay"], group["params"]) for group in groups] == [
        (0.1, ["embed.weight", "up.weight", "down.weight"]),
        (0.0, ["norm.weight", "norm.bias", "up.bias", "down.bias"]),
    ]
    assert restored["optimizer"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}
    assert restored["optimizer"]["state"]["up.bias"]["step"] == 3
    assert torch.equal(restored["module"]["head.weight"], restored["module"]["embed.weight"])


def test_the_copies_that_are_left_are_the_parameters_rounded(peers):
    path = peers / "deepspeed/z2_bf16_2"
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert "model file's copies of 7 parameters are left" in checkpoint.notes[0]
        with dtckpt.open_checkpoint(path / "global_step3" / MODEL) as model:
            for name in model.tensors:
                if name.startswith("module/"):
                    assert torch.equal(checkpoint.read(name).bfloat16(), model.read(name).bfloat16())


def test_where_directories_are_not_listed(peers):
    for name in ("z2_bf16_2", "z3_bf16_2", "z3_bf16_2_universal"):
        run = peers / "deepspeed" / name
        for file in (file for file in run.rglob("*") if file.is_file()):
            with fsspec.open(f"memory://deepspeed/{name}/{file.relative_to(run)}", "wb") as copy:
                copy.write(file.read_bytes())
        assert read_all(f"memory://deepspeed/{name}") == read_all(run)


# --- made by its rules ------------------------------------------------------------------------------------------------

shapes_of_groups = st.lists(
    st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4), min_size=1, max_size=2
).map(lambda groups: [{f"g{g}.p{p}": shape for p, shape in enumerate(group)} for g, group in enumerate(groups)])


def check(folder, groups):
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert not checkpoint.refused
        for name, value in ((name, value) for group in groups for name, value in group.items()):
            assert torch.equal(checkpoint.read(f"module/{name}"), value), name
            assert torch.equal(checkpoint.read(f"optimizer/state/{name}/exp_avg"), value + 0.25), name
            assert torch.equal(checkpoint.read(f"optimizer/state/{name}/exp_avg_sq"), value + 0.5), name
            assert checkpoint.read(f"optimizer/state/{name}/step") == 7
        for info in checkpoint.tensors.values():  # counted before the chunks are made
            shapes = [chunk.region.shape for chunk in info.chunks]
            assert info.num_chunks == len(shapes)
            assert math.prod(info.chunk_shape) == max(map(math.prod, shapes))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shapes=shapes_of_groups, count=st.integers(1, 5), align=st.sampled_from([1, 4]), elastic=st.booleans())
def test_joined_parameters_of_any_shapes(tmp_path_factory, shapes, count, align, elastic):
    groups = cases.parameters(shapes)
    files = {
        OPTIMIZER.format(rank): file
        for rank, file in enumerate(cases.joined(groups, count, align=align, elastic=elastic))
    }
    check(cases.write(tmp_path_factory.mktemp("z2"), {MODEL: cases.model_file(groups), **files}), groups)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(shapes=shapes_of_groups, count=st.integers(1, 5), data=st.data())
def test_cut_parameters_of_any_shapes(tmp_path_factory, shapes, count, data):
    """Also where a parameter begins in one vector and ends in the next."""
    groups = cases.parameters(shapes)
    total = sum(-(-value.numel() // count) for group in groups for value in group.values())
    first = data.draw(st.integers(1, total))
    sizes = data.draw(st.sampled_from([None, [first, total - first] if first < total else [total]]))
    files = {OPTIMIZER.format(rank): file for rank, file in enumerate(cases.cut(groups, count, sizes))}
    models = {ZERO_3.format(rank): cases.model_file(groups, module={}, dp_world_size=count) for rank in range(count)}
    check(cases.write(tmp_path_factory.mktemp("z3"), files | models), groups)


@pytest.fixture
def zero_2(tmp_path):
    groups = cases.parameters(GROUPS)
    files = {OPTIMIZER.format(rank): file for rank, file in enumerate(cases.joined(groups, 2))}
    return cases.write(tmp_path / "step", {MODEL: cases.model_file(groups), **files})


def test_a_missing_file_is_named_with_its_regions(zero_2, tmp_path):
    (zero_2 / OPTIMIZER.format(1)).unlink()
    lost = r"a\.weight \[3:4, 1:3\], a\.bias \[0:5\], b\.weight \[1:2, 0:1, 2:4\]"
    with pytest.raises(errors.CheckpointCorruptError, match=rf"{OPTIMIZER.format(1)} is missing, one of 2; .* {lost}"):
        dtckpt.open_checkpoint(zero_2)


def test_a_file_of_a_larger_job_is_not_read_and_named(zero_2):
    shutil.copy(zero_2 / OPTIMIZER.format(0), zero_2 / OPTIMIZER.format(2))
    with dtckpt.open_checkpoint(zero_2) as checkpoint:
        assert checkpoint.unread == (OPTIMIZER.format(2),)
    with pytest.raises(errors.CheckpointError, match=r"would be left behind"):
        dtckpt.convert(zero_2, zero_2.parent / "ours")


def test_files_of_two_saves_are_an_error(zero_2):
    groups = cases.parameters([{"a.bias": (5,), "a.weight": (4, 3)}, GROUPS[1]])
    torch.save(cases.joined(groups, 2)[1], zero_2 / OPTIMIZER.format(1))
    with pytest.raises(errors.CheckpointCorruptError, match=r"has 'a.weight' at .*; are the files of one save\?"):
        dtckpt.open_checkpoint(zero_2)


def test_without_zero(tmp_path):
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    content = cases.model_file(cases.parameters([{"w": (2,)}]), optimizer=state, param_shapes=None)
    restored = dtckpt.restore(cases.write(tmp_path, {MODEL: content}))
    assert torch.equal(restored["module"]["w"], torch.tensor([1000.0, 1001.0]).bfloat16())
    assert torch.equal(restored["optimizer"]["state"][0]["exp_avg"], torch.ones(2))


def test_stages_of_a_pipeline_are_one_model(tmp_path):
    stages = [cases.parameters([{"0.weight": (3, 3)}]), cases.parameters([{"1.weight": (5,)}])]
    files = {}
    for stage, groups in enumerate(stages):
        content = cases.model_file(groups, module=None, mp_world_size=2)
        files[f"mp_rank_{stage:02d}_model_states.pt"] = content
        for rank, file in enumerate(cases.joined(groups, 2)):
            files[f"zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt"] = file
        layer = {"weight": groups[0][f"{stage}.weight"].bfloat16(), "mean": torch.full((2,), float(stage))}
        files[f"layer_{stage:02d}-model_00-model_states.pt"] = layer
    folder = cases.write(tmp_path / "step", files)
    check(folder, [group for groups in stages for group in groups])
    restored = dtckpt.restore(folder)
    assert torch.equal(restored["module"]["1.mean"], torch.ones(2))
    assert restored["optimizer"]["param_groups"][0]["params"] == ["0.weight", "1.weight"]


def test_slices_of_tensor_parallelism_stay_apart(tmp_path):
    groups = cases.parameters([{"w": (2, 3)}])
    files = {}
    for mp in range(2):
        files[f"mp_rank_{mp:02d}_model_states.pt"] = cases.model_file(groups, mp_world_size=2)
        for rank, file in enumerate(cases.joined(groups, 2)):
            files[f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"] = file
    with dtckpt.open_checkpoint(cases.write(tmp_path / "step", files)) as checkpoint:
        assert torch.equal(checkpoint.read("mp_01/module/w"), groups[0]["w"])
        assert "mp_00/optimizer/state/w/exp_avg" in checkpoint.tensors
        assert any("kept apart" in note for note in checkpoint.notes)


def test_values_that_differ_by_process(tmp_path):
    groups = cases.parameters([{"w": (3,)}])
    files = {OPTIMIZER.format(rank): file for rank, file in enumerate(cases.cut(groups, 2))}
    for rank in range(2):
        files[ZERO_3.format(rank)] = cases.model_file(groups, module={}, seed=rank, rng=torch.tensor([rank]))
    restored = dtckpt.restore(cases.write(tmp_path / "step", files))
    assert dict(restored["seed"]) == {0: 0, 1: 1}
    assert [int(each) for each in restored["rng"].values()] == [0, 1]
    assert restored["global_steps"] == 7


def test_a_tie_that_the_module_does_not_confirm_is_refused(tmp_path):
    """Files of early 2023 tie every parameter to the first."""
    groups = cases.parameters([{"w": (3,)}])
    files = {OPTIMIZER.format(rank): file for rank, file in enumerate(cases.cut(groups, 2))}
    empty = torch.empty(0)
    module = {"w": empty, "tied": empty, "other": torch.empty(0)}
    for rank in range(2):
        shared = {"tied": "w", "other": "w"}
        files[ZERO_3.format(rank)] = cases.model_file(groups, module=module, shared_params=shared)
    with dtckpt.open_checkpoint(cases.write(tmp_path / "step", files)) as checkpoint:
        assert facts(checkpoint.read("module/tied")) == facts(groups[0]["w"])
        assert list(checkpoint.refused) == ["module/other"]


def test_an_optimizer_that_is_not_known_is_refused(zero_2):
    torch.save({"optimizer_state_dict": {"fp32_groups": []}}, zero_2 / OPTIMIZER.format(0))
    with pytest.raises(errors.CheckpointVersionError, match=r"expected the state of ZeRO 1, 2 or 3"):
        dtckpt.open_checkpoint(zero_2)
