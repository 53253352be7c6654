"""Every kind of bad input gets a separate error class, and a message with the value and the expected value."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, RestoreOptions, SaveOptions, abstract_mesh, errors
from dtckpt._proto import checkpoint_pb2
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.format.names import MAX_NAME_BYTES

from . import client_cases

MESH = abstract_mesh({"x": 2, "y": 2})
ROWS = Layout(["x", "unsharded"], MESH)
WEIGHT = torch.arange(12.0).reshape(4, 3)


def saved(path, tree=None, **options):
    dtckpt.save(path, {"w": packed(WEIGHT, ROWS), "step": 1} if tree is None else tree, options=SaveOptions(**options))
    return path


# --- names and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/x", "a\0b", "x" * 4096, "x/" * 2047 + "x", "", "a//b", "..", "é" * 400])
def test_hostile_names(tmp_path, name):
    inner, target = tmp_path / "inner", tmp_path / "inner" / "s"
    inner.mkdir()
    attempts = (
        lambda: dtckpt.sharded_save(MESH, target, [name], [""], [packed(WEIGHT, ROWS)]),
        lambda: dtckpt.name_based_save(MESH, target, {name: packed(WEIGHT, ROWS)}),
    )
    for attempt in attempts:
        with pytest.raises(errors.TensorNameError, match="tensor name") as caught:
            attempt()
        assert len(str(caught.value)) < 500
    assert list(tmp_path.rglob("*")) == [inner]


@pytest.mark.parametrize("key", ["../x", "/x", "", "a//b", "..", ".", "/"])
def test_keys_that_no_name_can_have(tmp_path, key):
    """As the paths of files, by which Lightning's ``ModelCheckpoint`` keeps its best scores."""
    (tmp_path / "inner").mkdir()
    path = saved(tmp_path / "inner" / "s", {key: WEIGHT, "a": {key: {"w": WEIGHT}}})
    assert [each.name for each in tmp_path.rglob("*") if each.parent.name != "s"][:2] == ["inner", "s"]
    assert dtckpt.restore(path)["a"][key]["w"].equal(WEIGHT)
    target = {key: torch.zeros_like(WEIGHT), "a": {key: None}}
    assert dtckpt.restore(path, target)[key].equal(WEIGHT)
    assert target["a"][key]["w"].equal(WEIGHT)


