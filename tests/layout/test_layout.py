import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import LayoutError, LayoutTypeError, MeshError
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.placement import Partial, Replicate, Shard, _StridedShard
from dtckpt.layout.region import Region

from .strategies import layouts

MESH = abstract_mesh({"dp": 2, "tp": 2})


def chunks(indices, count):
    """Cut a range as ``torch.chunk`` does, with empty pieces at the end."""
    step = -(-len(indices) // count)
    return [indices[i * step : (i + 1) * step] for i in range(count)]


def indices_by_definition(layout, device, dim, size):
    place = dict(zip(layout.mesh.dim_names, layout.mesh.coordinate(device), strict=True))
    spec = layout.sharding_specs[dim]
    indices = range(size)
    for axis in () if spec == UNSHARDED else (spec,) if isinstance(spec, str) else spec:
        indices = chunks(indices, layout.mesh.dim_size(axis))[place[axis]]
    return indices


@given(layouts(), st.data())
def test_regions_are_nested_chunks(layout, data):
    shape = tuple(data.draw(st.integers(0, 9)) for _ in range(layout.rank))
    for device in layout.mesh.device_ids:
        region = layout.region(device, shape)
        for dim, size in enumerate(shape):
            indices = indices_by_definition(layout, device, dim, size)
            assert range(region.offset[dim], region.stop[dim]) == indices or (not indices and region.shape[dim] == 0)
            assert layout.shards(dim, size)[layout.shard_index(device)[dim]] == (region.offset[dim], region.stop[dim])


@given(layouts(), st.data())
def test_regions_cover_every_element_equally_often(layout, data):
    shape = tuple(data.draw(st.integers(0, 7)) for _ in range(layout.rank))
    count = np.zeros(shape, dtype=int)
    for device in layout.mesh.device_ids:
        count[layout.region(device, shape).slices()] += 1
    assert (count == layout.mesh.size() // np.prod(layout.shard_grid, dtype=int)).all()


@given(layouts())
def test_shards_and_devices_agree(layout):
    holders = layout.devices_by_shard()
    assert list(holders) == list(itertools.product(*map(range, layout.shard_grid)))
    assert sorted(itertools.chain(*holders.values())) == list(layout.mesh.device_ids)
    assert all(layout.shard_index(device) == shard for shard, devices in holders.items() for device in devices)
    assert layout.offset_to_shard() == [layout.shard_index(device) for device in layout.mesh.device_ids]
    positions = [layout.offset_tuple_to_global_index(shard) for shard in holders]
    assert positions == list(range(len(holders)))


@given(layouts(min_size=2))
def test_placements_say_the_same(layout):
    assert Layout.from_placements(layout.mesh, layout.placements, layout.rank) == layout


@given(layouts(), st.data())
def test_placements_keep_regions_with_axes_of_size_one(layout, data):
    shape = tuple(data.draw(st.integers(0, 9)) for _ in range(layout.rank))
    again = Layout.from_placements(layout.mesh, layout.placements, layout.rank)
    assert again.placements == layout.placements
    assert again.partial == layout.partial
    assert all(again.region(d, shape) == layout.region(d, shape) for d in layout.mesh.device_ids)


@given(layouts())
def test_is_a_value(layout):
    hash(layout)
    for other in (pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
        assert other == layout
        assert hash(other) == hash(layout)


def test_fsdp_after_tensor_parallel():
    layout = Layout([("tp", "dp"), UNSHARDED], MESH)
    assert layout.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert layout.offset_to_shard() == [(0, 0), (2, 0), (1, 0), (3, 0)]
    assert layout.region(1, (8, 3)) == Region((4, 0), (2, 3))
    assert layout.num_shards(0) == 4


def test_uneven_nested_chunks():
    layout = Layout([("dp", "tp")], MESH)
    assert layout.placements == (Shard(0), Shard(0))
    assert layout.shards(0, 5) == ((0, 2), (2, 3), (3, 4), (4, 5))
    assert layout.shards(0, 2) == ((0, 1), (1, 1), (1, 2), (2, 2))


def test_three_axes_in_any_order():
    mesh = abstract_mesh({"a": 2, "b": 3, "c": 5})
    factors = {
        ("c", "b", "a"): (15, 5, 1),
        ("b", "c", "a"): (15, 1, 1),
        ("c", "a", "b"): (5, 5, 1),
        ("a", "c", "b"): (1, 5, 1),
        ("b", "a", "c"): (3, 1, 1),
    }
    for order, expected in factors.items():
        placements = Layout([order], mesh).placements
        assert tuple(getattr(p, "split_factor", 1) for p in placements) == expected
        assert Layout.from_placements(mesh, placements, 1).sharding_specs == [order]


def test_partial():
    layout = Layout([UNSHARDED, "dp"], MESH, {"tp": "avg"})
    assert layout.placements == (Shard(1), Partial("avg"))
    assert layout.partial == {"tp": "avg"}
    assert not Layout([UNSHARDED], MESH, {"tp": "sum"}).is_fully_replicated()
    assert Layout([UNSHARDED], MESH, {"tp": "sum", "dp": "max"}) == Layout(
        [UNSHARDED], MESH, {"dp": "max", "tp": "sum"}
    )
    assert layout != Layout([UNSHARDED, "dp"], MESH)
    assert layout.to_parted().partial == layout.delete(0).partial == layout.partial


def test_negative_dims_of_placements():
    assert Layout.from_placements(MESH, [Shard(-1), Replicate()], 3).sharding_specs == [UNSHARDED, UNSHARDED, "dp"]


def test_one_tuple_is_its_axis():
    assert Layout([("dp",)], MESH) == Layout(["dp"], MESH)


def test_unknown_sizes_stay_unknown():
    layout = Layout(["dp", UNSHARDED], MESH)
    assert layout.local_shape_from_global_shape((-1, -1)) == (-1, -1)
    assert layout.global_shape_from_local_shape((-1, 3)) == (-1, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Layout([("dp", "dp")], MESH),
        lambda: Layout(["dp"], MESH, {"dp": "sum"}),
        lambda: Layout([], MESH, {"z": "sum"}),
        lambda: Layout([], MESH, {"dp": "mean"}),
        lambda: Layout([()], MESH),
        lambda: Layout([("dp", UNSHARDED)], MESH),
        lambda: Layout(["any"], MESH),
        lambda: Layout(["dp"], MESH).region(0, (2, 2)),
        lambda: Layout(["dp"], MESH).region(0, (-1,)),
        lambda: Layout(["dp"], MESH).shards(0, -1),
        lambda: Layout(["dp"], MESH).shards(1, 4),
        lambda: Layout(["dp"], MESH).offset_tuple_to_global_index((-1,)),
        lambda: Layout.from_placements(MESH, [Shard(0)], 1),
        lambda: Layout.from_placements(MESH, [Shard(1), Replicate()], 1),
        lambda: Layout.from_placements(MESH, [_StridedShard(0, split_factor=3), Shard(0)], 1),
        lambda: Layout.from_string("empty_layout").to_parted(),
        lambda: Layout.from_string("empty_layout").offset_to_shard(),
        lambda: Layout.batch_sharded(MESH, "dp", 2, axis=2),
        lambda: Layout.inner_sharded(MESH, "dp", 0),
        lambda: Partial("mean"),
        lambda: _StridedShard(0, split_factor=0),
    ],
)
def test_refusals(call):
    with pytest.raises(LayoutError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Layout("dp", MESH),
        lambda: Layout([3], MESH),
        lambda: Layout(["dp"], "mesh"),
        lambda: Layout(None, MESH),
        lambda: Layout(["dp"], MESH).region(0, (None,)),
        lambda: Layout.from_placements(MESH, ["S(0)", "R"], 1),
        lambda: Layout.from_string(b"empty_layout"),
        lambda: Layout.from_str("empty_layout"),
        lambda: Layout.from_proto(b""),
        lambda: Layout.from_single_device_mesh("CPU:0"),
        lambda: Shard("0"),
    ],
)
def test_wrong_types(call):
    with pytest.raises(LayoutTypeError, match=r"got .*expected"):
        call()


def test_device_outside_the_mesh():
    with pytest.raises(MeshError, match="got device 4, expected an id from 0 to 3"):
        Layout(["dp"], MESH).region(4, (4,))


class TestPlacement:
    def test_spelling(self):
        placements = [Shard(1), Replicate(), Partial(), Partial("max"), _StridedShard(0, split_factor=2)]
        assert list(map(repr, placements)) == [
            "Shard(dim=1)",
            "Replicate()",
            "Partial(sum)",
            "Partial(max)",
            "_StridedShard(dim=0, sf=2)",
        ]
        assert list(map(str, placements)) == ["S(1)", "R", "P(sum)", "P(max)", "_S(0, 2)"]

    def test_questions(self):
        assert Shard(1).is_shard()
        assert Shard(1).is_shard(1)
        assert not Shard(1).is_shard(0)
        assert not _StridedShard(0, split_factor=2).is_shard()
        assert Replicate().is_replicate()
        assert not Shard(0).is_replicate()
        assert Partial("avg").is_partial("avg")
        assert not Partial("avg").is_partial("sum")
        assert not Replicate().is_partial()

    def test_values(self):
        assert len({Shard(0), Shard(0), Shard(1), Replicate(), Replicate(), Partial(), Partial("sum")}) == 4
        assert Shard(0) != _StridedShard(0, split_factor=1)
