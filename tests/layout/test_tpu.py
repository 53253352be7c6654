"""TPU cores as devices, with what stands in for `torch_xla`."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dtckpt import create_mesh, initialize_tpu_system, num_local_devices, shutdown_tpu_system
from dtckpt.comm.torch_device import device_of
from dtckpt.errors import ConfigError, DeviceNotFoundError, DtckptError
from dtckpt.layout.clients import virtual_devices


@pytest.fixture
def torch_xla(monkeypatch):
    """Have a ``torch_xla`` that finds some devices of some type."""

    def install(device_type, count):
        runtime = SimpleNamespace(device_type=lambda: device_type, addressable_device_count=lambda: count)
        monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
        monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)

    return install


def test_cores_are_devices_until_the_system_is_shut_down(torch_xla):
    torch_xla("TPU", 4)
    assert num_local_devices("TPU") == 0
    initialize_tpu_system()
    mesh = create_mesh({"x": 4}, device_type="TPU")
    assert [device_of(name) for name in mesh.local_devices()] == [torch.device("xla", index) for index in range(4)]
    initialize_tpu_system()
    shutdown_tpu_system()
    assert num_local_devices("TPU") == 0


def test_arguments_are_tensorflows(torch_xla):
    torch_xla("TPU", 4)
    with virtual_devices():
        assert initialize_tpu_system("tpu", enable_coordination_service=False, num_logical_cpu_devices=3) == "TPU"
        assert (num_local_devices("TPU"), num_local_devices("CPU")) == (4, 3)
        with pytest.raises(ConfigError, match="got device type 'GPU', expected 'TPU' or None"):
            initialize_tpu_system("GPU")


@pytest.mark.parametrize("call", [initialize_tpu_system, shutdown_tpu_system])
def test_without_a_tpu(monkeypatch, torch_xla, call):
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", None)
    with pytest.raises(
        DeviceNotFoundError, match=r"got no working torch_xla .*; install torch_xla on a machine with TPUs"
    ):
        call()
    torch_xla("CPU", 1)
    with pytest.raises(DeviceNotFoundError, match="got CPU as device type of torch_xla, expected TPU"):
        call()
    assert issubclass(DeviceNotFoundError, (DtckptError, RuntimeError))
