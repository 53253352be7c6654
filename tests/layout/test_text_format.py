import pytest
from hypothesis import given

from dtckpt._proto import layout_pb2
from dtckpt.errors import LayoutError
from dtckpt.layout import text_format
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh

from .strategies import layouts

MESH = abstract_mesh({"x": 2, "y": 2})
TEXT = MESH.to_string()


@given(layouts())
def test_round_trips(layout):
    for value in (layout, layout.to_parted()):
        assert Layout.from_string(value.to_string()) == value
        assert Layout.from_proto(value.as_proto()) == value
        assert Layout.from_str(value.serialized_string()) == value
        assert text_format.specs_from_proto(text_format.specs_to_proto(value.sharding_specs)) == tuple(
            value.sharding_specs
        )
        assert text_format.partial_from_proto(text_format.partial_to_proto(value.partial.items())) == tuple(
            value.partial.items()
        )
    assert Mesh.from_string(layout.mesh.to_string()) == layout.mesh
    assert Mesh.from_proto(layout.mesh.as_proto()) == layout.mesh


def test_extensions_in_text():
    layout = Layout([("y", "x"), UNSHARDED], MESH)
    assert layout.to_string() == f"sharding_specs:y+x,unsharded, mesh:{TEXT}"
    layout = Layout(["y"], MESH, {"x": "sum"})
    assert layout.to_string() == f"sharding_specs:y, partial:x=sum, mesh:{TEXT}"
    layout = Layout([], MESH, {"y": "max", "x": "sum"}).to_parted()
    assert layout.to_string() == f"parted: partial:x=sum,y=max, mesh:{TEXT}"
    assert Layout.from_string(layout.to_string()) == layout


def test_extensions_use_fields_that_tensorflow_lacks():
    plain = Layout(["x"], MESH).as_proto()
    assert not plain.partial
    assert not plain.sharding_specs[0].axes
    proto = Layout([("y", "x")], MESH).as_proto()
    assert (list(proto.sharding_specs[0].axes), proto.sharding_specs[0].sharding_spec) == (["y", "x"], "")
    for message in (layout_pb2.LayoutProto, layout_pb2.ShardingSpec):
        numbers = {field.name: field.number for field in message.DESCRIPTOR.fields}
        assert numbers.get("partial", 16) == numbers.get("axes", 16) == 16


def test_bytes_of_the_older_release_are_static():
    layout = Layout(["x"], MESH)
    proto = layout.as_proto()
    proto.ClearField("type")
    assert Layout.from_str(proto.SerializeToString()) == layout
    with pytest.raises(LayoutError, match="got type UNKNOWN"):
        Layout.from_proto(proto)


@pytest.mark.parametrize(
    "text",
    [
        f"sharding_specs:x, partial:y, mesh:{TEXT}",
        f"sharding_specs:x, partial:y=sum mesh:{TEXT}",
        f"sharding_specs:x, partial:, mesh:{TEXT}",
        f"sharding_specs:x, partial:y=mean, mesh:{TEXT}",
        f"sharding_specs:x, partial:x=sum, mesh:{TEXT}",
        f"sharding_specs:unsharded, partial:y=sum,y=max, mesh:{TEXT}",
        f"sharding_specs:x+, mesh:{TEXT}",
        f"sharding_specs:x+x, mesh:{TEXT}",
        f"sharding_specs:x, sharding_specs:x, mesh:{TEXT}",
        f"sharding_specs:x,  mesh:{TEXT}",
        "sharding_specs:x, mesh:empty_mesh",
        "sharding_specs: mesh:/job:a/task:0/device:CPU:0",
        f"maximal:true, mesh:{TEXT}",
        "maximal:true, mesh:CPU:0",
        "x",
        " ",
    ],
)
def test_malformed_text(text):
    with pytest.raises(ValueError, match=r"got .*expected"):
        Layout.from_string(text)


def proto(**fields):
    return layout_pb2.LayoutProto(**{"mesh_config": MESH.as_proto(), "type": layout_pb2.LayoutProto.STATIC} | fields)


def with_unknown_field(message):
    message.MergeFromString(b"\xf8\x07\x01")
    return message


@pytest.mark.parametrize(
    "message",
    [
        proto(type=9),
        proto(type=layout_pb2.LayoutProto.SINGLE_DEVICE),
        proto(type=layout_pb2.LayoutProto.UNKNOWN),
        proto(sharding_specs=[layout_pb2.ShardingSpec(sharding_spec="x", axes=["y"])]),
        proto(sharding_specs=[layout_pb2.ShardingSpec()]),
        proto(partial=[layout_pb2.AxisReduction(axis="x", reduce_op="sum")] * 2),
        with_unknown_field(proto()),
        proto(sharding_specs=[with_unknown_field(layout_pb2.ShardingSpec(sharding_spec="x"))]),
        proto(partial=[with_unknown_field(layout_pb2.AxisReduction(axis="x", reduce_op="sum"))]),
        proto(mesh_config=with_unknown_field(MESH.as_proto())),
    ],
)
def test_malformed_messages(message):
    with pytest.raises(ValueError, match=r"got .*expected"):
        Layout.from_proto(message)


def test_bytes_that_do_not_parse():
    with pytest.raises(LayoutError, match="got 3 bytes that do not parse, expected"):
        Layout.from_str(b"\xff\xff\xff")
