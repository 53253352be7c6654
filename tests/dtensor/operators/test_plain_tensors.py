"""Plain tensors beside DTensors: how they come to the devices."""

import pytest
import torch
from support.states import gpu_mesh
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt import abstract_mesh
from dtckpt.dtensor.operators import plain_tensors
from dtckpt.dtensor.operators.plain_tensors import to_dtensors


class Calls(TorchDispatchMode):
    """Counts what brings tensors to other devices."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::_to_copy", "aten::fill_.Tensor", "aten::clone"):
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda: torch.zeros(3), ["_to_copy", "_to_copy", "clone", "clone"]),
        (lambda: torch.tensor(2.5), ["fill_.Tensor", "fill_.Tensor", "clone", "clone"]),
        (lambda: torch.ones((), device="cuda:1"), ["_to_copy", "clone", "clone"]),
    ],
)
def test_each_gpu_gets_them_once_and_numbers_without_a_copy(monkeypatch, make, calls):
    # Four mesh devices share two GPUs.
    monkeypatch.setattr(plain_tensors, "device_of", lambda name: torch.device("cuda", int(name[-1]) % 2))
    mesh = gpu_mesh({"x": 4})
    with FakeTensorMode():
        tensor = make()
        with Calls() as made:
            (dtensor,) = to_dtensors([tensor], mesh)
        components = dtensor.components
    assert made.names == calls
    assert [component.device.index for component in components] == [0, 1, 0, 1]
    assert {(component.shape, component.dtype) for component in components} == {(tensor.shape, tensor.dtype)}
    assert len({component.untyped_storage()._cdata for component in components}) == 4


def test_each_device_has_its_own_memory_and_the_first_that_of_the_tensor():
    tensor = torch.arange(3.0)
    (dtensor,) = to_dtensors([tensor], abstract_mesh({"x": 3}))
    first, *others = dtensor.components
    assert first.data_ptr() == tensor.data_ptr()
    assert len({component.data_ptr() for component in dtensor.components}) == 3
    assert all(torch.equal(other, tensor) for other in others)
