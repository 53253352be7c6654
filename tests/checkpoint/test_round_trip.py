"""Saved tensors come back, element by element, over any meshes and layouts."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import (
    MESH_MAKERS,
    bits_of,
    differences,
    dtype_names,
    layouts,
    meshes,
    packed,
    shapes,
    tensor_of,
    zeros_of,
)

import dtckpt
from dtckpt import Layout, Region, SaveOptions, abstract_mesh
from dtckpt.comm.torch_device import device_of
from dtckpt.format.codecs import CODECS
from dtckpt.format.dtypes import DTYPES

options_drawn = st.builds(
    SaveOptions,
    kvstore=st.sampled_from(["ocdbt", "zarr"]),
    codec=st.sampled_from([None, *CODECS]),
    chunk_nbytes=st.sampled_from([1, 7, 64, 1 << 20]),
    check_replicas=st.booleans(),
    fsync=st.just(False),
)


@st.composite
def states(draw, make_mesh=abstract_mesh):
    """A mesh, and tensors by name: whole ones, and layouts (None: a plain tensor)."""
    mesh = draw(meshes(make_mesh=make_mesh))
    names = draw(st.lists(st.sampled_from(["w", "w/m", "b", "a/b/c", "d"]), min_size=1, max_size=3, unique=True))
    wholes, chosen = {}, {}
    for name in names:
        shape = draw(shapes)
        wholes[name] = tensor_of(name, shape, draw(dtype_names))
        chosen[name] = draw(st.none() | layouts(mesh, len(shape)))
    return mesh, wholes, chosen


def tree_of(wholes, chosen, device="cpu"):
    return {
        name: whole.to(device) if chosen[name] is None else packed(whole, chosen[name])
        for name, whole in wholes.items()
    }


def zeros_on(wholes, chosen, device="cpu"):
    return tree_of({name: zeros_of(whole) for name, whole in wholes.items()}, chosen, device)


def assert_holds(restored, wholes):
    assert list(restored) == list(wholes)
    for name, whole in wholes.items():
        tensor = restored[name]
        if isinstance(tensor, dtckpt.DTensor):
            assert differences(tensor, whole) == [], name
        else:
            assert bits_of(tensor) == bits_of(whole), name


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
@settings(max_examples=examples(6))
@given(options=options_drawn, data=st.data())
def test_save_and_restore_on_any_meshes(make_mesh, options, data):
    mesh, wholes, chosen = data.draw(states(make_mesh))
    device = device_of(mesh.local_devices()[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        dtckpt.save(path, tree_of(wholes, chosen, device), options=options)
        other = data.draw(meshes("acd", make_mesh))
        onto = {name: data.draw(layouts(other, whole.ndim)) for name, whole in wholes.items()}

        restored = dtckpt.restore(path, mesh=other, layouts=onto)
        assert {name: tensor.layout for name, tensor in restored.items()} == onto
        assert_holds(restored, wholes)

        third = data.draw(meshes("bde", make_mesh))
        into = zeros_on(wholes, {n: data.draw(st.none() | layouts(third, w.ndim)) for n, w in wholes.items()}, device)
        assert dtckpt.restore(path, into) is into
        assert_holds(into, wholes)

        assert_holds(dtckpt.restore(path), wholes)
        with dtckpt.open_checkpoint(path) as checkpoint:
            assert checkpoint.verify().damages == ()


@settings(max_examples=examples(6))
@given(states(), options_drawn, options_drawn, st.data())
def test_reshard_keeps_every_element(state, options, new_options, data):
    mesh, wholes, chosen = state
    with tempfile.TemporaryDirectory() as folder:
        path, moved = Path(folder) / "saved", Path(folder) / "moved"
        dtckpt.save(path, tree_of(wholes, chosen), options=options)
        other = data.draw(meshes(names="acd"))
        onto = {
            name: data.draw(layouts(other, whole.ndim)) for name, whole in wholes.items() if data.draw(st.booleans())
        }
        report = dtckpt.reshard(path, moved, mesh=other, layouts=onto, options=new_options)
        assert report.nbytes == sum(whole.nbytes for whole in wholes.values())
        assert_holds(dtckpt.restore(moved), wholes)
        with dtckpt.open_checkpoint(moved) as checkpoint:
            for name, layout in onto.items():
                assert checkpoint.tensors[name].layout == layout
            assert {info.layout.mesh for info in checkpoint.tensors.values()} == {other}
            assert checkpoint.verify().damages == ()
        again = dtckpt.restore(moved, mesh=mesh)
        assert_holds(again, wholes)


@settings(max_examples=examples(6))
@given(states(), options_drawn, st.data())
def test_any_region_can_be_read(state, options, data):
    _, wholes, chosen = state
    with tempfile.TemporaryDirectory() as folder:
        dtckpt.save(Path(folder) / "saved", tree_of(wholes, chosen), options=options)
        with dtckpt.open_checkpoint(Path(folder) / "saved") as checkpoint:
            for name, whole in wholes.items():
                start = tuple(data.draw(st.integers(0, size)) for size in whole.shape)
                shape = tuple(
                    data.draw(st.integers(0, size - low)) for size, low in zip(whole.shape, start, strict=True)
                )
                region = Region(start, shape)
                assert bits_of(checkpoint.read(name, region)) == bits_of(whole[region.slices()])


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_the_whole_of_it(tmp_path, dtype, kvstore):
    size = getattr(torch, dtype).itemsize
    whole = tensor_of("every", (64, 3), dtype)
    if size <= 2 and dtype != "bool":
        whole = torch.from_numpy(np.arange(1 << 8 * size, dtype=f"u{size}").view(np.uint8)).view(getattr(torch, dtype))
    mesh = abstract_mesh({"x": 3})
    layout = Layout(["x", *["unsharded"] * (whole.ndim - 1)], mesh)
    dtckpt.save(tmp_path / "s", {"w": packed(whole, layout)}, options=SaveOptions(kvstore=kvstore, fsync=False))
    assert bits_of(dtckpt.restore(tmp_path / "s")["w"]) == bits_of(whole)


@settings(max_examples=examples(6))
@given(st.integers(0, 2**32 - 1), st.sampled_from(["ocdbt", "zarr"]))
def test_bf16_rounds_as_torch_does(seed, kvstore):
    bits = np.random.default_rng(seed).integers(0, 2**32, 500, np.uint64).astype(np.uint32)
    edges = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x80000001, 0x7F800000, 0], np.uint32)
    whole = torch.from_numpy(np.concatenate([bits, edges]).view(np.float32))
    layout = Layout(["x"], abstract_mesh({"x": 3}))
    tree = {"w": packed(whole, layout), "i": torch.arange(4), "d": torch.ones(3, dtype=torch.float64) / 3}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        dtckpt.save(path, tree, options=SaveOptions(save_as_bf16=True, kvstore=kvstore, fsync=False))
        restored = dtckpt.restore(path, mesh=abstract_mesh({"x": 2}))
        with dtckpt.open_checkpoint(path) as checkpoint:
            info = checkpoint.tensors["w"]
            assert (info.dtype, info.stored_dtype, info.nbytes) == (torch.float32, torch.bfloat16, 2 * len(whole))
            assert checkpoint.tensors["d"].stored_dtype == torch.float64
    got, expected = restored["w"].full_tensor(), whole.to(torch.bfloat16).to(torch.float32)
    is_nan = expected.isnan()
    assert got.dtype == torch.float32
    assert got.isnan().equal(is_nan)
    assert bits_of(got[~is_nan]) == bits_of(expected[~is_nan])
    assert restored["i"].full_tensor().tolist() == [0, 1, 2, 3]
    assert bits_of(restored["d"].full_tensor()) == bits_of(tree["d"])


@pytest.mark.parametrize("target", ["float64", "float32", "bfloat16", "float8_e5m2", "complex64"])
def test_reshard_rounds_as_torch_does(tmp_path, target):
    whole = torch.from_numpy(np.random.default_rng(0).normal(0, 100, (30, 5)))
    tree = {"w": packed(whole.float(), Layout(["x", "unsharded"], abstract_mesh({"x": 4}))), "i": torch.arange(9)}
    dtckpt.save(tmp_path / "a", tree)
    kind = getattr(torch, target)
    if target.startswith("complex"):
        with pytest.raises(dtckpt.errors.ConfigError, match="got complex64"):
            dtckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=abstract_mesh({"x": 2}), dtype=kind)
        return
    dtckpt.reshard(tmp_path / "a", tmp_path / "b", mesh=abstract_mesh({"x": 2}), dtype=kind)
    restored = dtckpt.restore(tmp_path / "b")
    assert bits_of(restored["w"]) == bits_of(whole.float().to(kind))
    assert restored["i"].dtype == torch.int64


@pytest.mark.parametrize(
    "memory",
    {
        "transposed": lambda: torch.zeros(3, 5, dtype=torch.int64).T,
        "strided": lambda: torch.zeros(10, 6, dtype=torch.int64)[::2, ::2],
        "a gradient's": lambda: torch.zeros(5, 3, dtype=torch.float64, requires_grad=True),
        "a parameter": lambda: torch.nn.Parameter(torch.zeros(5, 3, dtype=torch.float64)),
        "conjugate": lambda: torch.zeros(5, 3, dtype=torch.complex128).conj(),
        "unaligned": lambda: torch.zeros(121, dtype=torch.uint8)[1:].view(torch.uint8),
    }.items(),
    ids=lambda item: item[0],
)
def test_tensors_are_filled_where_they_are(tmp_path, memory):
    target = memory[1]()
    values = torch.arange(target.numel()).reshape(target.shape).to(target.dtype)
    dtckpt.save(tmp_path / "s", {"w": values}, options=SaveOptions(chunk_nbytes=16))
    address = target.data_ptr()
    assert dtckpt.restore(tmp_path / "s", {"w": target})["w"] is target
    assert target.data_ptr() == address
    assert torch.equal(target.detach().resolve_conj(), values)
    # And from such memory.
    dtckpt.save(tmp_path / "t", {"w": target})
    assert torch.equal(dtckpt.restore(tmp_path / "t")["w"], values)


def test_reading_fetches_only_what_meets_the_region(tmp_path):
    mesh = abstract_mesh({"x": 4})
    whole = torch.arange(64 * 16, dtype=torch.float32).reshape(64, 16)
    dtckpt.save(tmp_path / "s", {"w": packed(whole, Layout(["x", "unsharded"], mesh))})
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        into = np.empty((8, 16), np.float32)
        assert checkpoint.read_into("w", Region((20, 0), (8, 16)), into) == 16 * 16 * 4
        assert np.array_equal(into, whole[20:28].numpy())
        assert [chunk.region for chunk in checkpoint.tensors["w"].chunks] == [
            Region((start, 0), (16, 16)) for start in (0, 16, 32, 48)
        ]


def test_reads_from_several_threads(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    whole = tensor_of("w", (40, 30), "float32")
    dtckpt.save(tmp_path / "s", {"w": whole}, options=SaveOptions(chunk_nbytes=500))
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint, ThreadPoolExecutor(8) as threads:
        regions = [Region((row, row % 7), (3, 5)) for row in range(37)] * 5
        for region, part in zip(regions, threads.map(lambda r: checkpoint.read("w", r), regions), strict=True):
            assert bits_of(part) == bits_of(whole[region.slices()])