@pytest.mark.parametrize("key", ["a\0b", "x" * 4096, "é" * 400])
def test_keys_that_are_refused(tmp_path, key):
    with pytest.raises(errors.TensorNameError, match="tensor name") as caught:
        dtckpt.save(tmp_path / "s", {"a": {key: WEIGHT}})
    assert len(str(caught.value)) < 500
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["w.__lock", "zarr.json", "c", "c/0/0", "d", "client_0/x", "é ü", "%2e%2e", "w/%self"])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_odd_names_that_are_fine(tmp_path, name, kvstore):
    saved(tmp_path / "s", {name: WEIGHT, "other": WEIGHT + 1}, kvstore=kvstore)
    assert dtckpt.restore(tmp_path / "s")[name].equal(WEIGHT)


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ((["w", "v"], [""], [WEIGHT]), errors.TensorNameError, "got 2 names, 1 slice strings, 1 tensors"),
        ((["w"], ["", ""], [WEIGHT]), errors.TensorNameError, "got 1 names, 2 slice strings, 1 tensors"),
        (([], [], []), errors.TensorNameError, "nothing to save"),
        ((["w", "w"], ["", ""], [WEIGHT, WEIGHT]), errors.SliceError, "'w' overlap"),
        ((["w"], ["4 3"], [WEIGHT]), errors.SliceError, "cannot read slice string '4 3'"),
        ((["w"], ["8 3 0,2:-"], [WEIGHT]), errors.SliceError, "does not fit its tensor"),
        ((["w"], ["5 3 2,4:-"], [WEIGHT]), errors.SliceError, "leaves dim 0"),
        ((["w"], [""], ["x"]), errors.LayoutTypeError, "'w' must be a tensor; got str"),
        ((["w"], [""], [packed(WEIGHT, Layout(["x", "unsharded"], abstract_mesh({"x": 4})))]), errors.MeshError, "'w'"),
        ((["w"], [None], [WEIGHT]), errors.SliceError, "must be str; got NoneType"),
        ((["w"], [""], [WEIGHT.to_sparse()]), errors.DTypeError, "only dense tensors"),
        ((["w"], [""], [torch.empty(2, device="meta")]), errors.DTypeError, "on meta"),
    ],
)
def test_sharded_save_refuses(tmp_path, arguments, error, reason):
    with pytest.raises(error, match=reason):
        dtckpt.sharded_save(MESH, tmp_path / "s", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bits8", "bits16"])
def test_dtypes_that_cannot_be_stored(tmp_path, dtype):
    reason = f"tensor 'w': dtype cannot be stored; got {dtype}, expected one of bool.* pass a view"
    with pytest.raises(errors.DTypeError, match=reason):
        dtckpt.save(tmp_path / "s", {"w": torch.empty(3, dtype=getattr(torch, dtype))})


def test_mesh_arguments(tmp_path):
    saved(tmp_path / "s")
    template = {"w": packed(WEIGHT, ROWS)}
    for call in (
        lambda: dtckpt.sharded_save("x", tmp_path / "t", ["w"], [""], [WEIGHT]),
        lambda: dtckpt.name_based_save(None, tmp_path / "t", {"w": WEIGHT}),
        lambda: dtckpt.name_based_restore(None, tmp_path / "s", template),
        lambda: dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh="x=2"),
    ):
        with pytest.raises(errors.MeshTypeError, match="Mesh; got"):
            call()
    with pytest.raises(errors.LayoutTypeError, match="'w' must be a DTensor; got Tensor"):
        dtckpt.name_based_restore(MESH, tmp_path / "s", {"w": WEIGHT})
    with pytest.raises(errors.TensorNameError, match="no templates"):
        dtckpt.name_based_restore(MESH, tmp_path / "s", {})
    with pytest.raises(errors.MeshError, match="'w' is on another mesh"):
        dtckpt.name_based_restore(abstract_mesh({"x": 4}), tmp_path / "s", template)
    with pytest.raises(errors.TensorNotFoundError, match="no tensor 'v'; it has 'w'"):
        dtckpt.name_based_restore(MESH, tmp_path / "s", {"v": template["w"]})
    with pytest.raises(errors.MeshError, match="on another mesh"):
        dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=abstract_mesh({"x": 4}), layouts={"w": ROWS})
    partial = dtckpt.pack([WEIGHT] * 4, Layout(["unsharded"] * 2, MESH, {"x": "sum"}))
    with pytest.raises(errors.LayoutError, match="pending reductions"):
        dtckpt.save(tmp_path / "t", {"w": partial})
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (SaveOptions, {"kvstore": "zip"}),
        (SaveOptions, {"kvstore": None}),
        (SaveOptions, {"chunk_nbytes": 0}),
        (SaveOptions, {"chunk_nbytes": -1}),
        (SaveOptions, {"chunk_nbytes": "1MiB"}),
        (SaveOptions, {"timeout_s": 0}),
        (SaveOptions, {"timeout_s": float("nan")}),
        (RestoreOptions, {"cast": "some"}),
        (RestoreOptions, {"timeout_s": -1}),
    ],
)
def test_options_are_checked_when_made(cls, arguments):
    (name,) = arguments
    with pytest.raises(errors.ConfigError, match=f"option {name} .*got"):
        cls(**arguments)


def test_reshard_arguments(tmp_path):
    saved(tmp_path / "s")
    with pytest.raises(errors.ConfigError, match="max_memory must be positive; got 0"):
        dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=MESH, max_memory=0)
    with pytest.raises(errors.ConfigError, match=r"max_memory is too small; got 10 bytes, expected at least .* 'w'"):
        dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=MESH, max_memory=10)
    with pytest.raises(errors.ConfigError, match="got int8"):
        dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=MESH, dtype=torch.int8)
    with pytest.raises(errors.CheckpointNotFoundError):
        dtckpt.reshard(tmp_path / "none", tmp_path / "t", mesh=MESH)
    with pytest.raises(errors.CheckpointExistsError):
        dtckpt.reshard(tmp_path / "s", tmp_path / "s", mesh=MESH)
    report = dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=abstract_mesh({"x": 4}), dry_run=True)
    assert (report.save, report.tensors[0].new_num_chunks) == (None, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


# --- paths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "a\0b", "a\\b", "a\ud800", "s3://bucket/a\0b"])
def test_paths_that_are_none(path):
    for call in (lambda: dtckpt.open_checkpoint(path), lambda: dtckpt.restore(path), lambda: dtckpt.save(path, {})):
        with pytest.raises(errors.CheckpointError, match="path"):
            call()


@pytest.mark.parametrize(
    "path",
    [
        "nowhere://b/x",
        "s3://bucket",
        "s3://",
        "s3:///x",
        "gs://b/../x",
        "gs://b//x",
        "s3://b/.dtckpt/x",
        "zip::s3://b/x",
    ],
)
def test_urls_that_are_none(path):
    for call in (lambda: dtckpt.open_checkpoint(path), lambda: dtckpt.restore(path), lambda: dtckpt.save(path, {})):
        with pytest.raises(errors.ConfigError, match=path.partition("://")[0]):
            call()


@pytest.mark.parametrize("path", [None, 5, b"x", ["x"]])
def test_paths_of_other_types(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: dtckpt.open_checkpoint(path), lambda: dtckpt.save(path, {})):
        with pytest.raises(TypeError, match=type(path).__name__):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "ü%20#?{}'\"", ".hidden", "-x", "日本"])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_odd_paths_that_are_fine(tmp_path, name, kvstore):
    for _ in range(2):
        saved(tmp_path / name, kvstore=kvstore, overwrite=True)
        assert dtckpt.restore(tmp_path / name)["w"].equal(WEIGHT)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_relative_paths_urls_and_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("a/b/c")
    assert dtckpt.restore(f"file://{tmp_path}/a/b/c")["w"].equal(WEIGHT)
    Path("latest").symlink_to("a/b/c")
    assert dtckpt.restore("latest")["w"].equal(WEIGHT)
    saved("latest", {"w": WEIGHT + 1}, overwrite=True)
    assert Path("latest").is_symlink()
    assert dtckpt.restore("latest")["w"].equal(WEIGHT + 1)
    assert dtckpt.restore("a/b/c")["w"].equal(WEIGHT + 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "latest"]
    assert [entry.name for entry in (tmp_path / "a" / "b").iterdir()] == ["c"]


