"""Saves and restores by real client processes."""

import re

import pytest
import torch

import dtckpt
from dtckpt.errors import to_wire

from . import client_cases

pytestmark = pytest.mark.processes

TENSORS = {
    "model/w": ((50, 12), "float32", ["x", "y"]),
    "model/w/m": ((50, 12), "bfloat16", [("y", "x"), "unsharded"]),
    "model/b": ((13,), "float64", ["y"]),
    "embedding": ((101, 3), "float32", [("x", "y"), "unsharded"]),
    "copies": ((40, 5), "int64", ["unsharded", "unsharded"]),
    "short": ((1, 4), "int8", ["x", "unsharded"]),
    "scalar": ((), "complex64", []),
    "empty": ((0, 3), "float16", ["unsharded", "x"]),
    "plain": ((9,), "float8_e4m3fn", None),
}


def with_specs(**specs):
    """Return the tensors with other sharding specs: 1-dim and 2-dim tensors by rank."""
    return {
        name: (shape, dtype, specs[f"rank{len(shape)}"] if old is not None and shape else old)
        for name, (shape, dtype, old) in TENSORS.items()
    }


RESTORES = {
    "1 client": (1, 1, {"z": 1}, with_specs(rank1=["z"], rank2=["unsharded", "z"])),
    "2 clients": (2, 1, {"rows": 2}, with_specs(rank1=["unsharded"], rank2=["unsharded", "rows"])),
    "3 clients": (3, 1, {"p": 3}, with_specs(rank1=["p"], rank2=["p", "unsharded"])),
    "6 clients": (6, 1, {"a": 2, "b": 3}, with_specs(rank1=["b"], rank2=[("b", "a"), "unsharded"])),
    "2 clients of 3 devices": (2, 3, {"a": 3, "b": 2}, with_specs(rank1=["a"], rank2=["b", "a"])),
    "4 clients, axes swapped": (4, 1, {"y": 2, "x": 2}, with_specs(rank1=["x"], rank2=["y", "x"])),
}


@pytest.fixture(scope="module", params=["process_group", "grpc"])
def saved(request, pool, tmp_path_factory):
    """A checkpoint of 4 clients, one of 2 clients with 4 devices, and how the clients meet."""
    meeting = {} if request.param == "process_group" else {"coordinator": request.getfixturevalue("coordinator")}
    folder = tmp_path_factory.mktemp("saved")
    axes = {"x": 2, "y": 2}
    reports = pool.values(client_cases.save, f"{folder}/one", axes, TENSORS, generation="1", clients=4, **meeting)
    assert all(list(report["phases"]) == ["plan", "barrier", "edges", "write", "merge"] for report in reports), reports
    assert sum(report["client_nbytes"] for report in reports) == reports[0]["nbytes"]
    assert all(report["client_nbytes"] > 0 for report in reports)
    pool.values(
        client_cases.save,
        f"{folder}/two",
        axes,
        TENSORS,
        devices=2,
        generation="1",
        kvstore="zarr",
        clients=2,
        **meeting,
    )
    return folder, meeting


@pytest.mark.share(5)
@pytest.mark.parametrize("which", ["one", "two"])
@pytest.mark.parametrize("restore", RESTORES)
def test_any_number_of_clients_restores(pool, saved, which, restore):
    folder, meeting = saved
    clients, devices, axes, tensors = RESTORES[restore]
    found = pool.values(
        client_cases.restore,
        f"{folder}/{which}",
        axes,
        tensors,
        devices=devices,
        generation="1",
        clients=clients,
        **meeting,
    )
    assert found == [[]] * clients


