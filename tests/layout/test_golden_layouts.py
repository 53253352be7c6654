"""Layouts as TensorFlow builds, writes and uses them."""

import numpy as np
import pytest

from dtckpt.errors import LayoutError
from dtckpt.layout.clients import virtual_devices
from dtckpt.layout.create_mesh import abstract_mesh, create_distributed_mesh, create_mesh
from dtckpt.layout.layout import MATCH, Layout, LayoutType
from dtckpt.layout.mesh import Mesh

from .golden import GOLDEN


def on_its_mesh(vector):
    return Layout(vector["sharding_specs"], create_mesh(vector["dims"], devices=vector["devices"]))


@pytest.mark.parametrize("vector", GOLDEN["layouts"], ids=lambda v: v["id"])
class TestLayout:
    def test_text_and_bytes(self, vector):
        layout = on_its_mesh(vector)
        assert layout.to_string() == vector["to_string"]
        assert repr(layout) == vector["repr"]
        assert layout.serialized_string().hex() == vector["proto_hex"]
        assert layout.mesh_proto() == layout.mesh.as_proto()
        assert Layout.from_string(layout.to_string()) == layout
        assert Layout.from_proto(layout.as_proto()) == layout
        assert Layout.from_str(layout.serialized_string()) == layout

    def test_parted(self, vector):
        layout, expected = on_its_mesh(vector), vector["to_parted"]
        parted = layout.to_parted()
        assert parted.to_string() == expected["to_string"]
        assert parted.serialized_string().hex() == expected["proto_hex"]
        assert parted != layout
        assert parted.to_parted() == parted
        assert Layout.from_string(parted.to_string()) == parted
        assert Layout.from_proto(parted.as_proto()) == parted

    def test_properties(self, vector):
        layout = on_its_mesh(vector)
        assert layout.rank == vector["rank"]
        assert layout.type is LayoutType[vector["type"]]
        assert layout.sharding_specs == vector["sharding_specs"]
        assert layout.mesh.shape == tuple(vector["mesh_shape"])
        assert layout.is_fully_replicated() is vector["is_fully_replicated"]
        assert layout.is_batch_parallel() is vector["is_batch_parallel"]

    def test_shards(self, vector):
        layout = on_its_mesh(vector)
        shards = layout.offset_to_shard()
        assert [layout.num_shards(dim) for dim in range(layout.rank)] == vector["num_shards"]
        assert layout.shard_grid == tuple(vector["num_shards"])
        assert [list(shard) for shard in shards] == vector["offset_to_shard"]
        assert [layout.offset_tuple_to_global_index(shard) for shard in shards] == vector["global_index"]
        assert [layout.shard_index(device) for device in layout.mesh.device_ids] == shards

    def test_shapes(self, vector):
        layout = on_its_mesh(vector)
        for case in vector["global_shape_from_local_shape"]:
            assert layout.global_shape_from_local_shape(case["local"]) == tuple(case["global"])
        for case in vector["local_shape_from_global_shape"]:
            assert layout.local_shape_from_global_shape(case["global"]) == tuple(case["local"])

    def test_delete(self, vector):
        layout = on_its_mesh(vector)
        for case in vector["delete"]:
            rest = layout.delete(case["dims"])
            assert rest.sharding_specs == case["sharding_specs"]
            assert rest.to_string() == case["to_string"]

    def test_regions_cut_the_components(self, vector):
        layout = on_its_mesh(vector)
        for case in vector.get("pack", []):
            shape = case["global_shape"]
            whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
            regions = [layout.region(device, shape) for device in layout.mesh.device_ids]
            assert all(region.shape == tuple(case["component_shape"]) for region in regions)
            assert [whole[region.slices()].tolist() for region in regions] == case["components"]


@pytest.mark.parametrize("vector", GOLDEN["factories"])
def test_factories(vector):
    with virtual_devices(CPU=8):
        names = [f"CPU:{i}" for i in range(np.prod([size for _, size in vector["dims"]]))]
        layout = getattr(Layout, vector["fn"])(create_mesh(vector["dims"], devices=names), **vector["args"])
    assert layout.sharding_specs == vector["sharding_specs"]
    assert layout.to_string() == vector["to_string"]
    assert layout.serialized_string().hex() == vector["proto_hex"]


def special(label):
    return next(vector for vector in GOLDEN["special_layouts"] if vector["label"] == label)


