"""Checkpoints of ``torch.distributed.checkpoint`` and files of ``torch.save``, restored as they are."""

import itertools

import numpy as np
import pytest
import torch

import dtckpt

from . import dcp_cases as cases

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["fsdp2", "fsdp2+tp"])
def run(request, pool, tmp_path_factory):
    """A run of 4 clients, saved by PyTorch and by this library: path, kind of model, losses of the steps after."""
    path = str(tmp_path_factory.mktemp("run"))
    losses, *others = pool.values(cases.save_dcp, path, request.param, clients=4, group=True)
    assert others == [losses] * 3
    return path, request.param, losses


def test_training_goes_on_bit_for_bit(pool, run):
    path, kind, losses = run
    assert pool.values(cases.restore_run, f"{path}/dcp", kind, clients=4, group=True) == [losses] * 4


def test_any_number_of_clients_restores_the_same(pool, run):
    path, kind, _ = run
    counts = (2,) if kind == "fsdp2+tp" else (1, 2, 3)
    answers = [pool.values(cases.contents_of, f"{path}/dcp", kind, clients=count, group=True) for count in counts]
    expected = pool.values(cases.loaded_by_torch, f"{path}/dcp", kind, clients=2, group=True)[0]
    assert len(expected) > 12
    for found in itertools.chain.from_iterable(answers):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_tensors_and_values_are_those_that_were_saved(run):
    path, _, _ = run
    with dtckpt.open_checkpoint(f"{path}/dcp") as found, dtckpt.open_checkpoint(f"{path}/ours") as expected:
        assert (found.format, found.refused) == ("dcp", {})
        assert found.tensors.keys() == expected.tensors.keys()
        for name, info in expected.tensors.items():
            assert (found.info(name).shape, found.info(name).dtype) == (info.shape, info.dtype)
            assert torch.equal(found.read(name), expected.read(name)), name
        # PyTorch has no keys but strings, and no empty containers.
        assert repr(sorted(found.values.items())) == repr(sorted(expected.values.items()))
    restored = dtckpt.restore(f"{path}/dcp")
    assert restored["betas"] == (0.9, 0.95)
    assert restored["random"]["python"] == cases.VALUES["random"]["python"]
    np.testing.assert_array_equal(restored["random"]["numpy"][1], cases.VALUES["random"]["numpy"][1])
    assert torch.equal(restored["pair"][0], torch.ones(2, 3))


def test_conversions_there_and_back(pool, run, tmp_path):
    path, kind, losses = run
    dtckpt.convert(f"{path}/dcp", tmp_path / "there")
    dtckpt.convert(tmp_path / "there", tmp_path / "back", to="dcp")
    with dtckpt.open_checkpoint(f"{path}/ours") as ours, dtckpt.open_checkpoint(tmp_path / "there") as there:
        assert {name: info.content_digest for name, info in there.tensors.items()} == {
            name: info.content_digest for name, info in ours.tensors.items()
        }
    back = str(tmp_path / "back")
    assert pool.values(cases.restore_run, back, kind, clients=4, group=True) == [losses] * 4
    expected = pool.values(cases.loaded_by_torch, f"{path}/dcp", kind, clients=2, group=True)[0]
    for found in pool.values(cases.loaded_by_torch, back, kind, clients=2, group=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_each_client_reads_its_part(pool, tmp_path):
    rows, columns = 64, 32768  # 8 MiB, in chunks of 2 MiB; half a row is too much to be read for nothing
    path = str(tmp_path / "large")
    pool.values(cases.save_large, path, rows, columns, clients=4, group=True)
    for clients, dim in ((4, 0), (2, 0), (3, 0), (2, 1)):
        read = pool.values(cases.bytes_read, path, rows, columns, dim, clients=clients, group=True)
        share = rows * columns * 4 / clients
        assert all(0.9 * share < each < 1.1 * share + (64 << 10) for each in read), (clients, dim, read)


def test_what_processes_saved_each_for_itself(pool, tmp_path):
    path = str(tmp_path / "alone")
    pool.values(cases.save_alone, path, clients=2, group=True)
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert "tensor 'bad' cannot be read: its pieces" in checkpoint.refused["bad"].message
    target = {
        "w": torch.zeros(7, 2),
        "same": torch.zeros(4),
        "plain": torch.zeros(2),
        "step": 0,
        "loader": {"position": None},
        "random": None,
        "pair": None,
        "only": "",
    }
    restored = dtckpt.restore(path, target, options=dtckpt.RestoreOptions(allow_unexpected=True))
    assert torch.equal(restored["w"], torch.arange(14.0).reshape(7, 2))
    assert torch.equal(restored["same"], torch.arange(4.0))
    assert (restored["step"], restored["only"], restored["loader"]["position"]) == (5, "here", {0: 0, 1: 10})
    for rank in range(2):
        assert torch.equal(restored["random"][rank], torch.full((3,), float(rank)))
        assert torch.equal(restored["pair"][rank][0], torch.full((2,), float(rank)))


def test_tensors_that_divide_badly(pool, tmp_path):
    path = str(tmp_path / "odd")
    pool.values(cases.save_odd_shapes, path, clients=4, group=True)
    for clients in (1, 2, 3):
        assert pool.values(cases.faults_of_odd_shapes, path, clients=clients, group=True) == [[]] * clients
