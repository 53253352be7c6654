"""Restores into modules, optimizers and objects that are fresh, on the meta device, or of another size."""

import itertools

import pytest
import torch
from support.torch_versions import needs_tested_dtensors

from . import target_cases as cases

pytestmark = pytest.mark.processes

RUNS = [("fsdp2", "foreach"), ("fsdp2", "momentum"), ("ours", "foreach"), ("ours", "fused"), ("fsdp2+tp", "foreach")]


@pytest.fixture(scope="module", params=RUNS, ids=" ".join)
def run(request, pool, tmp_path_factory):
    """A saved run of 4 clients: path, kind of model, optimizer, and the losses of the steps after the save."""
    kind, optimizer = request.param
    path = str(tmp_path_factory.mktemp("run") / "step")
    losses, *others = pool.values(cases.save_run, path, kind, optimizer, clients=4, group=True)
    assert others == [losses] * 3
    return path, kind, optimizer, losses


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["objects", "app", "raw"])
def test_training_goes_on_bit_for_bit(pool, run, form):
    path, kind, optimizer, losses = run
    assert pool.values(cases.restore_run, path, kind, optimizer, form, clients=4, group=True) == [([], losses)] * 4


@pytest.mark.share(2)
@pytest.mark.parametrize("is_meta", [False, True], ids=["", "meta"])
def test_any_number_of_clients_goes_on(pool, run, is_meta):
    path, kind, optimizer, _ = run
    counts = (4, 2) if kind == "fsdp2+tp" else (4, 1, 2, 3)
    answers = [
        pool.values(cases.contents_of, path, kind, optimizer, is_meta=is_meta, clients=count, group=True)
        for count in counts
    ]
    first, *others = itertools.chain.from_iterable(answers)
    assert len(first) > 8
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_modules_on_the_meta_device_get_memory(pool, run):
    path, kind, optimizer, losses = run
    answers = pool.values(cases.restore_run, path, kind, optimizer, "objects", is_meta=True, clients=4, group=True)
    assert answers == [([], losses)] * 4


def test_pytorch_dtensors_are_made_and_assigned(pool, run):
    path, kind, _, _ = run
    if kind == "fsdp2":
        for clients in (4, 3, 2, 1):
            assert pool.values(cases.faults_of_assigned, path, clients=clients, group=True) == [[]] * clients


def test_layouts_of_pytorch_dtensors(pool, tmp_path):
    assert pool.values(cases.faults_of_torch_layouts, str(tmp_path / "saved"), clients=4, group=True) == [[]] * 4


def test_a_mesh_is_not_converted_for_each_tensor(pool, tmp_path):
    for counts in pool.values(cases.conversions_of_mesh, str(tmp_path / "saved"), clients=2, group=True):
        assert max(counts) <= 4, counts


@needs_tested_dtensors
def test_memory_is_shared_with_pytorch(pool):
    assert pool.values(cases.faults_of_sharing, clients=4, group=True) == [[]] * 4


@needs_tested_dtensors
def test_what_is_half_ours_and_half_pytorchs_is_refused(pool, tmp_path):
    for errors in pool.values(cases.errors_of_mixed_libraries, str(tmp_path / "saved"), clients=2, group=True):
        mesh_errors, (holding, saving) = errors[:3], errors[3:]
        assert all(
            "MeshTypeError" in error and "DeviceMesh of PyTorch only; pass mesh.to_device_mesh()" in error
            for error in mesh_errors
        ), mesh_errors
        assert holding.startswith("LayoutError: PyTorch's fully_shard got a module that holds DTensors of dtckpt")
        assert "tensor 'inner/w': got a DTensor of PyTorch whose local part is a DTensor of dtckpt" in saving
    assert not (tmp_path / "saved").exists()


def test_pytorch_refuses_a_backward_pass_with_values_of_before(pool, tmp_path):
    errors = pool.values(cases.error_of_stale_values, str(tmp_path / "saved"), clients=2, group=True)
    assert all("has been modified by an inplace operation" in error for error in errors), errors
