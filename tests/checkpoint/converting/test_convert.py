"""Conversions there and back: every bit, name and value stays; what cannot be converted is refused; nothing is half."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import safetensors
import safetensors.torch
import torch
import zarr
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, errors
from dtckpt.checkpoint.converting import write_files
from dtckpt.checkpoint.foreign.safetensors_index import NAMES
from dtckpt.format.dtypes import DTYPES
from dtckpt.storage import new_files
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.fsync import TrailingWriteback

CPUS = [f"CPU:{number}" for number in range(6)]


def tensors():
    """Tensors of every dtype that safetensors has, and of odd shapes."""
    made = {f"kinds/{dtype}": tensor_of(dtype, (5, 4), dtype) for dtype in NAMES}
    return {
        **made,
        "layers/0.w": tensor_of("0", (40, 33), "float32").nan_to_num(),
        "layers/1.w": tensor_of("1", (3, 5, 7), "bfloat16").nan_to_num(),
        "scalar": tensor_of("s", (), "float64"),
        "none": torch.zeros(0, 3),
    }


VALUES = {"step": 7, "limit": float("inf"), "raw": b"\0x", "names": ["a", ("b", 2)], "none of it": None}


def tree():
    nested = {"kinds": {}, "layers": {}, **VALUES}
    for name, tensor in tensors().items():
        folder, _, key = name.rpartition("/")
        (nested[folder] if folder else nested)[key] = tensor
    return nested


def same(restored, expected):
    return bits_of(restored) == bits_of(expected)


@pytest.fixture
def saved(tmp_path):
    mesh = dtckpt.create_mesh({"x": 2, "y": 3}, devices=CPUS)
    state = tree()
    state["layers"]["0.w"] = packed(state["layers"]["0.w"], Layout(["y", "x"], mesh))
    dtckpt.save(tmp_path / "saved", state, options=SaveOptions(chunk_nbytes=512))
    return tmp_path / "saved"


def holds_all(path):
    """Check that a checkpoint holds the whole tree."""
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert {name: bits_of(checkpoint.read(name)) for name in checkpoint.tensors} == {
            name: bits_of(tensor) for name, tensor in tensors().items()
        }
        report = checkpoint.verify()
        assert (report.is_sound, report.num_unverified) == (True, 0)
    restored = dtckpt.restore(path)
    assert {key: restored[key] for key in VALUES} == VALUES
    assert list(restored) == list(tree())
    return True


def contents(report):
    return {tensor.new_name: tensor.content_digest for tensor in report.tensors}


@pytest.mark.parametrize("max_memory", [300_000, 256 << 20])
def test_there_and_back(saved, tmp_path, max_memory):
    there = dtckpt.convert(saved, tmp_path / "st", to="safetensors", max_shard_size=2000, max_memory=max_memory)
    assert (there.source_format, there.format) == ("dtckpt", "safetensors")
    assert there.files == {file.name: file.stat().st_size for file in (tmp_path / "st").iterdir()}
    assert len(there.files) > 3
    assert holds_all(tmp_path / "st")
    back = dtckpt.convert(tmp_path / "st", tmp_path / "back", max_memory=max_memory)
    assert (back.source_format, back.format, back.files) == ("safetensors", "dtckpt", {})
    assert holds_all(tmp_path / "back")
    assert contents(there) == contents(back)
    assert None not in contents(back).values()
    with dtckpt.open_checkpoint(saved) as source:
        assert contents(back) == {name: info.content_digest for name, info in source.tensors.items()}
    again = dtckpt.convert(tmp_path / "st", tmp_path / "one.safetensors", max_memory=max_memory)
    assert list(again.files) == ["one.safetensors"]
    assert holds_all(tmp_path / "one.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["back", "one.safetensors", "saved", "st"]


def test_other_readers_read_what_is_written(saved, tmp_path):
    """safetensors itself, by the names that the rule gives; the files are named as in transformers."""
    dtckpt.convert(saved, tmp_path / "st", to="safetensors", max_shard_size=4000)
    index = json.loads((tmp_path / "st" / "model.safetensors.index.json").read_text())
    names = {name.replace("/", "."): name for name in tensors()}
    assert set(index["weight_map"]) == set(names)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors().values())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    for file in files:
        with safetensors.safe_open(tmp_path / "st" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            here = opened.keys()
            for name in here:
                assert index["weight_map"][name] == file
                if not name.endswith(("e8m0fnu", "e2m1fn_x2")):  # safetensors for PyTorch lacks them
                    assert same(opened.get_tensor(name), tensors()[names[name]])
        # Each element at a multiple of its size, as safetensors itself lays them out.
        part = shutil.copy(tmp_path / "st" / file, tmp_path / "part.safetensors")
        with dtckpt.open_checkpoint(part) as checkpoint:
            for info in checkpoint.tensors.values():
                assert all(int(chunk.key.split("@")[1]) % info.dtype.itemsize == 0 for chunk in info.chunks)


def test_zarr(saved, tmp_path):
    dtckpt.convert(saved, tmp_path / "z", to="zarr")
    assert holds_all(tmp_path / "z")
    array = zarr.open_array(tmp_path / "z" / "layers" / "0.w", mode="r")
    assert same(torch.from_numpy(array[:]), tensors()["layers/0.w"])


def test_select_rename_dtype(saved, tmp_path):
    report = dtckpt.convert(
        saved,
        tmp_path / "m.safetensors",
        select=["layers/*", "step"],
        rename={"layers/*.w": "model.*.weight"},
        dtype=torch.float16,
    )
    assert [(tensor.name, tensor.new_name, tensor.dtype, tensor.new_dtype) for tensor in report.tensors] == [
        ("layers/0.w", "model.0.weight", "float32", "float16"),
        ("layers/1.w", "model.1.weight", "bfloat16", "float16"),
    ]
    assert report.values == ["step"]
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    for number in (0, 1):
        assert same(read[f"model.{number}.weight"], tensors()[f"layers/{number}.w"].half())
    assert dtckpt.restore(tmp_path / "m.safetensors")["step"] == 7
    with dtckpt.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.verify().num_contents == 2
    report = dtckpt.convert(saved, tmp_path / "d", select="layers/*", dtype=torch.float64)
    with dtckpt.open_checkpoint(tmp_path / "d") as checkpoint:
        assert checkpoint.tensors["layers/0.w"].dtype == torch.float64
        assert checkpoint.tensors["layers/0.w"].layout.sharding_specs == ["y", "x"]
        assert not checkpoint.values
    with pytest.raises(errors.TensorNotFoundError, match=r"is named 'x\*'"):
        dtckpt.convert(saved, tmp_path / "n", select=["layers/*", "x*"])
    with pytest.raises(errors.TensorNotFoundError, match="nothing is named 'scalar'"):
        dtckpt.convert(saved, tmp_path / "n", select="layers/*", rename={"scalar": "s"})


def test_a_plain_dict_of_tensors_needs_no_note(tmp_path):
    expected = {"a.w": torch.ones(2), "b": torch.zeros(3)}
    dtckpt.save(tmp_path / "s", expected)
    dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert sorted(opened.metadata()) == ["dtckpt.content", "format"]
    assert list(dtckpt.restore(tmp_path / "m.safetensors")) == list(expected)


def test_notes_of_tensors_that_somebody_changed(saved, tmp_path):
    """The tree counts only as long as it names the file's tensors, and the digests only for tensors that are there."""
    dtckpt.convert(saved, tmp_path / "m.safetensors", select=["layers/*"])
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        notes = opened.metadata()
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    safetensors.torch.save_file({**read, "more": torch.ones(1)}, tmp_path / "more.safetensors", metadata=notes)
    assert sorted(dtckpt.restore(tmp_path / "more.safetensors")) == ["layers.0.w", "layers.1.w", "more"]
    changed = {name: torch.zeros_like(tensor) for name, tensor in read.items()}
    safetensors.torch.save_file(changed, tmp_path / "changed.safetensors", metadata=notes)
    with dtckpt.open_checkpoint(tmp_path / "changed.safetensors") as checkpoint:
        assert {damage.tensor for damage in checkpoint.verify().damages} == {"layers/0.w", "layers/1.w"}
    for target in ("d", "n.safetensors"):
        with pytest.raises(errors.CheckpointCorruptError, match=r"layers/0.w"):
            dtckpt.convert(tmp_path / "changed.safetensors", tmp_path / target)
        assert not (tmp_path / target).exists()
    for note in ("[]", "{", '{"w": 3}', "null"):
        safetensors.torch.save_file(read, tmp_path / "odd.safetensors", metadata={**notes, "dtckpt.content": note})
        with pytest.raises(errors.CheckpointCorruptError, match=r"dtckpt.content"):
            dtckpt.open_checkpoint(tmp_path / "odd.safetensors")
    for note in ("[]", "{", '{"pickle": "x"}', '{"list": [{"tensor": "layers/0.w"}]}'):
        safetensors.torch.save_file(read, tmp_path / "odd.safetensors", metadata={**notes, "dtckpt.tree": note})
        assert sorted(dtckpt.restore(tmp_path / "odd.safetensors")) == sorted(read)


