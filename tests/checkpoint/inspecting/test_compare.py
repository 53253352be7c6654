"""Comparisons name exactly the changed tensors, whatever layouts, chunks and formats the two checkpoints have."""

import os
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import packed, tensor_of

import dtckpt
from dtckpt import Layout, Region, SaveOptions, abstract_mesh
from dtckpt.checkpoint.inspecting import read_elements
from dtckpt.checkpoint.inspecting.compare import plan_comparison
from dtckpt.checkpoint.inspecting.tensor_comparison import DifferenceKind, PlainValue, Reads, StoredDtype, TensorFacts
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.errors import CheckpointConflictError, CheckpointCorruptError, ConfigError, TensorNotFoundError
from dtckpt.format.manifest import MANIFEST_NAME, Manifest

MESHES = [abstract_mesh({"x": 2, "y": 2}), abstract_mesh({"x": 3})]
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex128")


def compared(a, b, *, max_memory=64 << 20, **options):
    with dtckpt.open_checkpoint(a) as first, dtckpt.open_checkpoint(b) as second:
        return plan_comparison(first, second, **options).run(max_memory=max_memory)


def found(report):
    return [(each.path, str(each.kind)) for each in report.differences]


@contextmanager
def no_reads():
    """Fail where elements are read."""

    def refuse(*args, **options):
        raise AssertionError("elements are read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read_all", refuse)
        yield


def changed(tensor, positions):
    """Return a tensor with other bits in some elements."""
    copy = tensor.clone()
    data = copy.reshape(-1).view(torch.uint8)
    for position in positions:
        data[position * copy.itemsize] ^= 1
    return copy


specs = st.sampled_from([None, ["x", "unsharded"], ["unsharded", "x"], [("x", "y"), "unsharded"]])


@st.composite
def trees(draw):
    """Two trees, the options of their saves, and their differences: by path the kind, or how many elements differ."""
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True))
    sides = [{}, {}]
    expected = {}
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.tuples(st.integers(0, 9), st.integers(1, 7)))
        whole = tensor_of(name, shape, dtype)
        kind = draw(st.sampled_from(["same", "same", "changed", "missing", "extra"]))
        positions = []
        if kind == "changed" and whole.numel():
            positions = draw(st.lists(st.integers(0, whole.numel() - 1), min_size=1, max_size=4, unique=True))
            expected[name] = sorted(positions)
        elif kind in ("missing", "extra"):
            expected[name] = kind
        for side, tensor in zip(sides, (whole, changed(whole, positions)), strict=True):
            spec = draw(specs)
            mesh = MESHES[0] if spec and len(spec[0]) == 2 else draw(st.sampled_from(MESHES))
            side[name] = tensor if spec is None else packed(tensor, Layout(spec, mesh))
        if kind in ("missing", "extra"):
            del sides[kind == "missing"][name]
    for side, number in zip(sides, draw(st.tuples(st.integers(0, 1), st.integers(0, 1))), strict=True):
        side["step"] = number
    if sides[0]["step"] != sides[1]["step"]:
        expected["step"] = "value"
    options = [
        SaveOptions(
            kvstore=draw(st.sampled_from(["ocdbt", "zarr"])),
            chunk_nbytes=draw(st.sampled_from([16, 100, 16 << 20])),
            content_digest=draw(st.booleans()),
            codec=draw(st.sampled_from([None, "zstd"])),
        )
        for _ in sides
    ]
    return sides, options, expected


@settings(max_examples=examples(12))
@given(trees())
def test_random_changes_are_named_exactly(tmp_path_factory, case):
    sides, options, expected = case
    folder = tmp_path_factory.mktemp("pair")
    paths = [folder / "a", folder / "b"]
    for path, tree, each in zip(paths, sides, options, strict=True):
        dtckpt.save(path, tree, options=each)
    ignore = {DifferenceKind.LAYOUT}
    kinds = {path: kind if isinstance(kind, str) else "elements" for path, kind in expected.items()}
    assert dict(found(compared(*paths, ignore=ignore))) == kinds
    report = compared(*paths, ignore=ignore, reads=Reads.DIFFERENT)
    assert dict(found(report)) == kinds
    for difference in report.differences:
        if difference.kind is DifferenceKind.ELEMENTS:
            assert difference.elements.num_different == len(expected[difference.path])
    with no_reads():
        quick = compared(*paths, ignore=ignore, reads=Reads.NONE)
    known = dict(found(quick))
    assert all(known.pop(path, None) in (kind, "unknown") for path, kind in kinds.items())
    assert set(known.values()) <= {"unknown"}
    if all(each.content_digest for each in options):
        assert dict(found(quick)) == kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compared")