def test_match():
    vector = special("MATCH then x on x=2,y=3")
    layout = Layout([MATCH, "x"], abstract_mesh({"x": 2, "y": 3}))
    assert layout.to_string() == vector["to_string"]
    assert layout.serialized_string().hex() == vector["proto_hex"]
    assert Layout.from_string(layout.to_string()) == layout
    assert layout.is_fully_replicated() is vector["is_fully_replicated"]
    assert not layout.is_batch_parallel()
    assert layout.num_shards(1) == vector["num_shards"][1]
    for call in (
        lambda: layout.num_shards(0),
        lambda: layout.shards(0, 4),
        lambda: layout.shard_grid,
        lambda: layout.placements,
        lambda: layout.region(0, (2, 2)),
        layout.offset_to_shard,
        lambda: layout.global_shape_from_local_shape((2, 3)),
        lambda: layout.local_shape_from_global_shape((2, 4)),
    ):
        with pytest.raises(LayoutError, match="got 'match', expected an axis"):
            call()


def test_single_device():
    vector = special("single device layout")
    layout = Layout.from_device(vector["to_string"].partition("mesh:")[2])
    assert layout.to_string() == vector["to_string"]
    assert layout.serialized_string().hex() == vector["proto_hex"]
    assert Layout.from_string(layout.to_string()) == layout == Layout.from_proto(layout.as_proto())
    assert (layout.rank, layout.sharding_specs) == (vector["rank"], vector["sharding_specs"])
    assert layout.type is LayoutType[vector["type"]]
    assert layout.is_fully_replicated() is vector["is_fully_replicated"]
    assert layout.is_single_device() is vector["is_single_device"]
    for case in vector["global_shape_from_local_shape"]:
        assert layout.global_shape_from_local_shape(case["local"]) == tuple(case["global"])
    for case in vector["local_shape_from_global_shape"]:
        assert layout.local_shape_from_global_shape(case["global"]) == tuple(case["local"])


def test_empty_layout():
    vector = special("empty layout")
    layout = Layout.from_string("empty_layout")
    assert layout.to_string() == vector["to_string"]
    assert layout.serialized_string().hex() == vector["proto_hex"]
    assert (layout.rank, layout.sharding_specs) == (vector["rank"], vector["sharding_specs"])
    assert Layout.from_proto(layout.as_proto()) == layout == Layout.from_str(layout.serialized_string())


def cluster_environment(case):
    entries = ",".join(f"localhost:{1000 + client}" for client in range(case["clients"]))
    return {"DTENSOR_JOBS": entries, "DTENSOR_CLIENT_ID": str(case["client_id"])}


CASES = [case for run in GOLDEN["multi_client"]["runs"] for case in run["cases"]]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['mesh_to_string'].partition('|/')[0]}-{c['client_id']}")
def test_clients_of_one_cluster(case, environment):
    environment(cluster_environment(case))
    with virtual_devices(CPU=case["devices_per_client"]):
        mesh = create_distributed_mesh(case["dims"])
    assert mesh.to_string() == case["mesh_to_string"]
    assert mesh.as_proto().SerializeToString(deterministic=True).hex() == case["mesh_proto_hex"]
    assert mesh.local_device_ids() == case["local_device_ids"]
    assert mesh.local_devices() == case["local_devices"]
    assert mesh.local_device_locations() == case["local_device_locations"]
    assert mesh.is_remote() is case["is_remote"]
    assert (mesh.host_mesh() == mesh) is case["host_mesh_equals_self"]
    assert mesh.devices_of(case["client_id"]) == tuple(case["local_device_ids"])
    for vector in case["layouts"]:
        layout = Layout(vector["sharding_specs"], mesh)
        assert layout.to_string() == vector["to_string"]
        assert layout.serialized_string().hex() == vector["proto_hex"]
        assert list(layout.shard_grid) == vector["num_shards"]
        assert [list(shard) for shard in layout.offset_to_shard()] == vector["offset_to_shard"]
        shape = vector["global_shape"]
        whole = np.arange(np.prod(shape)).reshape(shape)
        components = [whole[layout.region(device, shape).slices()].tolist() for device in mesh.local_device_ids()]
        assert components == vector["local_components"]


def test_meshes_of_clients_are_equal():
    by_dims = {}
    for case in CASES:
        by_dims.setdefault((str(case["dims"]), case["devices_per_client"]), []).append(case["mesh_to_string"])
    for texts in by_dims.values():
        assert len(set(texts)) == len(texts) == 2
        first, second = map(Mesh.from_string, texts)
        assert first == second
        assert hash(first) == hash(second)
        assert Layout.replicated(first, 1) == Layout.replicated(second, 1)