# --- tied tensors -------------------------------------------------------------------------------------------------


def test_tied_tensors_are_stored_once(tmp_path):
    weight = torch.arange(12.0).reshape(4, 3)
    dtckpt.save(tmp_path / "s", {"in": weight, "out": weight, "other": weight + 1})
    report = dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors", tied={"out": "in"})
    assert {tensor.new_name: tensor.tied_to for tensor in report.tensors} == {"in": None, "out": "in", "other": None}
    assert report.nbytes == 2 * weight.nbytes
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["in", "other"]
        assert opened.metadata()["out"] == "in"
    # Read under both names, and tied again wherever it goes, but in a checkpoint of dtckpt.
    dtckpt.convert(tmp_path / "m.safetensors", tmp_path / "again", to="safetensors")
    with safetensors.safe_open(tmp_path / "again" / "model.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["in", "other"]
    report = dtckpt.convert(tmp_path / "again", tmp_path / "back")
    assert [tensor.tied_to for tensor in report.tensors] == [None] * 3
    restored = dtckpt.restore(tmp_path / "back")
    assert torch.equal(restored["in"], weight)
    assert torch.equal(restored["out"], weight)
    # Without the first of them, the other is stored.
    dtckpt.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", select="out")
    assert list(safetensors.torch.load_file(tmp_path / "out.safetensors")) == ["out"]


def test_tensors_that_cannot_be_tied(tmp_path):
    dtckpt.save(tmp_path / "s", {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.zeros(2)})
    for tied, error, text in (
        ({"b": "a"}, errors.CheckpointCorruptError, "their elements differ"),
        ({"c": "a"}, errors.ConfigError, r"\(2,\)"),
        ({"x": "a"}, errors.TensorNotFoundError, "no tensor 'x'"),
        ({"a": "x"}, errors.TensorNotFoundError, "no tensor 'x'"),
        ({"a": "a"}, errors.TensorNameError, "tied itself"),
        ({"a": "b", "b": "a"}, errors.TensorNameError, "tied itself"),
    ):
        with pytest.raises(error, match=text):
            dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors", tied=tied)
    # A source without digests is read.
    safetensors.torch.save_file(
        {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(3)}, tmp_path / "x.safetensors"
    )
    with pytest.raises(errors.CheckpointCorruptError, match="their elements differ"):
        dtckpt.convert(tmp_path / "x.safetensors", tmp_path / "m.safetensors", tied={"b": "a"})
    dtckpt.convert(tmp_path / "x.safetensors", tmp_path / "m.safetensors", tied={"c": "a"})


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(NAMES)))
def test_dtypes_that_safetensors_lacks(tmp_path, dtype):
    dtckpt.save(tmp_path / "s", {"fine": torch.ones(2), "odd": tensor_of("odd", (2,), dtype)})
    with pytest.raises(errors.DTypeError, match=f"'odd' of dtype {dtype}"):
        dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors", dry_run=True)
    dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors", select="fine")


