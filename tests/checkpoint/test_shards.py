"""`Shards`: plain tensors that are parts of global ones are saved by some clients, and restored by others."""

import pytest
import torch
from support import shards_cases as cases
from torch import nn

import dtckpt
from dtckpt import Shards
from dtckpt.errors import ComponentError, ConfigError, LayoutError, LayoutTypeError, MeshError


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["group", "torch mesh", "mesh"])
@pytest.mark.parametrize("is_async", [False, True])
def test_parts_come_back_on_any_number_of_clients(pool, tmp_path, kind, is_async):
    path = f"{tmp_path}/s"
    pool.values(cases.save_tree, path, kind, is_async=is_async, clients=4, group=True)
    back = dtckpt.restore(path)
    assert [back[name].equal(cases.whole(*shape)) for name, shape in {"rows": (8, 3), "columns": (3, 8)}.items()]
    assert back["uneven"].equal(cases.whole(7, 2))
    for clients in (1, 2, 3 if kind == "group" else 4):
        if clients != 3:
            assert pool.values(cases.restore_tree, path, kind, clients=clients, group=True) == [[]] * clients


# On 4 clients: 2 groups of 2, so that every expert is on two clients, whole or, by FSDP2, half of it on each.
RESUMES = [(4, 2), (4, 4), (2, 2), (2, 1), (1, 1)]


@pytest.mark.processes
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_stacked_experts_resume_on_any_number_of_clients(pool, tmp_path, is_sharded, is_async):
    path = f"{tmp_path}/s"
    facts = {"is_sharded": is_sharded, "group": True}
    if not is_sharded:
        ep = 4  # nobody averages gradients, so there is one group only
        resumes = [(clients, clients) for clients in (4, 2, 1)]
    else:
        ep, resumes = 2, RESUMES
    losses = pool.values(cases.save_training, path, ep, "stacked", is_async=is_async, clients=4, **facts)
    back = dtckpt.restore(path)
    assert back["model"]["experts.w"].shape == (cases.EXPERTS, cases.WIDTH, cases.HIDDEN)
    assert back["optimizer"]["state"][0]["exp_avg"].shape == (cases.EXPERTS, cases.WIDTH, cases.HIDDEN)
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
def test_experts_with_names_of_their_own_need_no_shards(pool, tmp_path):
    path, facts = f"{tmp_path}/s", {"is_sharded": True, "group": True}
    losses = pool.values(cases.save_training, path, 2, "named", clients=4, **facts)
    for clients, ep in RESUMES:
        found = pool.values(cases.resume_training, path, ep, "named", clients=clients, **facts)
        assert found == [pytest.approx(losses[0], rel=1e-5)] * clients
