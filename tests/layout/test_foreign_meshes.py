"""Meshes that TensorFlow's ``Mesh.from_string`` reads, and its constructor does not make."""

import pickle

import numpy as np
import pytest
import torch
from coordination import process_group_cases

from dtckpt import Layout, Shard, pack
from dtckpt.errors import MeshError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.mesh_validation import DeviceOffsets

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]
REMOTE = "far|x=2,y=2|4,5,6,7||"


def text(ids, local=None, devices=None, everyone=None):
    local = ids if local is None else local
    devices = [CPUS[each] for each in local] if devices is None else devices
    parts = [f"|x={len(ids)}", ids, local, devices, *([everyone] if everyone else [])]
    return "|".join(part if isinstance(part, str) else ",".join(map(str, part)) for part in parts)


def test_a_remote_mesh_without_names():
    mesh = Mesh.from_string(REMOTE)
    assert mesh.to_string() == REMOTE
    assert Mesh.from_proto(mesh.as_proto()) == pickle.loads(pickle.dumps(mesh)) == mesh
    assert hash(Mesh.from_string(REMOTE)) == hash(mesh) != hash(Mesh.from_string(REMOTE.replace("far", "near")))
    assert (mesh.is_remote(), mesh.size(), mesh.shape, mesh.local_devices()) == (True, 4, (2, 2), [])
    assert (mesh.device_kind, mesh.device_type, mesh.global_devices()) == ("", "", [])
    assert (mesh.coordinate(6), mesh.min_global_device_id()) == ((1, 0), 4)
    layout = Layout(["x", "unsharded"], mesh)
    assert Layout.from_string(layout.to_string()) == layout
    assert layout.local_shape_from_global_shape((4, 3)) == (2, 3)
    assert layout.region(6, (4, 3)).offset == (2, 0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda mesh: mesh.owners,
        lambda mesh: mesh.num_clients,
        lambda mesh: mesh.device_name(4),
        lambda mesh: mesh.portable(),
        lambda mesh: mesh["x"],
        lambda mesh: pack([], Layout(["x"], mesh), (4,)).full_tensor(),
    ],
)
def test_whose_the_devices_are_is_not_known(ask):
    with pytest.raises(MeshError, match=r"mesh 'far' \(x=2,y=2\): got no names of its devices"):
        ask(Mesh.from_string(REMOTE))


def test_ids_in_another_order():
    mesh = Mesh.from_string(text([2, 0, 3, 1]))
    assert mesh.to_string() == text([2, 0, 3, 1])
    assert Mesh.from_proto(mesh.as_proto()) == pickle.loads(pickle.dumps(mesh)) == mesh
    assert mesh != Mesh.from_string(text([2, 3, 0, 1]))
    assert mesh.global_device_ids().tolist() == list(mesh.device_ids) == mesh.local_device_ids() == [2, 0, 3, 1]
    assert [mesh.coordinate(device) for device in range(4)] == [(1,), (3,), (0,), (2,)]
    assert [mesh.device_name(device) for device in range(4)] == CPUS
    assert mesh.device_names == tuple(CPUS[device] for device in (2, 0, 3, 1))
    assert (mesh.min_global_device_id(), mesh.devices_of(0)) == (0, (0, 1, 2, 3))
    assert mesh.local_device_locations() == [{"x": offset} for offset in range(4)]
    assert mesh.portable() == mesh.seen_by(0) == mesh
    with pytest.raises(MeshError, match="got device 4, expected an id from 0 to 3"):
        mesh.coordinate(4)


def test_local_devices_in_an_order_of_their_own():
    mesh = Mesh.from_string(text([2, 0, 3, 1], local=[1, 3, 0, 2]))
    assert mesh.device_names == tuple(CPUS[device] for device in (2, 0, 3, 1))
    packed = pack([torch.full((1,), float(device)) for device in mesh.local_device_ids()], Layout(["x"], mesh))
    assert packed.full_tensor().tolist() == [2, 0, 3, 1]


def test_ids_with_gaps():
    mesh = Mesh.from_string(text([7, 3], devices=CPUS[:2]))
    assert (mesh.coordinate(3), mesh.device_name(3), mesh.min_global_device_id()) == ((1,), CPUS[1], 3)


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (9, 4, 6, 5)])
def test_tensors_move_on_them(ids):
    mesh = Mesh.from_string(text(ids, devices=CPUS))
    whole = torch.arange(10.0)
    packed = pack(list(whole.chunk(4)), Layout(["x"], mesh))
    assert packed.full_tensor().tolist() == whole.tolist()
    other = Mesh.from_string("|y=2|0,1|0,1|" + ",".join(CPUS[:2]))
    moved = packed.redistribute(other, [Shard(0)])
    assert [part.tolist() for part in moved.components] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    back = moved.redistribute(mesh, [Shard(0)])
    assert [part.tolist() for part in back.components] == [part.tolist() for part in whole.chunk(4)]


def test_blocks_of_clients():
    local = [CPUS[0].replace("task:0", "task:1"), CPUS[1].replace("task:0", "task:1")]
    mesh = Mesh.from_string(text([3, 0, 2, 1], local=[2, 3], devices=local))
    assert mesh.owners.tolist() == [1, 0, 1, 0]
    assert [mesh.device_name(device) for device in range(4)] == [CPUS[0], CPUS[1], *local]
    assert (mesh.devices_of(1), mesh.seen_by(0).local_device_ids()) == ((2, 3), [0, 1])


def test_tensors_of_several_clients_move_on_them(pool):
    whole = [float(i) for i in range(10)]
    assert pool.values(process_group_cases.move_on_a_foreign_mesh, clients=2, group=True) == [(whole, whole)] * 2


@pytest.mark.parametrize(
    "bad",
    [
        text([0, 0]),
        text([-1, 0], devices=CPUS[:2]),
        text([0, 2, 1, 5], local=[0, 1], devices=CPUS[:2]),
        text([0], local=[1]),
    ],
)
def test_refused(bad):
    with pytest.raises(MeshError, match=r"got .* expected"):
        Mesh.from_string(bad)


def test_offsets():
    for ids in ([4, 5, 6], [5, 9, 2]):
        offsets = DeviceOffsets(ids)
        assert [offsets.of(device) for device in ids] == [0, 1, 2]
        assert offsets.of_all(np.array([ids, ids])).tolist() == [[0, 1, 2]] * 2
        assert [offsets.of(device) for device in (-1, 3, 7)] == [None] * 3
    assert DeviceOffsets(()).of(0) is None
