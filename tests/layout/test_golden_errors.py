"""What TensorFlow refuses is refused; where it crashes or takes nonsense, a clear error comes instead."""

import numpy as np
import pytest

from dtckpt._proto import layout_pb2
from dtckpt.errors import DtckptError, LayoutError, MeshError
from dtckpt.layout import clients
from dtckpt.layout.create_mesh import abstract_mesh, create_distributed_mesh, create_mesh
from dtckpt.layout.layout import MATCH, Layout
from dtckpt.layout.mesh import Mesh

from .golden import GOLDEN

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(4)]
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
MESH = abstract_mesh({"x": 2, "y": 2})
SINGLE = Mesh.from_device(CPUS[0])
TEXT = f"|x=2|0,1|0,1|{CPUS[0]},{CPUS[1]}"


def mesh(names=("x",), ids=(0, 1), local_ids=(0, 1), local=CPUS[:2], **more):
    return Mesh(names, np.array(ids), local_ids, local, **more)


def layout_proto(**fields):
    return layout_pb2.LayoutProto(
        sharding_specs=[layout_pb2.ShardingSpec(sharding_spec="z")], type=layout_pb2.LayoutProto.STATIC, **fields
    )


def with_environment(variables, call):
    def run():
        with pytest.MonkeyPatch.context() as patch, clients.virtual_devices(CPU=2):
            for name, value in variables.items():
                patch.setenv(name, value)
            call()

    return run


def without_gpus(call):
    with clients.virtual_devices(GPU=0):
        call()


TWO_CLIENTS = {"DTENSOR_JOBS": "a:1,b:2"}

