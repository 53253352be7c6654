"""Meshes as TensorFlow builds, writes and reads them."""

import numpy as np
import pytest

from dtckpt.layout.layout import Layout, LayoutType
from dtckpt.layout.mesh import Mesh

from .golden import GOLDEN


def serialized(value):
    return value.as_proto().SerializeToString(deterministic=True).hex()


def built(vector):
    return Mesh(
        [name for name, _ in vector["dims"]],
        np.array(vector["global_device_ids"]),
        vector["local_device_ids"],
        vector["devices"],
        vector["name"],
        vector["global_devices"],
        vector["use_xla_spmd"],
    )


@pytest.mark.parametrize("vector", GOLDEN["meshes"], ids=lambda v: v["to_string"].partition("|0")[0])
class TestMesh:
    def test_text_and_bytes(self, vector):
        mesh = built(vector)
        assert mesh.to_string() == vector["to_string"]
        assert repr(mesh) == vector["repr"]
        assert serialized(mesh) == vector["proto_hex"]
        assert Mesh.from_string(mesh.to_string()) == mesh
        assert Mesh.from_proto(mesh.as_proto()) == mesh

    def test_axes(self, vector):
        mesh = built(vector)
        assert mesh.size() == vector["size"]
        assert mesh.shape == tuple(vector["shape"])
        assert mesh.dim_names == vector["dim_names"]
        assert mesh.strides == vector["strides"]
        assert [[name, mesh.dim_size(name)] for name in mesh.dim_names] == vector["dims"]
        assert all(name in mesh for name in vector["dim_names"])

    def test_devices(self, vector):
        mesh = built(vector)
        assert mesh.device_kind == vector["device_type"]
        assert mesh.local_devices() == vector["devices"]
        assert mesh.local_device_ids() == vector["local_device_ids"]
        assert mesh.global_devices() == vector["global_devices"]
        assert mesh.global_device_ids().tolist() == vector["global_device_ids"]
        assert mesh.num_local_devices() == vector["num_local_devices"]
        assert mesh.min_global_device_id() == vector["min_global_device_id"]
        assert mesh.is_remote() is vector["is_remote"]
        assert mesh.is_single_device() is vector["is_single_device"]
        assert mesh.use_xla_spmd() is vector["use_xla_spmd"]

    def test_places(self, vector):
        mesh = built(vector)
        assert [mesh.device_location(i) for i in range(mesh.size())] == vector["device_locations"]
        assert [mesh.coords(i).tolist() for i in range(mesh.size())] == vector["device_locations"]
        assert [list(mesh.coordinate(i)) for i in mesh.device_ids] == vector["device_locations"]
        assert mesh.local_device_locations() == vector["local_device_locations"]
        assert {str(offset): place for offset, place in mesh.unravel_index().items()} == vector["unravel_index"]

    def test_host_mesh(self, vector):
        mesh = built(vector)
        assert mesh.host_mesh().to_string() == vector["host_mesh_to_string"]
        assert (mesh.host_mesh() == mesh) is vector["host_mesh_equals_self"]


@pytest.mark.parametrize("vector", GOLDEN["special_meshes"], ids=lambda v: v["label"])
def test_special_meshes(vector):
    if vector["label"] == "empty mesh":
        mesh = Mesh.empty()
    elif vector["label"] == "0-d mesh":
        mesh = Mesh([], np.array(0), [0], vector["local_devices"])
    elif vector["is_single_device"]:
        mesh = Mesh.from_device(vector["single_device"])
    else:
        ids = np.arange(vector["size"]).reshape(vector["shape"])
        mesh = Mesh(
            vector["dim_names"],
            ids,
            vector["local_device_ids"],
            vector["local_devices"],
            global_devices=vector["global_devices"],
        )
    assert mesh.to_string() == vector["to_string"]
    assert serialized(mesh) == vector["proto_hex"]
    assert mesh.size() == vector["size"]
    assert mesh.shape == tuple(vector["shape"])
    assert mesh.single_device == vector["single_device"]
    assert (mesh.name, mesh.is_remote()) == (vector["name"], vector["is_remote"])
    # Of "job:localhost/.../TPU:0" TensorFlow says "job", the text before the first colon.
    assert mesh.device_kind == vector["device_type"].replace("job", "TPU")
    assert Mesh.from_proto(mesh.as_proto()) == mesh
    if vector["from_string_roundtrip"] is True:
        assert Mesh.from_string(mesh.to_string()) == mesh
    else:
        with pytest.raises(ValueError, match=r"got .* expected"):
            Mesh.from_string(mesh.to_string())


@pytest.mark.parametrize("vector", GOLDEN["parse"], ids=lambda v: v["input"])
def test_parse(vector):
    cls = {"mesh": Mesh, "layout": Layout}[vector["kind"]]
    value = cls.from_string(vector["input"])
    assert value.to_string() == vector["to_string"]
    assert serialized(value) == vector["proto_hex"]
    if cls is Layout:
        assert value.sharding_specs == vector["sharding_specs"]
        assert value.rank == vector["rank"]
        assert (value.type.name if value.type else "???") == vector["type"]
        assert Layout.from_proto(value.as_proto()) == value


def test_layout_type_numbers():
    numbers = GOLDEN["layout_type_enum"]
    assert {kind.name: kind.value for kind in LayoutType} == numbers["python"]
    assert dict(Layout.from_string("empty_layout").as_proto().LayoutType.items()) == numbers["proto"]


@pytest.mark.parametrize("vector", GOLDEN["equality"], ids=lambda v: v["label"])
def test_equality(vector):
    cls = Layout if " mesh:" in vector["a"] else Mesh
    a, b = cls.from_string(vector["a"]), cls.from_string(vector["b"])
    assert (a == b) is vector["equal"]
    assert (a != b) is not vector["equal"]
    assert (hash(a) == hash(b)) is vector["hash_equal"]
