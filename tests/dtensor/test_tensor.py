"""Methods of DTensors that PyTorch would run on memory that a DTensor does not have."""

import numpy as np
import pytest
import torch
from torch import nn

from dtckpt import DTensor, Layout, Shard, abstract_mesh
from dtckpt.dtensor import copy_to_mesh
from dtckpt.errors import OperatorError

ROWS = Layout(["x"], abstract_mesh({"x": 2}))


def sharded() -> torch.Tensor:
    return copy_to_mesh(torch.arange(8.0), ROWS)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.int64, "requires_grad": False}], ids=["as it is", "options"])
def test_new_tensors_are_plain_ones(options):
    plain = torch.arange(8.0)
    for data in (2.5, [1, 2]):
        one, other = sharded().new_tensor(data, **options), plain.new_tensor(data, **options)
        assert type(one) is torch.Tensor
        torch.testing.assert_close(one, other)
    assert sharded().new(2, 3).shape == (2, 3)
    assert sharded().new([1.0]).tolist() == [1.0]


def test_truncated_normal_values():
    """PyTorch's function asks for the bounds in the dtype of the tensor."""
    tensor = nn.init.trunc_normal_(sharded(), a=-0.5, b=0.5)
    assert tensor.layout == ROWS
    assert (tensor.abs() <= 0.5).all()


def test_components_move_to_shared_memory():
    tensor = sharded()
    assert not tensor.is_shared()
    assert tensor.share_memory_() is tensor
    assert tensor.is_shared()
    assert all(component.is_shared() for component in tensor.components)
    assert tensor.tolist() == list(range(8))


def test_modules_move_to_shared_memory():
    parameters = nn.ParameterList([nn.Parameter(sharded())])
    assert parameters.share_memory()[0].is_shared()


@pytest.mark.parametrize(
    "use",
    [torch.from_dlpack, np.from_dlpack, lambda tensor: tensor.apply_(abs)],
    ids=["torch.from_dlpack", "numpy.from_dlpack", "apply_"],
)
def test_memory_is_not_handed_out(use):
    with pytest.raises(OperatorError, match=r"to_local|local_map"):
        use(sharded())


def test_strides_may_be_a_list():
    mesh = abstract_mesh({"x": 1})
    for _ in range(2):  # the second one takes the shape of the first one for granted
        assert DTensor.from_local(torch.ones(3, 2).t(), mesh, [Shard(0)], stride=[1, 2]).stride() == (1, 2)