def test_one_process_alone_reads_and_reshards(saved, tmp_path):
    folder, _ = saved
    with dtckpt.open_checkpoint(folder / "one") as checkpoint:
        assert checkpoint.verify().damages == ()
        assert checkpoint.manifest.num_clients == 4
        layout = checkpoint.tensors["model/w"].layout
        assert (layout.sharding_specs, layout.mesh.axis_sizes) == (["x", "y"], {"x": 2, "y": 2})
        assert {chunk.client for chunk in checkpoint.tensors["model/w"].chunks} == {0, 1, 2, 3}
    assert client_cases.restore(f"{folder}/one", {"z": 1}, RESTORES["1 client"][3], generation="1") == []
    dtckpt.reshard(folder / "one", tmp_path / "two", mesh=dtckpt.abstract_mesh({"rows": 2}))
    assert client_cases.restore(f"{tmp_path}/two", {"z": 1}, RESTORES["1 client"][3], generation="1") == []


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_rows_between_uneven_shards_go_to_their_owner(pool, tmp_path, meeting, kvstore):
    tensors = {"v": ((50257, 3), "float32", [("x", "y"), "unsharded"])}
    path, axes = f"{tmp_path}/s", {"x": 2, "y": 2}
    reports = pool.values(client_cases.save, path, axes, tensors, kvstore=kvstore, clients=4, **meeting)
    assert all("edges" in report["phases"] for report in reports)
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["v"].num_chunks <= 8
        assert checkpoint.verify().damages == ()
    other = {"v": ((50257, 3), "float32", ["z", "unsharded"])}
    assert pool.values(client_cases.restore, path, {"z": 3}, other, clients=3, **meeting) == [[]] * 3


def test_a_checkpoint_is_replaced_by_all_together(pool, tmp_path, meeting):
    path, axes = f"{tmp_path}/s", {"x": 2, "y": 2}
    for generation in ("1", "2"):
        pool.values(client_cases.save, path, axes, TENSORS, generation=generation, overwrite=True, clients=4, **meeting)
        assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    found = pool.values(client_cases.restore, path, axes, TENSORS, generation="2", clients=4, **meeting)
    assert found == [[]] * 4
    answers = pool.run(client_cases.save, path, axes, TENSORS, generation="3", clients=4, **meeting)
    assert {answer.error for answer in answers} == {"CheckpointExistsError"}
    assert pool.values(client_cases.restore, path, axes, TENSORS, generation="2", clients=4, **meeting) == [[]] * 4


def test_a_part_of_the_job_saves(pool, tmp_path, meeting):
    assert pool.values(client_cases.save_on_a_part_of_the_job, f"{tmp_path}/s", 2, clients=3, **meeting) == [[]] * 3
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.manifest.num_clients == 2


def test_threads_of_a_process_take_turns(pool, tmp_path, meeting):
    assert pool.values(client_cases.save_in_two_threads, f"{tmp_path}", 1, clients=3, **meeting) == [[]] * 3
    for name in ("a0", "b0"):
        assert torch.equal(dtckpt.restore(tmp_path / name)["w"], torch.zeros(300))


def test_only_members_of_a_mesh_save_on_it(pool, tmp_path, meeting):
    answers = pool.run(client_cases.save_as_a_stranger, f"{tmp_path}/s", clients=3, **meeting)
    assert [answer.error for answer in answers] == ["", "", "MeshError"]
    assert "save cannot run over clients [0, 1] from client 2" in answers[2].text


# --- disagreement ---

