"""TensorFlow's functions on tensors take TensorFlow's arguments."""

import inspect

import torch

from dtckpt import UNSHARDED, Layout, abstract_mesh, copy_to_mesh, relayout

MESH = abstract_mesh({"x": 2})
SHARDED, WHOLE = Layout(["x"], MESH), Layout([UNSHARDED], MESH)


def test_relayout_takes_a_name():
    assert list(inspect.signature(relayout).parameters) == ["tensor", "layout", "name"]
    moved = relayout(relayout(torch.arange(4), SHARDED, "first"), WHOLE, name="second")
    assert [part.tolist() for part in moved.components] == [[0, 1, 2, 3]] * 2


def test_copy_to_mesh_takes_the_layout_of_its_source():
    assert list(inspect.signature(copy_to_mesh).parameters) == ["tensor", "layout", "source_layout"]
    for source_layout in (None, WHOLE, SHARDED):
        copied = copy_to_mesh(torch.arange(4), SHARDED, source_layout)
        assert [part.tolist() for part in copied.components] == [[0, 1], [2, 3]]
        assert copy_to_mesh(copied, WHOLE, source_layout=source_layout).layout == WHOLE