def saved(folder, name, tree, **options):
    path = folder / name
    if not path.exists():
        dtckpt.save(path, tree, options=SaveOptions(**options))
    return path


def test_everything_but_elements(folder):
    a = saved(
        folder,
        "a",
        {
            "w": torch.ones(2, 3),
            "v": torch.ones(4),
            "x": torch.ones(2),
            "items": [1, (2, 3)],
            "k": {1: 2},
            "n": np.ones(2),
        }
        | {"nan": float("nan"), "one": 1, "empty": {}, "flag": True, "t": 5},
    )
    b = saved(
        folder,
        "b",
        {"w": torch.ones(3, 2), "v": torch.ones(4).half(), "x": torch.ones(2), "items": [1, [2, 3]], "k": {"1": 2}}
        | {"n": torch.ones(2).double(), "nan": float("nan"), "one": 1.0, "flag": 1, "more": [None], "t": torch.ones(1)},
    )
    report = compared(a, b)
    facts = {(each.path, str(each.kind)): (each.a, each.b) for each in report.differences}
    assert facts == {
        ("empty", "missing"): ("empty dict", None),
        ("flag", "value"): (PlainValue('{"value": true}'), PlainValue('{"value": 1}')),
        ("items/1", "type"): ("tuple", "list"),
        ("k", "type"): ("dict with keys of type int", "dict"),
        ("more/0", "extra"): (None, PlainValue('{"value": null}')),
        ("n", "type"): ("ndarray", "tensor"),
        ("one", "value"): (PlainValue('{"value": 1}'), PlainValue('{"value": 1.0}')),
        ("t", "type"): ("value", "tensor"),
        ("v", "dtype"): (StoredDtype("float32", "float32"), StoredDtype("float16", "float16")),
        ("w", "shape"): ((2, 3), (3, 2)),
    }
    assert (report.num_tensors, report.num_by_digest, report.num_read) == (4, 2, 1)
    back = compared(b, a, select=["more/*", "empty"])
    assert [(each.path, str(each.kind), each.a) for each in back.differences] == [
        ("empty", "extra", None),
        ("more/0", "missing", PlainValue('{"value": null}')),
    ]
    assert compared(a, a).is_same


def test_layouts_and_stored_dtypes(folder):
    whole = torch.arange(24.0).reshape(4, 6)
    rows = saved(folder, "rows", {"w": packed(whole, Layout(["x", "unsharded"], MESHES[0]))})
    columns = saved(folder, "columns", {"w": packed(whole, Layout(["unsharded", "x"], MESHES[0]))})
    other = saved(folder, "other", {"w": packed(whole, Layout(["x", "unsharded"], MESHES[1]))})
    short = saved(folder, "short", {"w": whole}, save_as_bf16=True)
    with no_reads():
        for path in (columns, other):
            assert found(compared(rows, path)) == [("w", "layout")]
            assert compared(rows, path, ignore={DifferenceKind.LAYOUT}).is_same
    report = compared(rows, short)
    assert found(report) == [("w", "dtype"), ("w", "layout")]
    assert str(report.differences[0].b) == "float32 (stored bfloat16)"
    assert report.num_read == 1


def test_chunks_whose_digests_are_equal_are_not_read(folder):
    whole = torch.arange(512 * 1024, dtype=torch.int32).reshape(1024, 512)
    mesh = abstract_mesh({"x": 4})
    layout = Layout(["x", "unsharded"], mesh)
    paths = [
        saved(folder, f"chunks-{number}", {"w": packed(tensor, layout)}, content_digest=number < 2)
        for number, tensor in enumerate((whole, changed(whole, [300_000]), changed(whole, [300_000])))
    ]
    report = compared(*paths[:2], reads=Reads.DIFFERENT)
    assert report.nbytes == 2 * whole.nbytes // 4
    assert report.differences[0].elements.max_abs.index == (585, 480)
    with no_reads():
        # Without content digests the digests of chunks tell.
        assert compared(paths[1], paths[2]).is_same
        assert found(compared(paths[0], paths[2])) == [("w", "elements")]