REFUSED = {
    ("Mesh", "global_device_ids given as a list"): lambda: Mesh(["x"], [0, 1], [0, 1], CPUS[:2]),
    ("Mesh", "global_device_ids [1,0]"): lambda: mesh(ids=(1, 0)),
    ("Mesh", "2 dim names, 1-D ids"): lambda: mesh(names=("x", "y")),
    ("Mesh", "no local and no global devices"): lambda: mesh(local_ids=(), local=()),
    ("Mesh", "duplicate GPU"): lambda: mesh(local=[GPU, GPU]),
    ("Mesh", "3 local, 2 global"): lambda: mesh(local_ids=(0, 1, 2), local=CPUS[:3]),
    ("Mesh", "CPU and GPU mixed"): lambda: mesh(local=[CPUS[0], GPU]),
    ("Mesh", "use_xla_spmd on CPU"): lambda: mesh(use_xla_spmd=True),
    ("Mesh.device_location", "-1"): lambda: MESH.device_location(-1),
    ("Mesh.local_device_locations", "ids start at 4"): lambda: mesh(
        ids=(4, 5), local_ids=(4, 5)
    ).local_device_locations(),
    ("Mesh.from_device", "empty string"): lambda: Mesh.from_device(""),
    ("Mesh.from_string", '"foo"'): lambda: Mesh.from_string("foo"),
    ("Mesh.from_string", "2 parts"): lambda: Mesh.from_string("a|x=2"),
    ("Mesh.from_string", "8 parts"): lambda: Mesh.from_string(f"{TEXT}|||"),
    ("Mesh.from_string", "compact form with **"): lambda: Mesh.from_string("|x=2|**CPU"),
    ("Mesh.from_string", "dim size not an integer"): lambda: Mesh.from_string(TEXT.replace("x=2", "x=two")),
    ("Mesh.from_string", "2 ids, 1 device"): lambda: Mesh.from_string(f"|x=2|0,1|0,1|{CPUS[0]}"),
    ("Mesh.from_string", "repeated dim name"): lambda: Mesh.from_string("|x=1,x=2|*CPU"),
    ("Mesh.from_string", "dim named unsharded"): lambda: Mesh.from_string("|unsharded=2|*CPU"),
    ("Mesh.from_string", "devices without job/task"): lambda: Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1"),
    ("Mesh.from_string", "unparsable devices"): lambda: Mesh.from_string("|x=2|0,1|0,1|a b,/c"),
    ("Mesh.from_string", "0-d mesh written by to_string"): lambda: Mesh.from_string(
        Mesh([], np.array(0), [0], CPUS[:1]).to_string()
    ),
    ("Mesh.from_proto", "bytes instead of message"): lambda: Mesh.from_proto(MESH.as_proto().SerializeToString()),
    ("create_mesh", "2-D with -1"): lambda: create_mesh({"x": 1, "y": -1}),
    ("create_mesh", "devices=[]"): lambda: create_mesh({"x": 1}, devices=[]),
    ("create_mesh", "GPU type with no GPU"): lambda: without_gpus(lambda: create_mesh(device_type="GPU")),
    ("create_mesh", "use_xla_spmd on CPU"): lambda: create_mesh({"x": 1}, use_xla_spmd=True),
    ("local_devices", "unknown type"): lambda: clients.local_devices("QPU"),
    ("client_id", "DTENSOR_CLIENT_ID=1, local mode"): with_environment({"DTENSOR_CLIENT_ID": "1"}, clients.client_id),
    ("client_id", "DTENSOR_CLIENT_ID=abc"): with_environment({"DTENSOR_CLIENT_ID": "abc"}, clients.client_id),
    ("full_job_name", "task 1 in local mode"): lambda: clients.full_job_name(1),
    ("jobs", "bns task id not numeric"): with_environment({"DTENSOR_JOBS": "/bns/x/foo,/bns/x/0"}, clients.jobs),
    ("Layout", "dim used twice"): lambda: Layout(["x", "x"], MESH),
    ("Layout", '"UNSHARDED" in capitals'): lambda: Layout(["UNSHARDED"], MESH),
    ("Layout", 'empty spec ""'): lambda: Layout([""], MESH),
    ("Layout", "spec None"): lambda: Layout([None], MESH),
    ("Layout", "two MATCH specs"): lambda: Layout([MATCH, MATCH], MESH),
    ("Layout", "single device mesh"): lambda: Layout([], SINGLE),
    ("Layout.replicated", "rank -1"): lambda: Layout.replicated(MESH, -1),
    ("Layout.inner_sharded", "unknown dim"): lambda: Layout.inner_sharded(MESH, "z", 2),
    ("Layout.offset_to_shard", "single device layout"): lambda: Layout.from_device(CPUS[0]).offset_to_shard(),
    ("Layout.from_single_device_mesh", "ordinary mesh"): lambda: Layout.from_single_device_mesh(MESH),
    ("Layout.from_string", "empty string"): lambda: Layout.from_string(""),
    ("Layout.from_string", "no type prefix"): lambda: Layout.from_string(f"x, mesh:{TEXT}"),
    ("Layout.from_string", "dim twice"): lambda: Layout.from_string(f"sharding_specs:x,x, mesh:{TEXT}"),
    ("Layout.from_string", "scalar with other specs"): lambda: Layout.from_string(
        f"sharding_specs:scalar,x, mesh:{TEXT}"
    ),
    ("Layout.from_string", "mesh name contains a space"): lambda: Layout.from_string(
        f"sharding_specs:x, mesh:my mesh{TEXT}"
    ),
    ("Layout.from_proto", "STATIC with empty mesh"): lambda: Layout.from_proto(layout_proto()),
    ("Layout.from_proto", "unknown dim"): lambda: Layout.from_proto(layout_proto(mesh_config=MESH.as_proto())),
    ("create_distributed_mesh", "2 clients x 2 devices, dims x=3"): with_environment(
        TWO_CLIENTS, lambda: create_distributed_mesh({"x": 3})
    ),
}

DEPARTURES = {
    ("Mesh", "local_devices a tuple"): "any sequence will do",
    ("Mesh.__getitem__", "unknown dim"): "brackets are PyTorch's: they cut submeshes",
}

VOCABULARY = (
    "Mesh", "Layout", "create_mesh", "create_distributed_mesh", "local_devices", "client_id", "full_job_name", "jobs"
)  # fmt: skip


