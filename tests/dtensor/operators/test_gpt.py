"""A GPT of ordinary PyTorch code learns the same on a mesh as on one device."""

from __future__ import annotations

from functools import cache

import pytest
from support.shares import amount
from support.states import gpu_mesh, needs_gpu

from dtckpt import abstract_mesh
from dtckpt.dtensor import init_device_mesh
from examples.gpt import train

STEPS = amount(25, 50)
STEPS_OF_CLIENTS = amount(12, STEPS)
TOLERANCE = 1e-3
"""Sums are made in another order on every mesh, and many steps of AdamW carry the differences on."""


@cache
def on_one_device() -> list[float]:
    return train(abstract_mesh({"data": 1, "model": 1}), STEPS)


def train_over_clients(steps: int) -> list[float]:
    return train(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model")), steps)


def test_it_learns():
    losses = on_one_device()
    assert losses[-1] < amount(0.8, 0.6) * losses[0]


@pytest.mark.share(1)
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"data": 1, "model": 4}, {"data": 3, "model": 1}])
def test_virtual_devices_learn_the_same(axes):
    assert train(abstract_mesh(axes), STEPS) == pytest.approx(on_one_device(), rel=TOLERANCE)


@pytest.mark.parametrize("make_mesh", [pytest.param(gpu_mesh, marks=needs_gpu)])
def test_devices_that_share_a_gpu_learn_the_same(make_mesh):
    # Kernels there add up in another order, and may round random numbers in another way.
    assert train(make_mesh({"data": 2, "model": 2}), STEPS) == pytest.approx(on_one_device(), rel=1e-2)


@pytest.mark.share(1, of="programs that learn over clients")
@pytest.mark.processes
def test_clients_learn_the_same(pool):
    for losses in pool.values(train_over_clients, STEPS_OF_CLIENTS, clients=4, group=True, timeout_s=250):
        assert losses == pytest.approx(on_one_device()[:STEPS_OF_CLIENTS], rel=TOLERANCE)
