import copy
import pickle
import time

import numpy as np
import pytest

from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.device_names import DeviceSpec
from dtckpt.layout.mesh import Mesh

WORKERS = [f"/job:worker/replica:0/task:{task}/device:GPU:{index}" for task in range(3) for index in range(2)]


def client_mesh(client, **more):
    local = WORKERS[2 * client : 2 * client + 2]
    return Mesh(["dp", "tp"], np.arange(6).reshape(3, 2), [2 * client, 2 * client + 1], local, "job", **more)


def test_pytorch_spellings():
    mesh = abstract_mesh({"dp": 3, "tp": 2})
    assert (mesh.ndim, mesh.shape, mesh.mesh_dim_names, mesh.device_type) == (2, (3, 2), ("dp", "tp"), "cpu")
    assert (mesh.size(), mesh.size(0), mesh.size(-1), mesh.size("dp")) == (6, 3, 2, 3)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert client_mesh(0).device_type == "cuda"
    with pytest.raises(MeshError, match="got 6 local devices, expected one"):
        mesh.get_coordinate()


def test_place_of_the_only_local_device():
    names = [f"/job:w/task:{task}/device:CPU:0" for task in range(4)]
    mesh = Mesh(["a", "b"], np.arange(4).reshape(2, 2), [2], [names[2]])
    assert mesh.get_coordinate() == (1, 0)
    assert (mesh.get_local_rank("a"), mesh.get_local_rank(1)) == (1, 0)
    with pytest.raises(MeshError, match="got no axis"):
        mesh.get_local_rank()
    remote = Mesh(["a"], np.arange(4), [], [], global_devices=names)
    assert remote.get_coordinate() is None
    with pytest.raises(MeshError, match="got no local device"):
        remote.get_local_rank()


@pytest.mark.parametrize("client", range(3))
def test_clients(client):
    mesh = client_mesh(client)
    assert mesh.clients == (0, 1, 2)
    assert mesh.num_clients == 3
    assert [mesh.client_of(device) for device in mesh.device_ids] == [0, 0, 1, 1, 2, 2]
    assert mesh.devices_of(1) == (2, 3)
    assert mesh.devices_of(7) == ()


def test_identity_leaves_out_who_looks():
    meshes = [client_mesh(client) for client in range(3)]
    meshes.append(client_mesh(1, global_devices=WORKERS))
    meshes.append(Mesh(["dp", "tp"], np.arange(6).reshape(3, 2), [], [], "job", WORKERS))
    assert len(set(meshes)) == 1
    assert all(mesh == meshes[0] for mesh in meshes)
    others = [
        Mesh(["dp", "tp"], np.arange(6).reshape(3, 2), [0, 1], WORKERS[:2]),
        Mesh(["dp", "sp"], np.arange(6).reshape(3, 2), [0, 1], WORKERS[:2], "job"),
        Mesh(["dp", "tp"], np.arange(6).reshape(2, 3), [0, 1], WORKERS[:2], "job"),
        Mesh(["dp", "tp"], np.arange(1, 7).reshape(3, 2), [1, 2], WORKERS[:2], "job"),
        Mesh(["dp", "tp"], np.arange(6).reshape(3, 2), [1, 0], WORKERS[:2], "job"),
    ]
    assert not set(others) & set(meshes)
    assert meshes[0] != "a mesh"


def test_ids_may_start_anywhere():
    mesh = Mesh(["x"], np.arange(4, 8), [6, 7], [WORKERS[2], WORKERS[3]])
    assert mesh.coordinate(5) == (1,)
    assert mesh.client_of(4) == 0
    assert mesh.devices_of(1) == (6, 7)
    assert mesh.min_global_device_id() == 4
    with pytest.raises(MeshError, match="got device 3, expected an id from 4 to 7"):
        mesh.coordinate(3)


def test_is_a_value():
    mesh = client_mesh(1)
    hash(mesh)
    for other in (pickle.loads(pickle.dumps(mesh)), copy.copy(mesh), copy.deepcopy(mesh)):
        assert other == mesh
        assert other.to_string() == mesh.to_string()
    with pytest.raises(AttributeError):
        mesh.name = "other"
    mesh.dim_names.clear()
    mesh.local_devices().clear()
    mesh.global_device_ids()[:] = 7
    assert mesh == client_mesh(1)


def test_text_that_would_lose_devices_is_refused():
    names = [f"/job:w/task:{task}/device:TPU:0" for task in range(2)]
    flagged = Mesh(["x"], np.arange(2), [0], names[:1], use_xla_spmd=True)
    assert Mesh.from_string(flagged.to_string()) == flagged
    both = Mesh(["x"], np.arange(2), [0], names[:1], global_devices=names, use_xla_spmd=True)
    assert Mesh.from_proto(both.as_proto()) == both
    with pytest.raises(MeshError, match="got both, expected one of them; use as_proto"):
        both.to_string()
    assert "use_xla_spmd" in repr(both)


def test_host_mesh():
    host = client_mesh(1).host_mesh()
    assert host.local_devices() == [name.replace("GPU", "CPU") for name in WORKERS[2:4]]
    assert (host.name, host.shape, host.device_type) == ("", (3, 2), "cpu")
    for mesh in (Mesh.empty(), Mesh.from_device("CPU:0"), Mesh(["x"], np.arange(6), [], [], global_devices=WORKERS)):
        with pytest.raises(MeshError, match="expected"):
            mesh.host_mesh()