def test_names_that_would_be_one(tmp_path):
    dtckpt.save(tmp_path / "s", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "__metadata__": torch.zeros(1)})
    with pytest.raises(errors.TensorNameError, match=r"'a/b' and 'a.b' would both be 'a.b'"):
        dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors")
    with pytest.raises(errors.TensorNameError, match="cannot be named '__metadata__'"):
        dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors", select=["a/*", "__m*"])
    dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors", rename={"a.b": "c", "__metadata__": "m"})
    assert sorted(safetensors.torch.load_file(tmp_path / "m.safetensors")) == ["a.b", "c", "m"]


def test_a_tensor_that_was_saved_in_part(tmp_path):
    dtckpt.sharded_save(dtckpt.create_mesh({"x": 1}), tmp_path / "s", ["w"], ["4 3 0,2:-"], [torch.ones(2, 3)])
    with pytest.raises(errors.RegionNotFoundError, match="'w' was saved in part"):
        dtckpt.convert(tmp_path / "s", tmp_path / "m.safetensors")
    dtckpt.convert(tmp_path / "s", tmp_path / "d")
    with dtckpt.open_checkpoint(tmp_path / "d") as checkpoint:
        assert not checkpoint.tensors["w"].is_whole


def test_arguments(saved, tmp_path):
    mesh = dtckpt.abstract_mesh({"x": 2})
    for arguments in (
        {"to": "pickle"},
        {"max_memory": 0},
        {"max_memory": 1000},
        {"max_shard_size": 0},
        {"to": "safetensors", "mesh": mesh},
        {"to": "safetensors", "options": SaveOptions()},
        {"layouts": {"*": Layout(["x"], mesh)}},
        {"options": SaveOptions(save_as_bf16=True)},
        {"dtype": torch.int8},
        {"rename": {"a*": "*b*"}},
    ):
        with pytest.raises(errors.ConfigError):
            dtckpt.convert(saved, tmp_path / "n", **arguments)
    with pytest.raises(errors.ConfigError, match="one inside the other"):
        dtckpt.convert(saved, saved / "below")
    with pytest.raises(errors.ConfigError, match="written to a file system"):
        dtckpt.convert(saved, "memory://x/m.safetensors")
    assert os.listdir(tmp_path) == ["saved"]


def test_a_mesh_as_in_reshard(saved, tmp_path):
    mesh = dtckpt.abstract_mesh({"z": 4})
    dtckpt.convert(saved, tmp_path / "d", mesh=mesh, layouts={"layers/0.w": Layout(["z", "unsharded"], mesh)})
    with dtckpt.open_checkpoint(tmp_path / "d") as checkpoint:
        assert checkpoint.tensors["layers/0.w"].layout.sharding_specs == ["z", "unsharded"]
        assert checkpoint.tensors["scalar"].layout.mesh == mesh
    assert holds_all(tmp_path / "d")


# --- nothing is half ----------------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_only_if_asked_for(saved, tmp_path):
    target = tmp_path / "m"
    dtckpt.convert(saved, target, to="safetensors", select="layers/*", max_shard_size=1000)
    with pytest.raises(errors.CheckpointExistsError, match="pass overwrite=True"):
        dtckpt.convert(saved, target, to="safetensors", dry_run=True)
    dtckpt.convert(saved, target, to="safetensors", overwrite=True)
    assert os.listdir(target) == ["model.safetensors"]
    assert holds_all(target)
    (target / "config.json").write_text("{}")
    with pytest.raises(errors.CheckpointExistsError, match=r"left alone: it holds config.json; remove it"):
        dtckpt.convert(saved, target, to="safetensors", overwrite=True)
    with pytest.raises(errors.CheckpointExistsError):
        dtckpt.convert(saved, target, to="dtckpt", overwrite=True)
    # A checkpoint of dtckpt may be replaced, too; and a file by a file.
    dtckpt.convert(saved, tmp_path / "copy")
    dtckpt.convert(saved, tmp_path / "copy", to="safetensors", overwrite=True)
    assert os.listdir(tmp_path / "copy") == ["model.safetensors"]
    dtckpt.convert(saved, tmp_path / "m.safetensors", select="scalar")
    with pytest.raises(errors.CheckpointExistsError):
        dtckpt.convert(saved, tmp_path / "m.safetensors")
    dtckpt.convert(saved, tmp_path / "m.safetensors", overwrite=True)
    assert holds_all(tmp_path / "m.safetensors")
    (tmp_path / "d.safetensors").mkdir()
    (tmp_path / "d.safetensors" / "x").touch()
    with pytest.raises(errors.CheckpointExistsError):
        dtckpt.convert(saved, tmp_path / "d.safetensors", overwrite=True)
    # A conversion onto its own source: the new one is whole before the old one goes.
    dtckpt.convert(tmp_path / "m.safetensors", tmp_path / "m.safetensors", overwrite=True, select="scalar")
    assert list(dtckpt.restore(tmp_path / "m.safetensors")) == ["scalar"]


WRITERS = [
    (os, "pwrite"),
    (os, "ftruncate"),
    (os, "fsync"),
    (write_files, "_read_at"),
    (TrailingWriteback, "add"),
    (new_files, "rename"),
]


@pytest.mark.parametrize("writer", range(len(WRITERS)), ids=[name for _, name in WRITERS])
def test_a_failure_at_any_step_leaves_what_was_there(saved, tmp_path, monkeypatch, writer):
    """Fail at the first, second, … call of a function; then the target is as before, or new and whole."""
    module, name = WRITERS[writer]
    real = getattr(module, name)
    target = tmp_path / "new" / "m"
    dtckpt.convert(saved, tmp_path / "whole", to="safetensors", max_shard_size=3000, select="layers/*")
    whole = contents_of(tmp_path / "whole")
    target.parent.mkdir()
    for before in (None, "scalar"):
        if before is not None:
            dtckpt.convert(saved, target, to="safetensors", overwrite=True, select=before)
        for number in itertools.count():
            old, calls = contents_of(target), itertools.count()

            def fail(*args, calls=calls, number=number):
                if next(calls) == number:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args)

            with monkeypatch.context() as patch:
                patch.setattr(module, name, fail)
                with suppress(errors.StorageError):
                    dtckpt.convert(
                        saved, target, to="safetensors", max_shard_size=3000, select="layers/*", overwrite=True
                    )
            assert contents_of(target) in (old, whole)
            assert os.listdir(target.parent) in ([], ["m"])
            if next(calls) <= number:
                break  # it was not called so often: the conversion went through
        assert number > 0
        assert contents_of(target) == whole


def contents_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.exists() else None


def test_bytes_that_do_not_arrive_are_noticed(saved, tmp_path, monkeypatch):
    """The proof compares the content of the file, and not the values that were meant for it."""
    real = os.pwrite

    def lossy(descriptor, data, offset):
        if len(data) > 4000:
            data = bytes(data[:-1]) + b"?"
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", lossy)
    with pytest.raises(errors.CheckpointCorruptError, match="was written with other elements; got content"):
        dtckpt.convert(saved, tmp_path / "m.safetensors", select="layers/*")
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("target", ["d", "m.safetensors"])
def test_a_damaged_source(saved, tmp_path, target):
    row = tensors()["layers/0.w"][0, :16].numpy().tobytes()
    # Small chunks are in nodes of the database, of which the merge makes new ones.
    for file in saved.rglob("d/*"):
        file.write_bytes(file.read_bytes().replace(row, row[::-1]))
    with pytest.raises(errors.CheckpointCorruptError):
        dtckpt.convert(saved, tmp_path / target)
    assert os.listdir(tmp_path) == ["saved"]


KILLED = """
import os, signal, sys
from dtckpt import convert
real = os.pwrite

def pwrite(descriptor, data, offset):
    if offset:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, data, offset)

os.pwrite = pwrite
convert(sys.argv[1], sys.argv[2], to="safetensors", max_shard_size=2000, overwrite=True)
"""


@pytest.mark.share(3, of="processes that start PyTorch")
def test_a_conversion_that_is_killed(saved, tmp_path):
    target = tmp_path / "m"
    for before in (None, "scalar"):
        if before is not None:
            dtckpt.convert(saved, target, to="safetensors", select=before)
        old = contents_of(target)
        done = subprocess.run([sys.executable, "-c", KILLED, str(saved), str(target)], check=False, timeout=120)
        assert done.returncode == -signal.SIGKILL
        assert contents_of(target) == old
        if old is None:
            with pytest.raises(errors.CheckpointNotFoundError):
                dtckpt.restore(target)
    # The next conversion finds the way free, and removes the leftovers.
    dtckpt.convert(saved, target, to="safetensors", overwrite=True)
    assert holds_all(target)
    assert sorted(os.listdir(tmp_path)) == ["m", "saved"]


def test_leftovers_of_a_conversion_that_died_are_removed(saved, tmp_path):
    (tmp_path / ".m.dtckpt-new-convert-1234").mkdir()
    (tmp_path / ".m.dtckpt-new-convert-1234" / "model.safetensors").touch()
    with lock_directory_of(tmp_path / ".m.dtckpt-new-convert-5678"):
        dtckpt.convert(saved, tmp_path / "m", to="safetensors")
    assert sorted(os.listdir(tmp_path)) == [".m.dtckpt-new-convert-5678", "m", "saved"]


@contextmanager
def lock_directory_of(folder):
    folder.mkdir()
    with lock_directory(folder) as is_mine:
        assert is_mine
        yield
