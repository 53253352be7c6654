"""Saves whose clients pass different things: tensors on slices of meshes, pipeline stages, and mistakes."""

import math

import pytest
import torch
from support.torch_versions import needs_tested_dtensors

import dtckpt

from . import union_cases

FIRST = ["begin", "described", "united", "written", "merged"]
NEXT = ["begin", "written", "merged"]


@pytest.mark.parametrize(
    ("axes", "clients"), [({}, 1), ({"dp": 2}, 2), ({"dp": 3}, 3), ({"dp": 2, "tp": 2}, 4)], ids=str
)
def test_fsdp_with_tensor_parallelism(pool, fsdp_and_tp, axes, clients):
    found = pool.values(union_cases.restore_stage, fsdp_and_tp, 2, axes, 0, clients=clients, group=True)
    assert found == [[]] * clients


@pytest.fixture(scope="module")
def fsdp_and_tp(pool, tmp_path_factory):
    """A checkpoint of a model whose norms are on ``mesh["dp"]`` and whose other parameters are on all of the mesh."""
    folder = tmp_path_factory.mktemp("fsdp_and_tp")
    rounds = pool.values(union_cases.save_stage, f"{folder}/", 2, {"dp": 2, "tp": 2}, clients=4, group=True)
    # A tensor on a slice of a mesh is on all slices, so all clients describe the same.
    assert rounds == [[NEXT]] * 4
    return f"{folder}/0"


def test_the_manifest_has_the_layout_on_the_whole_mesh(fsdp_and_tp):
    with dtckpt.open_checkpoint(fsdp_and_tp) as checkpoint:
        layout = checkpoint.tensors["model/layers.0.norm.weight"].layout
        assert (layout.sharding_specs, layout.mesh.axis_sizes) == (["dp"], {"dp": 2, "tp": 2})


def test_raw_states_of_fsdp_with_tensor_parallelism(pool, tmp_path):
    pool.values(union_cases.save_raw_states, f"{tmp_path}/s", {"dp": 2, "tp": 2}, clients=4, group=True)
    for axes, clients in (({"dp": 2, "tp": 2}, 4), ({}, 1), ({"dp": 1, "tp": 2}, 2), ({"dp": 3, "tp": 1}, 3)):
        found = pool.values(union_cases.restore_raw_states, f"{tmp_path}/s", axes, clients=clients, group=True)
        assert found == [[]] * clients, axes


def test_pipeline_stages_hold_different_keys(pool, tmp_path):
    axes = {"pp": 2, "dp": 2, "tp": 2}
    rounds = pool.values(union_cases.save_stage, f"{tmp_path}/", 4, axes, saves=3, clients=8, group=True)
    assert rounds == [[FIRST, NEXT, NEXT]] * 8
    others = [(0, {"pp": 4}, 4), (1, {"pp": 2, "tp": 2}, 4), (2, {"dp": 3}, 3), (2, {"dp": 2}, 2), (2, {}, 1)]
    for step, axes, clients in others:
        found = pool.values(union_cases.restore_stage, f"{tmp_path}/{step}", 4, axes, step, clients=clients, group=True)
        assert found == [[]] * clients, axes