DISAGREEMENTS = {
    "names": "TensorPartMissingError",
    "values": "SaveDisagreementError",
    "structure": "SaveDisagreementError",
    "options": "SaveDisagreementError",
    "path": "BarrierConflictError",
    "shape": "ComponentError",
    "dtype": "ComponentError",
    "layout": "TensorPartMissingError",
    "mesh": "ComponentError",
    "axes": "TensorPartMissingError",
    "unsavable": "TreeError",
    "name": "TensorNameError",
    "error of the state": "ClientFailedError",
    "copies": "ReplicaMismatchError",
    "copies, later": "ReplicaMismatchError",
    "copies on devices": "ReplicaMismatchError",
}
NAMED = {"shape": "'w'", "dtype": "'w'", "layout": "'w'", "mesh": "'w'", "axes": "'w'", "name": r"a\x00v"}
NAMED |= {"copies": "'c'", "copies, later": "'c'"}
NAMED |= {"error of the state": "ZeroDivisionError: no state today", "unsavable": "set", "path": "_other"}


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_clients_that_disagree_all_get_the_same_error(pool, tmp_path, meeting, kind):
    answers = pool.run(client_cases.save_differently, f"{tmp_path}/s", 3, kind, clients=3, **meeting)
    assert {answer.error for answer in answers} == {DISAGREEMENTS[kind]}, answers
    assert len({answer.text for answer in answers}) == 1, answers
    assert re.search("clients? 2", answers[0].text)
    assert NAMED.get(kind, "") in answers[0].text
    assert max(answer.seconds for answer in answers) < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("missing checkpoint", "CheckpointNotFoundError"),
        ("missing tensor", "TensorNotFoundError"),
        ("shape", "ShapeMismatchError"),
        ("other checkpoint", "CheckpointConflictError"),
        ("raises", "ClientFailedError"),
        ("contains itself", "TreeError"),
    ],
)
def test_restores_that_differ_touch_nothing(pool, tmp_path, meeting, kind, error):
    for name in ("s", "s_2"):
        pool.values(client_cases.save, f"{tmp_path}/{name}", {"x": 3}, client_cases.WEIGHT, clients=3, **meeting)
    answers = pool.run(client_cases.restore_differently, f"{tmp_path}/s", 3, kind, clients=3, **meeting)
    assert {answer.error for answer in answers} == {error}, answers
    assert len({answer.text for answer in answers}) == 1, answers
    assert max(answer.seconds for answer in answers) < 5


def test_a_shared_file_system_is_needed(pool, tmp_path, meeting):
    answers = pool.run(
        client_cases.save_elsewhere, f"{tmp_path}/s", clients=2, by_client={1: (f"{tmp_path}/private",)}, **meeting
    )
    assert {answer.error for answer in answers} == {"StorageError"}, answers
    assert len({answer.text for answer in answers}) == 1
    assert "client 1 does not see" in answers[0].text


# --- clients that die ---

HEARTBEAT_TIMEOUT_S = 2.0
STATE = {
    "w": ((64, 8), "float32", ["x", "unsharded"]),
    "m": ((64, 8), "bfloat16", ["x", "unsharded"]),
    "c": ((30, 8), "float32", ["unsharded", "unsharded"]),
}
DEATHS = {
    "before the save": "old",
    "before written": "old",
    "amid its writes": "old",
    "in written": "old",
    "in written, arrived": "either",
    "before merged": "either",
    "in merged": "either",
}
LEADER_DEATHS = {
    "before the save": "old",
    "before written": "old",
    "amid its writes": "old",
    "in written": "old",
    "in written, arrived": "old",
    "before merged": "old",
    "amid the merge": "old",
    "before the commit": "old",
    "in merged": "new",
}
THROUGH_GRPC = {"before written", "in written", "in written, arrived", "amid the merge", "in merged"}
CASES = [
    (way, victim, when, left)
    for victim, deaths in ((0, LEADER_DEATHS), (2, DEATHS))
    for when, left in deaths.items()
    for way in ("process_group", "grpc")
    if way == "process_group" or when in THROUGH_GRPC  # the others do not depend on how clients meet
]


@pytest.mark.share(3)
@pytest.mark.parametrize(("way", "victim", "when", "left"), CASES, ids=[f"{w}: {v} {t}" for w, v, t, _ in CASES])
def test_a_client_that_dies_takes_nothing_along(request, pool, tmp_path, way, victim, when, left):
    meeting = {} if way == "process_group" else {"coordinator": request.getfixturevalue("coordinator")}
    axes, path, other = {"x": 4}, f"{tmp_path}/s", f"{tmp_path}/other"
    for target in (path, other):
        pool.values(client_cases.save, target, axes, STATE, generation="old", clients=4, **meeting)
    answers = pool.run(
        client_cases.save_and_die,
        path,
        axes,
        STATE,
        "new",
        victim,
        when,
        str(tmp_path),
        clients=4,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        **meeting,
    )
    assert [client for client, answer in enumerate(answers) if answer.has_died] == [victim]
    survivors = [answer for answer in answers if not answer.has_died]
    assert {answer.error for answer in survivors} == {"ClientLostError"}, survivors
    assert len({answer.text for answer in survivors}) == 1, survivors
    assert f"client {victim} " in survivors[0].text
    assert all(tuple(answer.facts["clients"]) == (victim,) for answer in survivors)
    assert max(answer.seconds for answer in survivors) < HEARTBEAT_TIMEOUT_S + 2

    assert client_cases.restore(other, {"x": 1}, STATE, generation="old") == []
    found = {
        generation: client_cases.restore(path, {"x": 1}, STATE, generation=generation) == []
        for generation in ("old", "new")
    }
    assert sum(found.values()) == 1, "neither the old nor the new checkpoint"
    assert left == "either" or found[left], found

    # And the job goes on, beside the leftovers.
    pool.values(client_cases.save, path, axes, STATE, generation="newer", overwrite=True, clients=4, **meeting)
    assert client_cases.restore(path, {"x": 1}, STATE, generation="newer") == []
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name != "pid") == ["other", "s"]


