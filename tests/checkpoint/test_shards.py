"""`Shards`: plain tensors that are parts of global ones are saved by some clients, and restored by others."""

import copy
import gc

import pytest
import torch
from torch import nn

import dtckpt
from dtckpt import Shards
from dtckpt.checkpoint.shards import mark_of, shard_marks
from dtckpt.errors import ConfigError, MeshError, TensorNotFoundError, TreeError
from dtckpt.interop.dcp.state_items import encode_item

from . import shards_cases as cases


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["group", "torch mesh", "mesh", "half"])
@pytest.mark.parametrize("is_async", [False, True])
def test_parts_come_back_on_any_number_of_clients(pool, tmp_path, kind, is_async):
    path = f"{tmp_path}/s"
    pool.values(cases.save_tree, path, kind, is_async=is_async, clients=4, group=True)
    back = dtckpt.restore(path)
    assert all(back[name].equal(cases.whole(*shape)) for name, shape in cases.SHAPES.items())
    for clients in (1, 2, 4):
        assert pool.values(cases.restore_tree, path, kind, clients=clients, group=True) == [[]] * clients


@pytest.mark.processes
def test_a_manager_takes_them(pool, tmp_path):
    assert pool.values(cases.managed, f"{tmp_path}/r", is_first=True, clients=4, group=True) == [[0, 1]] * 4
    assert pool.values(cases.managed, f"{tmp_path}/r", is_first=False, clients=2, group=True) == [[1]] * 2


@pytest.mark.processes
def test_parts_of_other_sizes_are_refused_on_every_client(pool, tmp_path):
    path = f"{tmp_path}/s"
    first, second = pool.values(cases.save_sizes, path, (4, 3), None, clients=2, group=True)
    assert first == second
    assert first.startswith("ComponentError: ")
    assert "got shape (8, 2) float32 and shape (6, 2) float32" in first
    assert "here of shapes (4, 2) and (3, 2), need size=" in first
    # Sizes are valid if `torch.chunk` makes them: 4 and 3, but not 3 and 4.
    first, second = pool.values(cases.save_sizes, path, (3, 4), 7, clients=2, group=True)
    assert first == second
    part, got, expected = (0, 3, 4) if "client 0: " in first else (1, 4, 3)  # the client whose vote came first
    assert first.startswith(
        f"ComponentError: client {part}: tensor 'w': got {got} along dim 0 on the client with part {part}, "
        f"expected {expected}: parts of 7 have the sizes 4, 3"
    )
    assert pool.values(cases.save_sizes, path, (4, 3), 7, clients=2, group=True) == ["none"] * 2
    for size in (None, 7):
        first, second = pool.values(cases.restore_sizes, path, (3, 4), size, clients=2, group=True)
        assert first == second
        assert first.startswith("ShapeMismatchError: " if size is None else "ComponentError: ")


@pytest.mark.processes
@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize("has_own_shapes", [False, True])
def test_errors_about_copies_name_the_cure(pool, tmp_path, is_module, has_own_shapes):
    facts = {"is_module": is_module, "has_own_shapes": has_own_shapes}
    first, second = pool.values(cases.save_unmarked, f"{tmp_path}/s", **facts, clients=2, group=True)
    assert first == second
    assert first.startswith("ComponentError: " if has_own_shapes else "ReplicaMismatchError: ")
    cures = [cure for cure in ("Shards", "PerClient", "other names") if cure in first]
    if has_own_shapes:
        assert cures == (["Shards", "other names"] if is_module else ["other names"])
    else:
        assert cures == (["Shards"] if is_module else ["PerClient"])


@pytest.mark.processes
@pytest.mark.parametrize(("rows", "dim"), [(8, 0), (6, 0), (7, 0), (5, 1)])
def test_parts_that_are_sharded_themselves(pool, tmp_path, rows, dim):
    path = f"{tmp_path}/s"
    pool.values(cases.save_nested, path, rows, dim, clients=4, group=True)
    assert dtckpt.restore(path)["w"].equal(cases.whole(rows, 6))
    for clients in (2, 4):
        assert pool.values(cases.restore_nested, path, rows, dim, clients=clients, group=True) == [True] * clients


@pytest.mark.processes
def test_meshes_that_cannot_hold_parts(pool):
    for client, found in enumerate(pool.values(cases.refused_meshes, clients=4, group=True)):
        axes, outside, kind, value, twice, apart, dim = found
        assert axes.startswith("MeshError: Shards: got a mesh of axes ")
        assert (
            outside == "none"
            if client < 2
            else outside.startswith("MeshError: Shards: this client is not in the group")
        )
        assert kind.startswith("MeshTypeError: ")
        assert value.startswith("LayoutTypeError: Shards: got list")
        assert twice.startswith("LayoutError: tensor 'w' is split along axis 'ep' already")
        assert apart.startswith("LayoutError: tensor 'w' lies on ")
        assert dim.startswith("LayoutError: tensor 'w': Shards got dim 1")


@pytest.mark.processes
def test_state_of_parameters_that_has_fewer_elements(pool, tmp_path):
    path = f"{tmp_path}/s"
    pool.values(cases.save_factored, path, clients=4, group=True)
    assert dtckpt.restore(path)["optimizer"]["state"]["model/w"]["rows"].shape == (4, 2, 1)
    for clients in (1, 2, 4):
        assert pool.values(cases.restore_factored, path, clients=clients, group=True) == [True] * clients


