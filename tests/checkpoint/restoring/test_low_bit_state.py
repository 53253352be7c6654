"""State of optimizers in tensors of wrapper subclasses: exact in fresh optimizers, whole and in shards, or refused."""

import pytest
import torch

import dtckpt
from dtckpt.errors import TreeError

from . import low_bit


def test_a_run_resumes(tmp_path):
    assert low_bit.resumes(f"{tmp_path}/s") == [True, True]


@pytest.mark.processes
def test_shards_resume_on_the_same_mesh(pool, tmp_path):
    assert pool.values(low_bit.resumes, f"{tmp_path}/s", is_sharded=True, clients=2, group=True) == [[True, True]] * 2


@pytest.mark.processes
def test_shards_of_another_mesh_are_refused_before_anything_is_written(pool, tmp_path):
    pool.values(low_bit.resumes, f"{tmp_path}/s", is_sharded=True, clients=2, group=True)
    for is_sharded in (False, True):
        ((kind, text, is_same),) = pool.values(
            low_bit.refusal, f"{tmp_path}/s", is_sharded=is_sharded, clients=1, group=True
        )
        assert (kind, is_same) == ("TreeError", True)
        assert "optimizer/state/model/0.weight/momentum" in text
        assert "expected [[2], ['S(0)']]" in text


def test_a_class_that_the_optimizer_does_not_have_is_refused(tmp_path):
    """No name in a checkpoint reaches a class of another package."""
    model, optimizer = low_bit.model_and_optimizer()
    low_bit.train(model, optimizer, 0, 1)
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(TreeError, match=r"'optimizer/state/model/0\.weight/momentum.*class LowBit, which a fresh SGD"):
        dtckpt.restore(tmp_path / "s", {"model": model, "optimizer": other})
