"""Gradient clipping and LBFGS of parameters on several meshes: in one process, and over clients."""

import pytest
import torch
from torch import nn

from dtckpt.dtensor.derived_layouts import mesh_of_all_clients

from .several_mesh_cases import faults_of_lbfgs, faults_of_norms, parameters, places, texts_of_infinite_norms

CLIENTS = 4


@pytest.mark.parametrize("foreach", [None, True, False])
def test_gradients_are_clipped_by_the_norm_of_all(foreach):
    assert faults_of_norms(foreach) == []


@pytest.mark.processes
@pytest.mark.parametrize("foreach", [None, False])
def test_every_client_has_the_norm_of_all(pool, foreach):
    assert pool.values(faults_of_norms, foreach, clients=CLIENTS, group=True) == [[]] * CLIENTS


def test_a_norm_that_is_not_finite_is_an_error():
    texts = texts_of_infinite_norms()
    assert len(texts) == len(places())
    assert set(texts) == {"The total norm of order 2.0 for gradients from `parameters` is non-finite"[:60]}


@pytest.mark.processes
def test_a_norm_that_is_not_finite_is_an_error_on_every_client(pool):
    one, *others = pool.values(texts_of_infinite_norms, clients=CLIENTS, group=True)
    assert others == [one] * 3
    assert len(one) == 4


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(line_search):
    assert faults_of_lbfgs(line_search) == []


@pytest.mark.processes
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_of_several_clients(pool, line_search):
    assert pool.values(faults_of_lbfgs, line_search, clients=CLIENTS, group=True) == [[]] * CLIENTS


def test_the_norm_is_on_a_mesh_of_all_clients():
    ours, _ = parameters(places()["two meshes"])
    norm = nn.utils.clip_grad_norm_(ours, 1.0)
    assert norm.device_mesh == mesh_of_all_clients([one.device_mesh for one in ours]) == ours[0].device_mesh


def test_clipping_of_plain_gradients_is_compiled_whole():
    _, plain = parameters(places()["two meshes"])
    compiled = torch.compile(lambda: nn.utils.clip_grad_norm_(plain, 1.0), fullgraph=True, backend="eager")
    assert compiled().item() > 1.0