def test_paths_below_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.CheckpointError, match="file"):
        dtckpt.save(tmp_path / "file" / "s", {"w": WEIGHT})
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint; it is left alone"):
        dtckpt.save(tmp_path / "file", {"w": WEIGHT}, options=SaveOptions(overwrite=True))
    for path in (tmp_path / "file", tmp_path / "file" / "s"):
        with pytest.raises(errors.CheckpointNotFoundError, match="there is no checkpoint at"):
            dtckpt.restore(path)
    assert (tmp_path / "file").read_text() == "x"


def test_paths_that_are_too_long(tmp_path):
    with pytest.raises(errors.StorageError, match="name too long"):
        dtckpt.save(tmp_path / ("x" * 300), {"w": WEIGHT})
    with pytest.raises(errors.CheckpointError):
        dtckpt.restore(tmp_path / ("x" * 300))


def test_no_checkpoint(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match=r"there is no checkpoint at .*/none"):
        dtckpt.restore(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        dtckpt.open_checkpoint(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.CheckpointNotFoundError):
        dtckpt.restore(tmp_path / "empty")


def test_a_half_written_checkpoint(tmp_path):
    saved(tmp_path / "s")
    (tmp_path / "s" / MANIFEST_NAME).unlink()
    with pytest.raises(errors.CheckpointIncompleteError, match="manifest is missing; the save"):
        dtckpt.restore(tmp_path / "s")
    for overwrite in (False, True):
        with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
            saved(tmp_path / "s", overwrite=overwrite)


def test_a_newer_format(tmp_path):
    saved(tmp_path / "s")
    file = tmp_path / "s" / MANIFEST_NAME
    envelope = checkpoint_pb2.ManifestFile.FromString(file.read_bytes())
    envelope.format_version = 2
    file.write_bytes(envelope.SerializeToString())
    with pytest.raises(errors.CheckpointVersionError, match="got version 2, expected at most 1; upgrade dtckpt"):
        dtckpt.restore(tmp_path / "s")


def test_regions_outside(tmp_path):
    with dtckpt.open_checkpoint(saved(tmp_path / "s")) as checkpoint:
        for region in (dtckpt.Region((0, 0), (5, 3)), dtckpt.Region((4, 0), (1, 3)), dtckpt.Region((0,), (4,))):
            with pytest.raises(errors.RegionError, match=r"is outside tensor 'w' of shape \(4, 3\)"):
                checkpoint.read("w", region)
        with pytest.raises(errors.TensorNotFoundError, match="no tensor 'v'; it has 'w'"):
            checkpoint.read("v")


def test_parts_that_were_not_saved(tmp_path):
    dtckpt.sharded_save(
        MESH, tmp_path / "s", ["w", "w"], ["8 3 0,4:-", "8 3 6,2:-"], [packed(WEIGHT, ROWS), WEIGHT[:2] + 50]
    )
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        info = checkpoint.tensors["w"]
        assert (info.shape, info.is_whole, info.layout) == ((8, 3), False, None)
        assert checkpoint.read("w", dtckpt.Region((0, 0), (4, 3))).equal(WEIGHT)
        assert checkpoint.read("w", dtckpt.Region((6, 1), (2, 2))).equal(WEIGHT[:2, 1:] + 50)
        assert checkpoint.verify().damages == ()
        with pytest.raises(errors.RegionNotFoundError, match="'w' was saved in part"):
            checkpoint.read("w")
    with pytest.raises(errors.RegionNotFoundError):
        dtckpt.restore(tmp_path / "s")
    dtckpt.reshard(tmp_path / "s", tmp_path / "t", mesh=abstract_mesh({"x": 2}))
    with dtckpt.open_checkpoint(tmp_path / "t") as checkpoint:
        assert checkpoint.read("w", dtckpt.Region((0, 0), (4, 3))).equal(WEIGHT)
        with pytest.raises(errors.RegionNotFoundError):
            checkpoint.read("w", dtckpt.Region((4, 0), (1, 3)))


def test_copies_that_differ(tmp_path):
    parts = [torch.zeros(2, 3) for _ in range(4)]
    parts[3][0, 0] = 1
    tree = {"w": dtckpt.pack(parts, ROWS)}
    saved(tmp_path / "unchecked", tree, check_replicas=False)
    for options in ({}, {"save_as_bf16": True}, {"chunk_nbytes": 12}):
        with pytest.raises(errors.ReplicaMismatchError, match=r"copies of \[2:4, 0:3\] of tensor 'w' differ"):
            saved(tmp_path / "s", tree, **options)
        with pytest.raises(errors.ReplicaMismatchError, match=r"copies of \[2:4, 0:3\] of tensor 'w' differ"):
            dtckpt.save_async(tmp_path / "s", tree, options=SaveOptions(**options)).result(30)
        assert not (tmp_path / "s").exists()


# --- existing checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_existing_checkpoints_are_replaced_on_request_only(tmp_path, kvstore):
    saved(tmp_path / "s", kvstore="ocdbt")
    with pytest.raises(errors.CheckpointExistsError, match=r"pass SaveOptions\(overwrite=True\) to replace it"):
        saved(tmp_path / "s", {"v": WEIGHT + 1}, kvstore=kvstore)
    assert dtckpt.restore(tmp_path / "s")["w"].equal(WEIGHT)
    saved(tmp_path / "s", {"v": WEIGHT + 1}, kvstore=kvstore, overwrite=True)
    assert dtckpt.restore(tmp_path / "s")["v"].equal(WEIGHT + 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_text("precious")
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint; it is left alone"):
        saved(tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "me.png").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "empty")


def test_a_link_to_nowhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    saved(tmp_path / "link")
    assert dtckpt.restore(tmp_path / "gone")["w"].equal(WEIGHT)


# --- storage that refuses --------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_directories_that_may_not_be_read(tmp_path, pool):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = tmp_path / "x"
    for name in ("closed/s", "readable/s", "manifest", "data"):
        saved(folder / name, kvstore="zarr")
    os.chmod(tmp_path.parent, 0o755)
    os.chmod(tmp_path.parent.parent, 0o755)
    os.chmod(tmp_path, 0o755)
    os.chmod(folder / "closed", 0o700)
    os.chmod(folder / "manifest" / MANIFEST_NAME, 0o600)
    for chunk in (folder / "data" / "w" / "c").rglob("*"):
        os.chmod(chunk, 0o755 if chunk.is_dir() else 0o600)
    (found,) = pool.values(client_cases.as_nobody, str(folder), clients=1)
    for what, outcome in found.items():
        assert outcome.startswith("StoragePermissionError: cannot "), (what, outcome)
        assert "check the permissions" in outcome
    assert sorted(entry.name for entry in (folder / "readable").iterdir()) == ["s"]


@pytest.mark.processes
def test_a_full_disk(tmp_path):
    nbytes = 4 << 20
    script = f"from checkpoint.client_cases import fill_disk; fill_disk({str(tmp_path)!r}, {nbytes})"
    mount = f'mount -t tmpfs -o size={nbytes} tmpfs \'{tmp_path}\' || exit 99; exec "$0" -c "$1"'
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare command")
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if ran.returncode != 0 and ("mount" in ran.stderr or "unshare" in ran.stderr):
        pytest.skip(f"may not mount a small file system: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr
    for outcome in json.loads(ran.stdout):
        assert outcome["error"] == "StorageFullError", outcome
        assert "free space and save again" in outcome["text"]
        assert outcome["survives"]
        assert outcome["left"] == []


def test_messages_stay_short(tmp_path):
    name = "/".join(["n" * 100] * 10)
    assert len(name) < MAX_NAME_BYTES
    tree = {f"{name}{i}": torch.zeros(1) for i in range(200)}
    saved(tmp_path / "s", tree)
    with pytest.raises(errors.UnexpectedTensorError) as caught:
        dtckpt.restore(tmp_path / "s", {"x": 1}, options=RestoreOptions(allow_missing=True))
    assert "and 192 more" in str(caught.value)
    assert len(str(caught.value)) < 10_000


def test_elements_are_those_at_the_time_of_the_save(tmp_path):
    weight = tensor_of("w", (100, 100), "float32")
    before = bits_of(weight)
    saved(tmp_path / "s", {"w": weight})
    weight.zero_()
    assert bits_of(dtckpt.restore(tmp_path / "s")["w"]) == before
