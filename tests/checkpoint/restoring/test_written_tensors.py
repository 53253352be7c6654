"""A restore writes to memory that graphs and views know: autograd refuses what needs the values of before."""

import pytest
import torch
from torch import nn

import dtckpt
from dtckpt.dtensor import Shard, distribute_tensor

VALUES = torch.arange(12.0).reshape(4, 3)


def ours():
    dtckpt.configure_virtual_devices("CPU", 2)
    return distribute_tensor(VALUES.clone(), dtckpt.create_mesh({"x": 2}), [Shard(1)])


@pytest.mark.parametrize("make", [VALUES.clone, ours])
@pytest.mark.parametrize("target_of", [lambda each: each, torch.Tensor.detach], ids=["parameter", "detached"])
def test_a_backward_pass_with_values_of_before_is_refused(tmp_path, make, target_of):
    weight = nn.Parameter(make())
    dtckpt.save(tmp_path / "s", {"w": VALUES + 1})
    loss = (weight * weight).sum()
    dtckpt.restore(tmp_path / "s", {"w": target_of(weight)})
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    gradient = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
    assert gradient.equal(2 * (VALUES + 1))


def test_views_with_values_of_their_own_follow(tmp_path):
    source = ours()
    view = source.view(-1)
    dtckpt.save(tmp_path / "s", {"w": VALUES + 1})
    dtckpt.restore(tmp_path / "s", {"w": source})
    assert view.full_tensor().equal((VALUES + 1).view(-1))
    with pytest.raises(dtckpt.errors.LayoutError, match="'w' is a view whose values are not in the memory"):
        dtckpt.restore(tmp_path / "s", {"w": view.view(4, 3)})


def test_tensors_of_inference_mode(tmp_path):
    dtckpt.save(tmp_path / "s", {"w": VALUES})
    with torch.inference_mode():
        target = torch.zeros(4, 3)
    dtckpt.restore(tmp_path / "s", {"w": target})
    assert target.equal(VALUES)