MISTAKES = {
    "same: tensor": ("SaveDisagreementError", "'own'"),
    "same: value": ("SaveDisagreementError", "'values/own'"),
    "union: tensor": None,
    "union: value": None,
    "lost": ("TensorPartMissingError", "'w'"),
    "shape": ("ComponentError", "'c'"),
    "dtype": ("ComponentError", "'c'"),
    "overlap": ("ComponentError", "'w'"),
    "value": ("SaveDisagreementError", "'lr'; got 0.5 and 0.25"),
    "kind": ("SaveDisagreementError", "'values'"),
    "length": ("SaveDisagreementError", "'list'"),
    "copies": ("ReplicaMismatchError", "'c'"),
    "describing": ("TreeError", "object"),
    "pattern": ("ConfigError", "'owm*'"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_the_same_error_on_all_clients_and_the_next_save_works(pool, tmp_path, kind):
    found = pool.values(union_cases.save_differently, f"{tmp_path}/s", kind, clients=3)
    assert found == [found[0]] * 3
    error = MISTAKES[kind]
    if error is None:
        assert [name for name, _ in found[0]] == ["CheckpointExistsError"]
        tree = dtckpt.restore(tmp_path / "s")
        assert torch.ones(2).equal(tree["own"]) if kind == "union: tensor" else tree["values"] == {"lr": 0.5, "own": 1}
    else:
        ((name, text),) = found[0]
        assert (name, error[1] in text) == (error[0], True), found[0]
        assert {"own0", "own1", "own2", "w"} == dtckpt.restore(tmp_path / "s").keys()
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.verify().damages == ()


FAULTS = {
    "put": ("StorageError", "client 2: "),
    "read": ("StorageError", "client 2: "),
    "plan": ("ClientFailedError", "no memory"),
    "late value": ("SaveDisagreementError", "'lr'; got 0.5 and 0.25"),
    "forgotten": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_extra_rounds(pool, tmp_path, meeting, fault):
    found = pool.values(union_cases.save_through_a_fault, f"{tmp_path}/s", fault, clients=3, **meeting)
    assert found == [found[0]] * 3
    expected = FAULTS[fault]
    assert [name for name, _ in found[0]] == ([] if expected is None else [expected[0]])
    assert expected is None or expected[1] in found[0][0][1]
    tree = dtckpt.restore(tmp_path / "s")
    assert tree.pop("lr") == 0.5
    assert {name: tensor.tolist() for name, tensor in tree.items()} == {f"own{c}": [float(c)] * 5 for c in range(3)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_slices_of_our_meshes(pool, tmp_path):
    assert pool.values(union_cases.save_slices, f"{tmp_path}/s", clients=4) == [NEXT] * 4
    # Other meshes: the axes change places, and slices are of one client or of all.
    meshes = [
        {"y": 2, "x": 2},
        {"x": 1, "y": 3},
        {"y": 3, "x": 1},
        {"x": 2, "y": 1},
        {"x": 1, "z": 2},
        {"x": 1, "y": 1},
    ]
    for axes in meshes:
        clients = math.prod(axes.values())
        found = pool.values(union_cases.restore_slices, f"{tmp_path}/s", axes, clients=clients, group=True)
        assert found == [[]] * clients, axes
    assert union_cases.wrong_in(dtckpt.restore(tmp_path / "s")) == []


@needs_tested_dtensors
def test_meshes_without_a_common_root(pool, tmp_path):
    rounds = pool.values(union_cases.save_families, f"{tmp_path}/", clients=4, group=True)
    assert rounds == [["|", *FIRST, "|", *NEXT]] * 4
    for number in range(2):
        assert union_cases.wrong_in(dtckpt.restore(tmp_path / f"{number}")) == []
    for families in ([[0, 1], [2, 3]], [[2, 1, 0, 3]], [[0, 2], [1]], [[0], [1]], [[1, 0]], [[0]]):
        clients = sum(map(len, families))
        found = pool.values(union_cases.restore_families, f"{tmp_path}/0", families, clients=clients, group=True)
        assert found == [[]] * clients, families


def test_groups_save_at_one_time(pool, tmp_path):
    assert pool.values(union_cases.save_in_groups, f"{tmp_path}", clients=4, group=True) == [[]] * 4
    assert dtckpt.restore(tmp_path / "all").keys() == {"own0", "own1", "own2", "own3"}
    assert dtckpt.restore(tmp_path / "1")["step"] == 1


def test_a_manager_restores_each_stage_of_a_pipeline(pool, tmp_path):
    assert pool.values(union_cases.manage_stages, f"{tmp_path}", clients=2) == [[]] * 2


def test_bad_groups(pool, tmp_path):
    found = pool.values(union_cases.call_with_bad_groups, f"{tmp_path}/s", clients=2, group=True)
    errors = ["MeshError"] * 2 + ["MeshTypeError"] + ["MeshError"] + ["MeshTypeError"] * 2 + ["MeshError"]
    assert found == [[error for error in errors for _ in range(3)]] * 2
    assert list(tmp_path.iterdir()) == []