def of_vocabulary(section):
    """Return the vectors about this layer, less the deliberate departures."""
    return [
        vector
        for vector in GOLDEN[section]
        if any(api.strip().partition(".")[0] in VOCABULARY for api in vector["api"].split("/"))
        and (vector["api"], vector["call"]) not in DEPARTURES
    ]


@pytest.mark.parametrize("vector", of_vocabulary("errors"), ids=lambda v: f"{v['api']} {v['call']}")
def test_errors(vector):
    expected = TypeError if vector["exception"] == "TypeError" else ValueError
    with pytest.raises(expected, match=r"(?s)got .*expected") as raised:
        REFUSED[vector["api"], vector["call"]]()
    assert isinstance(raised.value, DtckptError)


CRASHES = {
    ("Mesh.from_string", 'dim without "="'): lambda: Mesh.from_string(TEXT.replace("x=2", "x")),
    ("Mesh.from_string", 'mesh name containing "|", written by to_string'): lambda: mesh(mesh_name="a|b"),
    ("Layout.batch_sharded", "axis=-1"): lambda: Layout.batch_sharded(MESH, "x", 2, axis=-1),
    ("Layout.batch_sharded", "rank 0"): lambda: Layout.batch_sharded(MESH, "x", 0),
    (
        "Layout.num_shards",
        "index 5 of rank 2 (another run raised MemoryError, another RuntimeError)",
    ): lambda: Layout.replicated(MESH, 2).num_shards(5),
    ("Layout.num_shards", "on a single device layout"): lambda: Layout.from_device(CPUS[0]).num_shards(0),
}


@pytest.mark.parametrize(
    "vector",
    of_vocabulary("process_crashes_and_undefined_behaviour"),
    ids=lambda v: f"{v['api']} {v['call']}",
)
def test_crashes(vector):
    with refusal():
        CRASHES[vector["api"], vector["call"]]()


def refusal():
    return pytest.raises((MeshError, LayoutError), match=r"(?s)got .*expected")


def sharded():
    return Layout(["x", "unsharded", "y"], abstract_mesh({"x": 2, "y": 3}))


ACCEPTED = {
    "Mesh": [
        lambda: mesh(names=("x", "x"), ids=((0, 1),)),
        *(lambda name=name: mesh(names=(name,)) for name in ("unsharded", "match", "any", "scalar", "")),
        lambda: mesh(local_ids=(2, 3)),
        lambda: mesh(ids=(0, 1, 2)),
        lambda: mesh(local=["CPU:0", "CPU:1"]),
        lambda: mesh(local=["/job:localhost/task:0/device:CPU", "/job:localhost/task:0/device:CPU:1"]),
    ],
    "Layout.delete": [lambda: sharded().to_parted().delete(0)],
    "Layout.global_shape_from_local_shape / local_shape_from_global_shape": [
        lambda: sharded().global_shape_from_local_shape((2, 2)),
        lambda: sharded().global_shape_from_local_shape(()),
        lambda: sharded().local_shape_from_global_shape((2, 2)),
        lambda: sharded().local_shape_from_global_shape((2, 2, 2, 2)),
        lambda: Layout.replicated(MESH, 1).global_shape_from_local_shape((2, 2)),
    ],
    "Layout.offset_tuple_to_global_index": [
        lambda: sharded().offset_tuple_to_global_index((1,)),
        lambda: sharded().offset_tuple_to_global_index((1, 0, 2, 5)),
        lambda: sharded().offset_tuple_to_global_index((5, 5, 5)),
        lambda: sharded().offset_tuple_to_global_index(()),
    ],
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=f"{vector['api']}-{number}")
        for vector in of_vocabulary("silently_accepted")
        for number, call in enumerate(ACCEPTED[vector["api"]])
    ],
)
def test_what_tensorflow_accepts_silently(call):
    with refusal():
        call()


def test_any_sequence_will_do():
    as_lists = Mesh(["x"], np.arange(2), [0, 1], CPUS[:2])
    assert Mesh(("x",), np.arange(2), range(2), tuple(CPUS[:2]), global_devices=()) == as_lists