def test_formats_of_other_libraries(folder):
    tree = {"w": torch.rand(40, 30), "b": torch.arange(5), "h": torch.rand(7).bfloat16()}
    ours = saved(folder, "ours", tree)
    theirs = folder / "model.safetensors"
    safetensors.torch.save_file(tree, theirs)
    torch.save(tree, folder / "state.pt")
    dtckpt.convert(ours, folder / "dcp", to="dcp")
    for path in (theirs, folder / "state.pt", folder / "dcp"):
        report = compared(ours, path)
        assert (report.is_same, report.num_read) == (True, 3), path
        assert found(compared(ours, path, reads=Reads.NONE)) == [(name, "unknown") for name in ("b", "h", "w")]
        with no_reads():
            assert compared(ours, path, ignore={DifferenceKind.ELEMENTS}).is_same
    tree["w"][3, 4] += 1
    safetensors.torch.save_file(tree, folder / "other.safetensors")
    report = compared(theirs, folder / "other.safetensors")
    assert found(report) == [("w", "elements")]
    assert report.differences[0].elements.max_abs.index == (3, 4)


def test_notes_of_digests_in_files_that_were_changed_are_not_trusted(folder):
    """Other programs keep a file's notes when they change its tensors."""
    ours = saved(folder, "noted", {"w": torch.ones(64)})
    dtckpt.convert(ours, folder / "noted.safetensors")
    with no_reads():
        report = compared(ours, folder / "noted.safetensors", reads=Reads.NONE)
    assert (report.is_same, report.num_by_digest) == (True, 1)
    with safetensors.safe_open(folder / "noted.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {"w": file.get_tensor("w")}
    tensors["w"][5] = 2
    safetensors.torch.save_file(tensors, folder / "changed.safetensors", metadata)
    for reads in (Reads.NEEDED, Reads.DIFFERENT):
        report = compared(ours, folder / "changed.safetensors", reads=reads)
        assert report.differences[0].elements.max_abs.index == (5,)


def test_names_of_the_second_checkpoint(folder):
    a = saved(folder, "named", {"model": {"w": torch.ones(3), "b": torch.zeros(2)}, "step": 1})
    b = saved(folder, "renamed", {"w": torch.ones(3), "b": torch.ones(2)})
    report = compared(a, b, select=["model/*"], rename={"model/*": "*"})
    assert found(report) == [("b", "elements")]
    with pytest.raises(TensorNotFoundError, match="rename"):
        compared(a, b, rename={"nothing/*": "*"})
    with pytest.raises(TensorNotFoundError, match="matches 'q/\\*'"):
        compared(a, b, select=["q/*"])


def test_tensors_that_were_saved_in_part(folder):
    mesh = abstract_mesh({"x": 1})
    parts = {"top": "6 4 0,2:0,4", "bottom": "6 4 4,2:0,4"}

    def part(name, *which, fill=1.0):
        tensors = [torch.full((2, 4), fill) for _ in which]
        dtckpt.sharded_save(mesh, folder / name, ["w"] * len(which), [parts[each] for each in which], tensors)
        return folder / name

    both, top, other = part("both", "top", "bottom"), part("top", "top"), part("top2", "top", fill=2.0)
    assert compared(both, both).is_same
    report = compared(both, top)
    assert found(report) == [("w", "part")]
    assert (report.differences[0].a, report.differences[0].b) == (16, 8)
    assert found(compared(both, other, reads=Reads.DIFFERENT)) == [("w", "part"), ("w", "elements")]
    whole = saved(folder, "whole", {"w": torch.ones(6, 4)})
    assert found(compared(top, whole, ignore={DifferenceKind.LAYOUT})) == [("w", "part")]


def test_values_that_cannot_be_read(folder):
    torch.save({"w": torch.ones(2), "config": os.stat_result(range(10))}, folder / "odd.pt")
    torch.save({"w": torch.ones(2)}, folder / "plain.pt")
    report = compared(folder / "odd.pt", folder / "plain.pt")
    assert found(report) == [("config", "unknown")]
    assert report.differences[0].reason
    assert compared(folder / "odd.pt", folder / "plain.pt", ignore={DifferenceKind.UNKNOWN}).is_same


def test_damage_is_an_error(folder):
    a = saved(folder, "sound", {"w": torch.rand(1000)}, kvstore="zarr", content_digest=False)
    b = saved(folder, "damaged", {"w": torch.rand(1000)}, kvstore="zarr")
    chunk = b / "w" / "c" / "0"
    chunk.write_bytes(bytes(4000))
    with pytest.raises(CheckpointCorruptError, match="tensor 'w'"):
        compared(a, b, reads=Reads.DIFFERENT)


def test_content_digests_that_contradict_the_elements_are_not_believed(folder):
    a = saved(folder, "believed", {"w": torch.ones(5)})
    b = saved(folder, "forged", {"w": torch.ones(5)})
    manifest = Manifest.from_bytes((b / MANIFEST_NAME).read_bytes(), "here")
    entry = manifest.arrays["w"]
    forged = replace(manifest, arrays={"w": replace(entry, content=entry.content ^ 1)})
    (b / MANIFEST_NAME).write_bytes(forged.to_bytes())
    assert found(compared(a, b)) == [("w", "elements")]
    (difference,) = compared(a, b, reads=Reads.DIFFERENT).differences
    assert difference.kind is DifferenceKind.UNKNOWN
    assert "dtckpt verify" in difference.reason


def test_a_checkpoint_that_is_replaced_meanwhile(folder):
    a = saved(folder, "kept", {"w": torch.rand(100)})
    b = saved(folder, "replaced", {"w": torch.rand(100)}, kvstore="zarr")
    with dtckpt.open_checkpoint(a) as first, dtckpt.open_checkpoint(b) as second:
        comparison = plan_comparison(first, second, reads=Reads.DIFFERENT)
        dtckpt.save(b, {"v": torch.rand(100)}, options=SaveOptions(kvstore="zarr", overwrite=True))
        with pytest.raises(CheckpointConflictError, match="replaced"):
            comparison.run()


def test_memory(folder, monkeypatch):
    tensors = {f"t{number}": torch.arange(300_000) + number for number in range(4)}
    a = saved(folder, "much", tensors, content_digest=False, chunk_nbytes=100_000)
    b = saved(folder, "much2", tensors | {"t2": changed(tensors["t2"], [299_999])}, chunk_nbytes=1 << 20)
    sizes = []
    read_all = Checkpoint.read_all

    def counted(self, requests, *, max_in_flight):
        requests = list(requests)
        sizes.append((sum(array.nbytes for _, each in requests for _, array in each), max_in_flight))
        return read_all(self, requests, max_in_flight=max_in_flight)

    monkeypatch.setattr(Checkpoint, "read_all", counted)
    report = compared(a, b, max_memory=24 << 20)
    assert [(each.path, each.elements.max_abs.index) for each in report.differences] == [("t2", (299_999,))]
    largest = max(nbytes for nbytes, _ in sizes)
    assert largest <= 2 << 20
    assert 4 * largest + 2 * sizes[0][1] + read_elements.WORK_NBYTES <= 24 << 20
    assert sum(nbytes for nbytes, _ in sizes) == report.nbytes == 2 * 4 * 2_400_000
    with pytest.raises(ConfigError, match=r"max_memory is too small; got 1048576 bytes, expected at least \d+"):
        compared(a, b, max_memory=1 << 20)


def test_progress(folder):
    tensors = {"a": torch.rand(10), "b": torch.rand(20)}
    ours = saved(folder, "moving", tensors)
    safetensors.torch.save_file(tensors, folder / "moving.safetensors")
    calls = []
    with dtckpt.open_checkpoint(ours) as a, dtckpt.open_checkpoint(folder / "moving.safetensors") as b:
        comparison = plan_comparison(a, b)
        assert comparison.nbytes == 240
        comparison.run(progress=lambda name, nbytes: calls.append((name, nbytes)))
    assert calls == [("a", 80), ("b", 160)]


def test_tensors_of_one_side_only(folder):
    a = saved(folder, "left", {"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    b = saved(folder, "right", {})
    (difference,) = compared(a, b).differences
    assert difference.a == TensorFacts((2, 3), "bfloat16", 12)
    assert Region.full(difference.a.shape).numel == 6
