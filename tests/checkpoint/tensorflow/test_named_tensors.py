"""The calls of TensorFlow's names: flat sets of named tensors."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import bits_of, differences, layouts, meshes, packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh, errors

MESH = abstract_mesh({"x": 2, "y": 2})


def test_names_and_templates(tmp_path):
    wholes = {"b": tensor_of("b", (5, 4), "float32"), "a": tensor_of("a", (7,), "int64")}
    tensors = {
        "b": packed(wholes["b"], Layout(["x", "y"], MESH)),
        "a": packed(wholes["a"], Layout(["unsharded"], MESH)),
    }
    assert dtckpt.name_based_save(MESH, tmp_path / "s", tensors) is None
    other = abstract_mesh({"z": 3})
    templates = {
        "b": packed(torch.zeros(5, 4), Layout(["unsharded", "z"], other)),
        "a": packed(torch.zeros(7, dtype=torch.int64), Layout(["z"], other)),
    }
    restored = dtckpt.name_based_restore(other, tmp_path / "s", templates)
    assert type(restored) is OrderedDict
    assert list(restored) == ["b", "a"]
    for name, whole in wholes.items():
        assert differences(restored[name], whole) == []
        assert restored[name].layout == templates[name].layout
        assert templates[name].full_tensor().eq(0).all(), "templates stay as they are"
    # The other calls read the same file.
    assert bits_of(dtckpt.restore(tmp_path / "s")["b"]) == bits_of(wholes["b"])


def test_templates_for_some(tmp_path):
    dtckpt.name_based_save(MESH, str(tmp_path / "s"), {"a": torch.ones(3), "b": torch.ones(2)})
    template = packed(torch.zeros(2), Layout(["x"], MESH))
    assert list(dtckpt.name_based_restore(MESH, tmp_path / "s", {"b": template})) == ["b"]
    with pytest.raises(errors.ShapeMismatchError, match=r"'a'.*got \(2,\).*expected \(3,\)"):
        dtckpt.name_based_restore(MESH, tmp_path / "s", {"a": template})
    with pytest.raises(errors.DTypeError, match=r"'b'.*got int32"):
        dtckpt.name_based_restore(MESH, tmp_path / "s", {"b": packed(torch.zeros(2).int(), Layout(["x"], MESH))})


@settings(max_examples=examples(50))
@given(st.data())
def test_slices_that_cover_a_tensor(tmp_path_factory, data):
    """A tensor cut in two along a dim; the parts have different layouts, on one mesh."""
    mesh = data.draw(meshes())
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    whole = tensor_of("w", shape, "int16")
    names, texts, tensors = [], [], []
    for start, stop in ((0, cut), (cut, shape[dim])):
        part = whole.narrow(dim, start, stop - start)
        places = [f"{start},{stop - start}" if position == dim else "-" for position in range(len(shape))]
        names.append("w")
        texts.append(" ".join([*map(str, shape), ":".join(places)]))
        tensors.append(packed(part, data.draw(layouts(mesh, len(shape)))))
    path = tmp_path_factory.mktemp("slices") / "s"
    options = SaveOptions(fsync=False, chunk_nbytes=data.draw(st.sampled_from([8, 1 << 20])))
    dtckpt.sharded_save(mesh, path, names, texts, tensors, options=options)
    assert bits_of(dtckpt.restore(path)["w"]) == bits_of(whole)


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_a_slice_far_inside_a_large_tensor(tmp_path, kvstore):
    dtckpt.sharded_save(
        MESH, tmp_path / "s", ["w"], ["10007 7 1,5:-"], [torch.ones(5, 7)], options=SaveOptions(kvstore=kvstore)
    )
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.read("w", dtckpt.Region((1, 0), (5, 7))).eq(1).all()