# --- DTensors over clients ---


@pytest.mark.parametrize(
    ("axes", "specs", "shape", "devices"),
    [
        ({"x": 3}, ["x"], (7,), 1),
        ({"x": 3}, ["x", "unsharded"], (2, 3), 1),
        ({"x": 3, "y": 2}, ["y", "x"], (5, 4), 2),
        ({"x": 2, "y": 3}, [("y", "x")], (11,), 2),
        ({"x": 6}, ["unsharded"], (4,), 2),
        ({"x": 6}, ["x"], (1,), 2),
        ({"x": 3}, [], (), 1),
        ({"x": 3}, ["x"], (0,), 1),
    ],
)
def test_pack_finds_the_global_shape(pool, axes, specs, shape, devices):
    found = pool.values(client_cases.pack_over_clients, axes, specs, shape, devices, clients=3, group=True)
    assert found == [[]] * 3


@pytest.mark.parametrize("kind", ["shape", "rank", "dtype", "count", "kind"])
def test_components_that_disagree(pool, kind):
    answers = pool.run(client_cases.pack_differently, 3, kind, clients=3, group=True)
    expected = "LayoutTypeError" if kind == "kind" else "ComponentError"
    assert {answer.error for answer in answers} == {expected}, answers
    assert len({answer.text for answer in answers}) == 1, answers
    assert max(answer.seconds for answer in answers) < 5


def test_pending_reductions_over_clients(pool):
    found = pool.values(client_cases.sum_over_clients, 3, clients=3, group=True)
    assert found == [[111.0, 111.0, 222.0]] * 3


# --- PyTorch's DTensors ---


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("clients", "mesh", "placements"), [(2, (2,), [0]), (4, (2, 2), [0, 1]), (4, (4,), [1]), (4, (2, 2), [0, 0])]
)
@pytest.mark.parametrize(
    ("new_clients", "new_mesh", "new_placements"), [(3, (3,), [0]), (4, (2, 2), [1, None]), (4, (2, 2), [None, 1])]
)
def test_torch_dtensors(pool, tmp_path, clients, mesh, placements, new_clients, new_mesh, new_placements):
    shape = (10, 7)
    pool.values(client_cases.torch_save, f"{tmp_path}/s", mesh, placements, shape, clients=clients, group=True)
    found = pool.values(
        client_cases.torch_restore,
        f"{tmp_path}/s",
        new_mesh,
        new_placements,
        shape,
        clients=new_clients,
        group=True,
    )
    assert found == [(True, 3)] * new_clients


def test_the_pool_itself(pool):
    answers = pool.run(client_cases.fail, clients=2)
    assert [answer.error for answer in answers] == ["ZeroDivisionError"] * 2
    assert to_wire(ZeroDivisionError("x"))[0] == "ClientFailedError"
    assert pool.values(client_cases.who, clients=3) == [(0, 3), (1, 3), (2, 3)]
    first = pool.values(client_cases.pid, clients=2)
    assert pool.values(client_cases.pid, clients=2) == first
    assert pool.run(client_cases.die, clients=2)[0].has_died
    assert set(pool.values(client_cases.pid, clients=2)).isdisjoint(first)
