"""Tensors against TensorFlow's vectors: pack, relayout, components of several clients."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.states import cluster_mesh, differences

from dtckpt import Layout, abstract_mesh, copy_to_mesh, pack, relayout, unpack

GOLDEN = json.loads((Path(__file__).parents[1] / "layout" / "golden" / "tensorflow.json").read_text())


def counted(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize("vector", GOLDEN["relayout"], ids=lambda v: f"{v['source']} to {v['requested']}")
def test_relayout(vector):
    mesh = abstract_mesh(dict(vector["dims"]))
    whole = counted(vector["global_shape"])
    before = copy_to_mesh(whole, Layout(vector["source"], mesh))
    after = relayout(before, Layout(vector["requested"], mesh))
    assert after.layout.sharding_specs == vector["result"]
    assert [component.tolist() for component in unpack(after)] == vector["components"]
    assert torch.equal(after.full_tensor(), whole)


CASES = [
    (case, vector)
    for run in GOLDEN["multi_client"]["runs"]
    for case in run.get("cases", ())
    for vector in case["layouts"]
    if "local_components" in vector
]


@pytest.mark.parametrize(("case", "vector"), CASES)
def test_components_of_several_clients(case, vector):
    mesh = cluster_mesh(dict(case["dims"]), case["clients"], case["client_id"])
    layout = Layout(vector["sharding_specs"], mesh)
    components = [torch.tensor(component) for component in vector["local_components"]]
    shape = vector["packed_shape"]
    assert list(layout.global_shape_from_local_shape(components[0].shape)) == shape == vector["global_shape"]
    # The clients would find the shape together, but this one is alone.
    assert all(torch.equal(a, b) for a, b in zip(unpack(pack(components, layout, shape)), components, strict=True))


def test_packing_gives_the_components_back():
    for vector in GOLDEN["relayout"]:
        mesh = abstract_mesh(dict(vector["dims"]))
        layout = Layout(vector["result"], mesh)
        components = [torch.tensor(component) for component in vector["components"]]
        packed = pack(components, layout)
        assert differences(packed, counted(vector["global_shape"])) == []
        assert all(torch.equal(a, b) for a, b in zip(unpack(packed), components, strict=True))