@pytest.mark.processes
def test_marks_are_found_in_wrappers_and_parts(pool):
    (names,) = pool.values(cases.wrapped_marks, clients=1, group=True)
    assert names == [
        "compiled/_orig_mod.moe.experts.bias",
        "compiled/_orig_mod.moe.experts.weight",
        "ddp/module.moe.experts.bias",
        "ddp/module.moe.experts.weight",
        "model/moe.experts.bias",
        "model/moe.experts.weight",
        "part/experts.bias",
        "part/experts.weight",
    ]


def test_a_pattern_without_a_parameter_is_refused():
    with pytest.raises(
        ConfigError, match=r"no parameter or buffer of Linear matches 'experts\.\*'; got 'weight', 'bias'"
    ):
        Shards.mark(nn.Linear(2, 2), "experts.*", dtckpt.create_mesh({"ep": 1}))


def test_a_mark_lasts_as_long_as_its_module():
    mesh, module = dtckpt.create_mesh({"ep": 1}), nn.Linear(2, 2)
    Shards.mark(module, "weight", mesh, -1)
    assert (mark_of(module.weight).dim, mark_of(module.bias), mark_of(copy.deepcopy(module).weight)) == (-1, None, None)
    assert len(shard_marks()) == 1
    del module
    gc.collect()
    assert shard_marks() == {}


def test_a_target_on_the_meta_device_gets_memory(tmp_path):
    mesh = dtckpt.create_mesh({"ep": 1})
    dtckpt.save(tmp_path / "s", {"w": Shards(torch.arange(6.0), mesh)})
    target = {"w": Shards(torch.empty(6, device="meta"), mesh)}
    assert dtckpt.restore(tmp_path / "s", target)["w"] is target["w"]
    assert target["w"].tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_item_of_dcp_cannot_be_one():
    mesh = dtckpt.create_mesh({"ep": 1})
    with pytest.raises(TreeError, match=r"'w'.* holds the sharded tensor 'w'; put a DTensor"):
        encode_item(Shards(torch.ones(2), mesh), "w", ("w",))


def test_a_client_with_several_devices_is_refused():
    with pytest.raises(MeshError, match="expected one device per client"):
        Shards(torch.ones(2), dtckpt.abstract_mesh({"ep": 2}))


# On 4 clients: 2 groups of 2, so that every expert is on two clients, whole or, by FSDP2, half of it on each.
RESUMES = [(4, 2), (4, 4), (2, 2), (2, 1), (1, 1)]


@pytest.mark.share(2)
@pytest.mark.processes
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_stacked_experts_resume_on_any_number_of_clients(pool, tmp_path, is_sharded, is_async):
    path = f"{tmp_path}/s"
    facts = {"is_sharded": is_sharded, "group": True}
    if not is_sharded:
        ep = 4  # gradients are not averaged, so there is one group only
        resumes = [(clients, clients) for clients in (4, 2, 1)]
    else:
        ep, resumes = 2, RESUMES
    losses = pool.values(cases.save_training, path, ep, "stacked", is_async=is_async, clients=4, **facts)
    back = dtckpt.restore(path)
    assert back["model"]["experts.w"].shape == (cases.EXPERTS, cases.WIDTH, cases.HIDDEN)
    assert back["optimizer"]["state"]["model/experts.w"]["exp_avg"].shape == (cases.EXPERTS, cases.WIDTH, cases.HIDDEN)
    for clients, ep in resumes:
        for is_fresh in (True, False):
            found = pool.values(cases.resume_training, path, ep, "stacked", is_fresh=is_fresh, clients=clients, **facts)
            assert found == [pytest.approx(losses[0], rel=1e-5)] * clients
            assert clients != 4 or ep != 2 or found == losses


@pytest.mark.processes
@pytest.mark.parametrize("is_sharded", [False, True])
def test_stacked_experts_on_the_meta_device(pool, tmp_path, is_sharded):
    path, ep = f"{tmp_path}/s", 2 if is_sharded else 4
    losses = pool.values(cases.save_training, path, ep, "stacked", is_sharded=is_sharded, clients=4, group=True)
    found = pool.values(
        cases.resume_training, path, 2, "stacked", is_sharded=is_sharded, on_meta=True, clients=2, group=True
    )
    assert found == [pytest.approx(losses[0], rel=1e-5)] * 2


@pytest.mark.processes
@pytest.mark.parametrize("is_sharded", [False, True])
def test_unmarked_experts_are_refused(pool, tmp_path, is_sharded):
    path = f"{tmp_path}/s"
    for error in pool.values(cases.save_unmarked_experts, path, is_sharded=is_sharded, clients=4, group=True):
        assert error.startswith("ReplicaMismatchError: client 0: copies of ")
        assert "model/experts.w' must be equal" in error
        assert "dtckpt.Shards.mark(module, ...)" in error
        assert "PerClient" not in error


@pytest.mark.processes
def test_experts_with_names_of_their_own_need_no_shards(pool, tmp_path):
    path, facts = f"{tmp_path}/s", {"is_sharded": True, "group": True}
    losses = pool.values(cases.save_training, path, 2, "named", clients=4, **facts)
    for clients, ep in RESUMES:
        found = pool.values(cases.resume_training, path, ep, "named", clients=clients, **facts)
        assert found == [pytest.approx(losses[0], rel=1e-5)] * clients


def test_parts_that_a_checkpoint_lacks_are_named(tmp_path):
    mesh = dtckpt.create_mesh([("ep", 1)], device_type="CPU")
    dtckpt.save(tmp_path / "a", {"w": torch.ones(2)})
    target = {"w": torch.zeros(2), "experts": Shards(torch.ones(2, 2), mesh), "array": torch.ones(2).numpy()}
    with pytest.raises(TensorNotFoundError, match=r"array.*experts|experts.*array"):
        dtckpt.restore(tmp_path / "a", target)
