"""Layouts on the root mesh."""

from hypothesis import given
from hypothesis import strategies as st
from support.states import cluster_mesh

from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.root_layout import root_layout

AXES = {"a": 2, "b": 3, "c": 1, "d": 2}


def own_region(layout, shape):
    (device,) = layout.mesh.local_device_ids()
    return layout.region(device, shape)


@given(st.permutations(list(AXES)), st.integers(1, 3), st.integers(0, 11), st.lists(st.booleans(), min_size=3))
def test_every_client_has_the_same_regions_on_the_root(axes, count, client, is_first):
    mesh = cluster_mesh(AXES, 12, client)[axes[:count]]
    specs = [
        tuple(axis for axis, first in zip(mesh.dim_names, is_first, strict=False) if first is dim) or UNSHARDED
        for dim in (True, False)
    ]
    layout, shape = Layout(specs, mesh), (7, 5)
    found = root_layout(layout)
    assert found.mesh.axis_sizes == AXES
    assert found.region(client, shape) == own_region(layout, shape)
    # The other slices hold the same: the root has the slice's regions, once for each slice.
    regions = sorted(str(layout.region(device, shape)) for device in mesh.device_ids)
    assert sorted(str(found.region(device, shape)) for device in range(12)) == sorted(regions * (12 // mesh.size()))


def test_a_root_mesh_is_its_own():
    layout = Layout(["a"], cluster_mesh(AXES, 12, 0))
    assert root_layout(layout) is layout


def test_what_the_root_cannot_express_stays():
    root = cluster_mesh(AXES, 12, 5)
    for mesh in (root.flatten(["a", "b"]), root._unflatten("d", (2, 1), ("e", "f"))["e"]):
        layout = Layout([mesh.dim_names[0]], mesh)
        found = root_layout(layout)
        assert found is layout or found.region(5, (7,)) == own_region(layout, (7,))
