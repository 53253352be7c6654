import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtckpt.config import Config
from dtckpt.errors import ConfigError, ConfigTypeError, MeshError, MeshTypeError
from dtckpt.layout import clients
from dtckpt.layout.create_mesh import abstract_mesh, create_distributed_mesh, create_mesh
from dtckpt.layout.mesh import Mesh


def torchrun(rank, world, local_rank=None, local_world=None):
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
    return {name: str(value) for name, value in variables.items() if value is not None}


def test_torchrun(environment):
    environment(torchrun(2, 4))
    assert (clients.client_id(), clients.num_clients(), clients.job_name()) == (2, 4, "worker")
    assert clients.full_job_name() == "worker/replica:0/task:2"
    assert clients.jobs() == [f"worker/replica:0/task:{task}" for task in range(4)]
    assert clients.device_name() == "/job:worker/replica:0/task:2/device:CUSTOM:0"
    environment({"DTCKPT_JOB": "llm"})
    assert clients.job_name() == "llm"
    environment({"DTENSOR_JOB_NAME": "named"})
    assert clients.job_name() == "named"


def test_torchrun_with_one_client_is_local(environment):
    environment(torchrun(0, 1))
    assert (clients.num_clients(), clients.job_name(), clients.jobs()) == (1, "localhost", [])


def test_tensorflow_variables_win(environment):
    environment(torchrun(3, 4) | {"DTENSOR_JOBS": "a:1,b:2", "DTENSOR_CLIENT_ID": "1"})
    assert (clients.client_id(), clients.num_clients(), clients.jobs()) == (1, 2, ["a:1", "b:2"])


def test_number_of_clients_without_addresses(environment):
    environment({"DTENSOR_NUM_CLIENTS": "3", "DTENSOR_CLIENT_ID": "2"})
    assert (clients.client_id(), clients.num_clients(), len(clients.jobs())) == (2, 3, 3)


@pytest.mark.parametrize("stated", ["3", "1", "", "many"])
def test_addresses_tell_the_number_of_clients(environment, stated):
    environment({"DTENSOR_NUM_CLIENTS": stated, "DTENSOR_JOBS": "a:1,b:2", "DTENSOR_CLIENT_ID": "1"})
    assert (clients.client_id(), clients.num_clients(), clients.job_name()) == (1, 2, "worker")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: is not set, but RANK is; set both"),
        ({"WORLD_SIZE": "2"}, "RANK: is not set, but WORLD_SIZE is; set both"),
        (torchrun(4, 4), "RANK: got 4, expected an integer from 0 to 3"),
        (torchrun(-1, 4), "RANK: got -1, expected an integer from 0 to 3"),
        (torchrun("one", 4), "RANK: got 'one', expected an integer from 0 to 3"),
        (torchrun(0, 0), "WORLD_SIZE: got 0, expected an integer of at least 1"),
        ({"DTENSOR_NUM_CLIENTS": "0"}, "DTENSOR_NUM_CLIENTS: got 0, expected an integer of at least 1"),
        ({"DTENSOR_CLIENT_ID": ""}, "DTENSOR_CLIENT_ID: got '', expected an integer from 0 to 0"),
    ],
)
def test_contradictions(environment, variables, message):
    environment(variables)
    with pytest.raises(ConfigError, match=message):
        clients.client_id()


def test_bns_addresses(environment):
    environment({"DTENSOR_JOBS": "/bns/cell/0:80,/bns/cell/1:80", "DTENSOR_CLIENT_ID": "1"})
    assert clients.client_id() == 1
    environment({"DTENSOR_JOBS": "/bns/cell/1,/bns/cell/0"})
    with pytest.raises(ConfigError, match="got tasks 1, 0, expected them in ascending order"):
        clients.jobs()
    environment({"DTENSOR_JOBS": "/bns/cell/a,/bns/cell/0"})
    with pytest.raises(ConfigTypeError, match="expected a number"):
        clients.jobs()


def test_environment_is_an_argument():
    assert Config.from_environ({"RANK": "1", "WORLD_SIZE": "2"}).client_id == 1
    assert Config.from_environ({}).num_clients == 1