@pytest.mark.parametrize("name", ["a|b", "a,b", "a=b", "a*b", "a+b", "a b", "a\n", "a\0", "\ud800", "a\u2028"])
def test_names_that_no_text_carries_are_refused(name):
    with pytest.raises(MeshError, match=r"axis name: got .*expected"):
        abstract_mesh({name: 2})
    if not set(",=*+") & set(name):
        with pytest.raises(MeshError, match=r"mesh name: got .*expected"):
            abstract_mesh({"x": 2}, name)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Mesh("x", np.arange(1), [0], WORKERS[:1]),
        lambda: Mesh([1], np.arange(1), [0], WORKERS[:1]),
        lambda: Mesh(["x"], np.arange(1), ["0"], WORKERS[:1]),
        lambda: Mesh(["x"], np.arange(1), 0, WORKERS[:1]),
        lambda: Mesh(["x"], np.arange(1), [0], WORKERS[:1], mesh_name=None),
        lambda: 3 in abstract_mesh({"x": 2}),
        lambda: Mesh.from_string(b"empty_mesh"),
    ],
)
def test_wrong_types(call):
    with pytest.raises(MeshTypeError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Mesh(["x"], np.arange(4.0), [0], WORKERS[:1]),
        lambda: Mesh(["x"], np.arange(0), [], []),
        lambda: Mesh(["x"], np.arange(-2, 0), [-2, -1], WORKERS[:2]),
        lambda: Mesh(["x"], np.arange(4), [0, 2], WORKERS[:2]),
        lambda: Mesh(["x"], np.arange(4), [1, 2], WORKERS[:2]),
        lambda: Mesh(["x"], np.arange(4), [1, 1], WORKERS[:2]),
        lambda: Mesh(["x"], np.arange(4), [0, 1], WORKERS[:1]),
        lambda: Mesh(["x"], np.arange(2), [0, 1], WORKERS[:2], global_devices=WORKERS[:1]),
        lambda: Mesh(["x"], np.arange(2), [0, 1], WORKERS[:2], global_devices=WORKERS[1::-1]),
        lambda: Mesh(["x"], np.arange(1), [0], ["/job:a/task:0/device:ABACUS:0"]),
        lambda: Mesh.from_string("|x=2|0,1|0,a|"),
        lambda: Mesh.from_string("|x=3|0,3,4|0|" + WORKERS[0]),
        lambda: Mesh.from_string("|x=-2|*CPU"),
        lambda: Mesh.from_string("|x=2|*"),
        lambda: Mesh.from_string("|x=2|0,1|0,1|a,b||xla"),
        lambda: abstract_mesh({"x": 2}).dim_size("y"),
        lambda: abstract_mesh({"x": 2}).size(1),
        lambda: abstract_mesh({"x": 2}).device_location(2),
        lambda: Mesh.empty().min_global_device_id(),
    ],
)
def test_refusals(call):
    with pytest.raises(MeshError, match=r"got .*expected"):
        call()


def test_unknown_fields_are_refused():
    proto = abstract_mesh({"x": 2}).as_proto()
    proto.MergeFromString(b"\xf8\x07\x01")
    with pytest.raises(MeshError, match=r"got unknown fields \[127\]"):
        Mesh.from_proto(proto)


def test_many_devices_are_cheap():
    started = time.process_time()
    names = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(16384)]
    mesh = Mesh(["a", "b"], np.arange(16384).reshape(128, 128), [5], names[5:6])
    assert mesh == Mesh(["a", "b"], np.arange(16384).reshape(128, 128), [77], names[77:78], global_devices=names)
    assert mesh.coordinate(16383) == (127, 127)
    assert mesh.client_of(9000) == 9000
    assert time.process_time() - started < 5


class TestDeviceSpec:
    @pytest.mark.parametrize(
        ("text", "canonical"),
        [
            ("/job:a/replica:1/task:2/device:GPU:3", "/job:a/replica:1/task:2/device:GPU:3"),
            ("job:a/task:2/gpu:3", "/job:a/task:2/device:GPU:3"),
            ("cpu:0", "/device:CPU:0"),
            ("/device:cpu:0", "/device:cpu:0"),
            ("GPU:*", "/device:GPU:*"),
            ("/task:1", "/task:1"),
            ("", ""),
        ],
    )
    def test_parse(self, text, canonical):
        spec = DeviceSpec.parse(text)
        assert str(spec) == canonical
        assert DeviceSpec.parse(canonical) == spec

    @pytest.mark.parametrize("text", ["/job:a/job:b", "CPU:x", "a b", "/task:x", "CPU:0/GPU:0"])
    def test_refusals(self, text):
        with pytest.raises(MeshError, match=r"got .*expected"):
            DeviceSpec.parse(text)

    def test_defaults_fill_what_is_open(self):
        spec = DeviceSpec.parse("/task:4/GPU:1").with_defaults(job="worker", replica=0, task=9)
        assert spec == DeviceSpec("worker", 0, 4, "GPU", 1)
