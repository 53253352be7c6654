"""`DeviceMesh` and `init_device_mesh`: refusals and results, in one process."""

import numpy as np
import pytest
import torch

from dtckpt.errors import CoordinationError, MeshError, MeshTypeError
from dtckpt.layout import device_mesh
from dtckpt.layout.create_mesh import create_distributed_mesh
from dtckpt.layout.device_mesh import DeviceMesh, init_device_mesh
from dtckpt.layout.mesh import Mesh


@pytest.fixture
def world(monkeypatch):
    """Have as many ranks as is said, this being one of them, without a process group."""

    def set_up(size, rank=0):
        monkeypatch.setattr(device_mesh, "_world_size", lambda device_type: size)
        monkeypatch.setenv("DTENSOR_CLIENT_ID", str(rank))
        monkeypatch.setenv("DTENSOR_NUM_CLIENTS", str(size))

    return set_up


RANKS = [[4, 1, 0], [2, 3, 7]]


@pytest.mark.parametrize(
    "mesh",
    [RANKS, tuple(map(tuple, RANKS)), np.array(RANKS, np.int32), torch.tensor(RANKS), torch.tensor(RANKS).byte()],
)
def test_ranks_may_be_sequences_arrays_or_tensors(world, mesh):
    world(8, 2)
    mesh = DeviceMesh("cpu", mesh, mesh_dim_names=("a", "b"))
    assert (mesh.mesh.tolist(), mesh.shape, mesh.mesh_dim_names) == (RANKS, (2, 3), ("a", "b"))
    assert (mesh.get_coordinate(), mesh.get_rank(), mesh.get_local_rank("a")) == ((1, 0), 2, 1)
    assert mesh.device_type == "cpu"


def test_every_client_makes_the_same_mesh(world):
    meshes = []
    for rank in range(8):
        world(8, rank)
        meshes.append(DeviceMesh("cpu", RANKS))
        assert (meshes[-1].get_coordinate() is None) == (rank in (5, 6))
    assert len(set(meshes)) == 1
    assert meshes[0].mesh_dim_names == ("dim_0", "dim_1")


def test_the_same_devices_make_the_same_mesh(world):
    world(6, 3)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=["dp", "tp"])
    assert mesh == DeviceMesh("cpu", torch.arange(6).reshape(3, 2), mesh_dim_names=("dp", "tp"))
    assert mesh == create_distributed_mesh({"dp": 3, "tp": 2})


def test_meshes_are_instances_and_nothing_else_is(world):
    world(2)
    mesh = init_device_mesh("cpu", (2,))
    assert type(mesh) is Mesh
    assert isinstance(mesh, DeviceMesh)
    assert isinstance(create_distributed_mesh({"x": 2}), DeviceMesh)
    assert not isinstance([0, 1], DeviceMesh)
    assert issubclass(Mesh, DeviceMesh)
    assert not issubclass(int, DeviceMesh)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")), r"expected each name once"),
        (
            lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a",)),
            r"got 1 mesh_dim_names \('a',\) for mesh_shape",
        ),
        (
            lambda: init_device_mesh("cuda:0", (2,)),
            "got device type 'cuda:0', expected one of cpu, cuda without an index",
        ),
        (lambda: init_device_mesh("abacus", (2,)), "got device type 'abacus', expected one of cpu, cuda$"),
        (lambda: init_device_mesh("cpu", (3, 2)), "got 6 ranks up to 5, expected no more than the 4"),
        (lambda: init_device_mesh("cpu", ()), r"got mesh_shape \(\), expected at least one size"),
        (lambda: init_device_mesh("cpu", (2, 0)), "each at least 1"),
        (lambda: init_device_mesh("cpu", (-1,)), "each at least 1"),
        (lambda: DeviceMesh("cpu:0", [0]), "got device type 'cpu:0'"),
        (lambda: DeviceMesh("cpu", [[0, 1], [1, 2]]), "got ranks 1 more than once"),
        (lambda: DeviceMesh("cpu", [0, 1, 0, 1]), "got ranks 0, 1 more than once"),
        (lambda: DeviceMesh("cpu", [0, 4]), "got 2 ranks up to 4"),
        (lambda: DeviceMesh("cpu", [-1, 0]), "got rank -1"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "of uneven lengths"),
        (lambda: DeviceMesh("cpu", []), "at least one"),
        (lambda: DeviceMesh("cpu", torch.tensor(3)), "at least one, or nested"),
        (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")), "got 2 mesh_dim_names"),
        (lambda: DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "a")), "each name once"),
        (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a b",)), "axis name"),
    ],
)
def test_refusals(world, call, text):
    for rank in range(4):
        world(4, rank)
        with pytest.raises(MeshError, match=text):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: init_device_mesh("cpu", 4),
        lambda: init_device_mesh("cpu", (2.0,)),
        lambda: init_device_mesh(torch.device("cpu"), (2,)),
        lambda: init_device_mesh("cpu", (2,), mesh_dim_names="a"),
        lambda: DeviceMesh("cpu", [0.0, 1.0]),
        lambda: DeviceMesh("cpu", [True, False]),
        lambda: DeviceMesh("cpu", None),
        lambda: Mesh.from_device_mesh([0, 1]),
    ],
)
def test_wrong_types(world, call):
    world(4)
    with pytest.raises(MeshTypeError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize(
    ("gpus", "local_world_size", "expected"),
    [
        (0, None, [0, 0, 0, 0]),
        (1, None, [0, 0, 0, 0]),
        (4, None, [0, 1, 2, 3]),
        (2, None, [0, 1, 0, 1]),
        (4, 4, [0, 1, 2, 3]),
        (4, 2, [0, 2, 0, 2]),
        (4, 1, [0, 0, 0, 0]),
        (1, 4, [0, 0, 0, 0]),
    ],
)
def test_gpus(monkeypatch, world, gpus, local_world_size, expected):
    world(4)
    if local_world_size:
        monkeypatch.delenv("DTENSOR_CLIENT_ID")
        monkeypatch.delenv("DTENSOR_NUM_CLIENTS")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(device_mesh, "_choose_gpu", lambda mesh: None)
    mesh = init_device_mesh("cuda", (4,))
    assert mesh.device_type == "cuda"
    assert [int(name.rpartition(":")[2]) for name in mesh.global_devices()] == expected
    if gpus == local_world_size == 4:
        assert mesh.flatten(name="x") == create_distributed_mesh({"x": 4}, device_type="GPU")


def test_one_client_alone_needs_no_process_group():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert (mesh.get_coordinate(), mesh.get_rank()) == ((0, 0), 0)
    assert not torch.distributed.is_initialized()
    with pytest.raises(CoordinationError, match=r"got clients 0, expected .* default process group"):
        mesh.get_group("a")
    with pytest.raises(MeshError, match="expected no more than the 1 of the world; start as many clients, or use"):
        init_device_mesh("cpu", (2,))


def test_a_process_group_that_cannot_be_made(monkeypatch):
    monkeypatch.setenv("DTENSOR_NUM_CLIENTS", "2")
    with pytest.raises(MeshError, match=r"none could be made \(.*got no MASTER_ADDR.*init_process_group before"):
        init_device_mesh("cpu", (2,))


def test_groups_of_several_axes_need_the_ranks():
    with pytest.raises(MeshError, match="got 0 groups without mesh"):
        DeviceMesh.from_group([], "cpu")