@pytest.mark.parametrize(
    ("variables", "position"),
    [({}, (3, 4)), ({"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, (3, 4)), (torchrun(1, 2, 1, 2), (1, 2))],
)
def test_launchers_that_do_not_set_the_variables_of_torchrun(environment, variables, position):
    """Lightning's launcher sets one of the variables, SLURM's launcher none; the program makes a process group."""
    environment(variables)
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        assert (clients.client_id(), clients.num_clients()) == position
    finally:
        dist.destroy_process_group()


def test_virtual_devices_are_put_back():
    assert clients.num_local_devices("CPU") == 1
    with clients.virtual_devices(CPU=4, GPU=2):
        assert (clients.num_local_devices("cpu"), clients.num_local_devices("GPU")) == (4, 2)
        with clients.virtual_devices(CPU=8):
            assert clients.num_local_devices("CPU") == 8
        assert clients.num_local_devices("CPU") == 4
        clients.configure_virtual_devices("CPU", 5)
        assert len(clients.local_devices("CPU")) == 5
    assert clients.num_local_devices("CPU") == 1
    assert clients.num_local_devices("TPU") == 0


def test_an_unknown_kind_has_no_devices():
    assert (clients.num_local_devices("FOO"), clients.num_global_devices("foo")) == (0, 0)
    with pytest.raises(ConfigError, match="device type: got 'FOO'"):
        clients.local_devices("FOO")
    with pytest.raises(ConfigError, match="device type: got 3"):
        clients.num_local_devices(3)


@pytest.mark.parametrize("count", [-1, "2", 1.5])
def test_number_of_virtual_devices(count):
    with pytest.raises(ConfigError, match=r"got .*expected an integer"):
        clients.configure_virtual_devices("CPU", count)


@pytest.fixture
def gpus(monkeypatch):
    def set_number(count):
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    return set_number


@pytest.mark.parametrize(
    ("visible", "local_world", "expected"),
    [(8, 8, [3]), (8, 4, [6, 7]), (1, 8, [0]), (8, None, list(range(8))), (0, 8, [])],
)
def test_clients_on_one_machine_share_its_gpus(environment, gpus, visible, local_world, expected):
    gpus(visible)
    environment(torchrun(3, 16, 3, local_world))
    assert [device.device_index for device in clients.local_devices("GPU")] == expected


def test_one_mesh_over_gpus_of_all_clients(environment, gpus):
    gpus(2)
    meshes = []
    for rank in range(4):
        environment(torchrun(rank, 4, rank % 2, 2))
        meshes.append(create_distributed_mesh({"dp": 2, "tp": 2}, device_type="GPU"))
    assert len(set(meshes)) == 1
    assert [mesh.local_devices() for mesh in meshes] == [
        [f"/job:worker/replica:0/task:{rank}/device:GPU:{rank % 2}"] for rank in range(4)
    ]
    assert [mesh.get_coordinate() for mesh in meshes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert meshes[0].device_type == "cuda"


def test_distributed_mesh_of_given_devices(environment):
    environment(torchrun(1, 2))
    mesh = create_distributed_mesh([("x", 4)], local_devices=["CPU:3", "CPU:5"])
    assert mesh.local_device_ids() == [2, 3]
    assert mesh.local_devices() == [f"/job:worker/replica:0/task:1/device:CPU:{index}" for index in (3, 5)]
    assert mesh.clients == (0, 1)


def test_create_mesh_in_one_of_several_clients(environment):
    environment(torchrun(1, 2))
    with clients.virtual_devices(CPU=2):
        assert create_mesh().client_of(0) == 1
        assert create_mesh({"x": -1}, devices=["CPU:1"]).client_of(0) == 1


def test_abstract_mesh():
    mesh = abstract_mesh({"data": 2, "model": 4}, "target")
    assert (mesh.shape, mesh.name, mesh.num_local_devices(), mesh.clients) == ((2, 4), "target", 8, (0,))
    with clients.virtual_devices(CPU=8):
        assert create_mesh({"data": 2, "model": 4}, "target") == mesh


@pytest.mark.parametrize(
    "call",
    [
        lambda: create_mesh({"x": 3}),
        lambda: create_mesh({}),
        lambda: create_mesh({"x": 1}, devices=["CPU:0"], device_type="GPU"),
        lambda: create_mesh({"x": 2}, devices=["CPU:0", "GPU:0"]),
        lambda: create_distributed_mesh({"x": -1}),
        lambda: create_distributed_mesh({"x": 2}),
        lambda: create_mesh(device_type="TPU"),
        lambda: abstract_mesh({"x": 0}),
        lambda: abstract_mesh({}),
    ],
)
def test_refusals(call):
    with pytest.raises(MeshError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize("dims", [None, 3, ["x"], [("x", "2")], "xy"])
def test_axes_of_wrong_types(dims):
    with pytest.raises(MeshTypeError, match=r"got axes .*expected"):
        create_distributed_mesh(dims)


def test_repeated_axis():
    with pytest.raises(MeshError, match="expected each name once"):
        create_mesh([("x", 1), ("x", 1)])


def test_text_of_a_mesh_that_another_client_reads(environment):
    environment(torchrun(0, 2))
    text = create_distributed_mesh({"x": 2}).to_string()
    environment(torchrun(1, 2))
    assert Mesh.from_string(text) == create_distributed_mesh({"x": 2})


def test_layout_does_not_import_torch():
    code = (
        "import sys, dtckpt.layout.create_mesh, dtckpt.layout.text_format, dtckpt.layout.region\n"
        "heavy = {'torch', 'tensorstore', 'grpc'} & sys.modules.keys()\n"
        "dtckpt.layout.create_mesh.create_mesh({'x': 1}).to_string()\n"
        "sys.exit(f'imported {heavy}' if heavy or 'torch' in sys.modules else 0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
