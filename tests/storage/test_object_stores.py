"""Checkpoints on object stores: S3 and Google Cloud Storage against local servers, other URLs through fsspec."""

import json
import os
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zarr
from checkpoint import client_cases
from fsspec.implementations.memory import MemoryFileSystem
from interop.dcp import plugin_cases
from support.states import bits_of, packed

import dtckpt
from dtckpt import UNSHARDED, Layout, Region, SaveOptions
from dtckpt.checkpoint.managing.root import root_of
from dtckpt.cli.main import main
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointExistsError,
    ConfigError,
    StorageError,
)
from dtckpt.format.manifest import BLOCKS_NAME, MANIFEST_NAME
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.folder import open_folder
from dtckpt.storage.location import location_of

from . import object_store_cases
from .conftest import KINDS, folder_at
from .saved_states import MESH, holds, save, state

on_objects = pytest.mark.parametrize("kind", [kind for kind in KINDS if "directory" not in kind], indirect=True)


@pytest.mark.share(4, of="bases")
def test_a_save_with_a_base_is_whole_without_it(root, kind, kvstore):
    """TensorStore has no request by which a bucket of Google copies objects, so there everything is written."""
    save(f"{root}/step_1", kvstore=kvstore)
    report = dtckpt.save(f"{root}/step_2", state(2), options=SaveOptions(kvstore=kvstore), base=f"{root}/step_1")
    assert (report.nbytes_reused >= 512 * 256 * 4) == (kind.split()[0] != "gs")
    assert holds(f"{root}/step_2", 2)
    commit_target_of(location_of(f"{root}/step_1")).remove()
    assert holds(f"{root}/step_2", 2)
    with dtckpt.open_checkpoint(f"{root}/step_2") as checkpoint:
        assert checkpoint.verify().is_sound


# --- damage, replacement, copies ----------------------------------------------------------------------------


@pytest.mark.share(10, of="object stores")
@on_objects
def test_damage_is_detected(root, kvstore):
    path = f"{root}/step_1"
    save(path, kvstore=kvstore)
    folder = commit_target_of(location_of(path)).locate()
    names = folder.names()
    assert MANIFEST_NAME in names
    assert f"client_0/{BLOCKS_NAME}" in names
    detected = set()
    for name in names:
        data = folder.read(name)
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        for other in (bytes(flipped), data[: len(data) // 2], b"", None):
            folder.remove([name]) if other is None else folder.write(name, other)
            try:
                assert holds(path), f"{name}: a wrong value was restored"
                with dtckpt.open_checkpoint(path) as checkpoint:
                    if not checkpoint.verify().is_sound:
                        detected.add((name, other))
            except (CheckpointCorruptError, StorageError):
                detected.add((name, other))
        folder.write(name, data)
    for name in names:
        if name == MANIFEST_NAME or "/c/" in name or BLOCKS_NAME in name or name.endswith("zarr.json"):
            assert len([found for found in detected if found[0] == name]) == 4, name
    assert holds(path)


@pytest.mark.share(10, of="object stores")
@on_objects
def test_a_reader_of_what_was_replaced_is_told(root, kvstore):
    path = f"{root}/step_1"
    save(path, 1, kvstore=kvstore)
    with dtckpt.open_checkpoint(path) as checkpoint:
        save(path, 2, kvstore=kvstore)
        with pytest.raises(CheckpointConflictError, match="was replaced or removed while it was being read"):
            checkpoint.read("large")
        with pytest.raises(CheckpointConflictError, match="was replaced or removed while it was being read"):
            checkpoint.read("large", Region((0, 0), (1, 1)))
    commit_target_of(location_of(path)).remove()
    assert folder_at(root).names("step_1") == []


@pytest.mark.share(10, of="object stores")
@on_objects
def test_zarr_python_reads_by_the_store(root, kvstore):
    path = f"{root}/step_1"
    save(path, kvstore=kvstore)
    store = dtckpt.zarr_store(path)
    assert repr(store) == f"CheckpointStore({path!r})"
    for array in (zarr.open_array(each, path="large", mode="r") for each in (store, pickle.loads(pickle.dumps(store)))):
        assert bits_of(torch.from_numpy(array[...])) == bits_of(dtckpt.restore(path)["large"])
    save(path, 2, kvstore=kvstore)
    with pytest.raises(CheckpointConflictError, match="was replaced or removed while it was being read"):
        array[...]
    assert store != dtckpt.zarr_store(path)


@pytest.mark.share(10, of="object stores")
@on_objects
def test_the_folder_of_an_attempt_is_a_checkpoint(root, kvstore, tmp_path):
    """It can be copied to a directory, and a directory can be copied to an object store."""
    path, local, copied = f"{root}/step_1", tmp_path / "local", f"{root}/copied"
    save(path, kvstore=kvstore)
    folder = commit_target_of(location_of(path)).locate()
    for name in folder.names():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(folder.read(name))
        folder_at(copied).write(name, folder.read(name))
    assert holds(local)
    assert holds(copied)
    with pytest.raises(CheckpointExistsError, match="was copied there"):
        save(copied, kvstore=kvstore)


@pytest.mark.share(10, of="object stores")
@on_objects
def test_dead_saves_are_collected(root, kvstore):
    """Those that live, and checkpoints, are left alone."""
    save(f"{root}/step_00000001", kvstore=kvstore)
    dead = commit_target_of(location_of(f"{root}/step_00000002")).begin("dead")
    dead.folder.write("data", b"x")
    began = int(dead.token.partition("-")[0]) / 1e9
    roots = root_of(location_of(root))
    assert roots.names() == {"step_00000001", "step_00000002"}
    roots.collect(min_age_s=3600, now=began + 3500)
    assert dead.folder.names() == ["data"]
    roots.collect(min_age_s=3600, now=began + 3700)
    assert dead.folder.names() == []
    with pytest.raises(StorageError, match="took over"):
        dead.commit(overwrite=True)
    assert holds(f"{root}/step_00000001")
    assert dtckpt.CheckpointManager(root).all_steps() == [1]


def test_two_jobs_that_save_to_one_path(bucket):
    """Each begins when it likes; a save is refused only for a committed save of the other."""
    path, count = f"{bucket}/run/step_1", 6
    saves = []

    def job(name):
        for number in range(count):
            start, text = time.monotonic(), ""
            try:
                dtckpt.save(path, state(number) | {"job": name}, options=SaveOptions(overwrite=True))
            except StorageError as error:
                text = str(error)
            saves.append((name, start, time.monotonic(), text))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(job, "ab"))
    refused = [save for save in saves if save[3]]
    for name, start, end, text in refused:
        assert "another attempt saves to this path" in text
        assert any(not other[3] and other[0] != name and other[1] < end and start < other[2] for other in saves), saves
    assert len(refused) <= count
    restored = dtckpt.restore(path)
    assert restored["job"] in ("a", "b")
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound


@pytest.mark.share(10, of="object stores")
@on_objects
def test_files_by_name(root):
    folder = folder_at(root) / "folder"
    names = ["edge", "edges_0", "edges_é", "edges_ÿ/1", "edgesx", "é"]
    for name in names:
        folder.write(name, name.encode())
    assert folder.names() == sorted(names)
    assert folder.names("edges_") == ["edges_0", "edges_é", "edges_ÿ/1"]
    assert folder.names("f") == []
    assert folder.read("edges_ÿ/1", 2, 5) == b"ges"
    assert folder.read("edge", 2, 9) == b"ge"
    assert folder.read("edge", 9, 12) == b""
    with pytest.raises(FileNotFoundError):
        folder.read("edges")
    assert not folder.create("edge", b"other")
    assert folder.create("edges", b"new")
    folder.remove(["edge", "never"])
    with pytest.raises(FileNotFoundError):
        folder.read("edge")
    folder.clear()
    folder.clear()
    assert folder.names() == []


# --- through the other calls ----------------------------------------------------------------------------


@pytest.mark.share(10, of="object stores")
@on_objects
def test_reshard_there_and_back(root, kvstore, tmp_path, capsys):
    local, back = tmp_path / "local", f"{root}/back"
    save(f"{root}/step_1", kvstore=kvstore)
    assert main(["reshard", f"{root}/step_1", str(local), "--mesh", "a=3", "--layout", "w=unsharded,a"]) == 0
    assert (
        main(["reshard", str(local), back, "--mesh", "b=2", "--layout", "large=b,unsharded", "--format", kvstore]) == 0
    )
    assert holds(local)
    assert holds(back)
    assert main(["reshard", str(local), back, "--mesh", "b=2", "--format", kvstore]) == 4
    assert main(["verify", back]) == 0
    capsys.readouterr()
    assert main(["inspect", back, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == back
    assert main(["reshard", back, f"{back}/inside", "--mesh", "b=2", "--format", kvstore]) == 2
    assert "one inside the other" in capsys.readouterr().err


@pytest.mark.share(10, of="object stores")
@on_objects
def test_asynchronous_and_named_saves(root, kvstore):
    options = SaveOptions(kvstore=kvstore)
    weight = torch.ones(4)
    handle = dtckpt.save_async(f"{root}/async", {"w": weight}, options=options)
    weight.zero_()
    assert str(handle.result(60).path) == f"{root}/async"
    assert dtckpt.restore(f"{root}/async")["w"].tolist() == [1.0] * 4
    mesh = dtckpt.create_mesh({"x": 2}, devices=["CPU:0", "CPU:1"])
    layout = Layout(["x"], mesh)
    tensor = packed(torch.arange(6.0), layout)
    dtckpt.name_based_save(mesh, f"{root}/named", {"t": tensor}, options=options)
    found = dtckpt.name_based_restore(mesh, f"{root}/named", {"t": packed(torch.zeros(6), layout)})
    assert found["t"].full_tensor().tolist() == torch.arange(6.0).tolist()
    counted = dtckpt.DTensorCheckpoint(mesh, w=tensor)
    assert counted.save(f"{root}/counted", options=options) == f"{root}/counted-1"
    counted.restore(f"{root}/counted-1").assert_consumed()


def test_a_database_needs_tensorstore():
    MemoryFileSystem.store.clear()
    for call in (lambda: dtckpt.save("memory://run/s", {"a": 1}), lambda: _reshard_to("memory://run/t")):
        with pytest.raises(ConfigError, match="kvstore='zarr'"):
            call()
    assert MemoryFileSystem.store == {}


def _reshard_to(target):
    save("memory://other/s", kvstore="zarr")
    try:
        dtckpt.reshard("memory://other/s", target, mesh=MESH)
    finally:
        MemoryFileSystem().rm("/other", recursive=True)
        MemoryFileSystem.store.clear()


# --- processes ----------------------------------------------------------------------------------------------

STATE = {
    "w": ((64, 8), "float32", ["x", UNSHARDED]),
    "m": ((65, 8), "bfloat16", ["x", UNSHARDED]),
    "c": ((30, 8), "float32", [UNSHARDED, UNSHARDED]),
}


@pytest.mark.share(10, of="object stores")
@pytest.mark.processes
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize(("victim", "when"), [(1, "amid its writes"), (0, "amid its writes"), (0, "before the commit")])
def test_a_client_that_is_killed_takes_nothing_along(pool, bucket, store, kvstore, victim, when):
    path, axes, reached = f"{bucket}/run/step_1", {"x": 2}, store.environment
    pool.values(object_store_cases.save, reached, path, axes, STATE, generation="old", kvstore=kvstore, clients=2)
    answers = pool.run(
        object_store_cases.save_and_die,
        store.environment,
        path,
        axes,
        STATE,
        victim,
        when,
        clients=2,
        heartbeat_timeout_s=2.0,
    )
    assert [answer.has_died for answer in answers] == [client == victim for client in range(2)]
    assert answers[1 - victim].error == "ClientLostError", answers
    assert f"client {victim} " in answers[1 - victim].text
    assert client_cases.restore(path, {"x": 1}, STATE, generation="old") == []

    # And the job goes on; what the dead one left is removed.
    other = {name: (shape, dtype, [UNSHARDED, "z"]) for name, (shape, dtype, _) in STATE.items()}
    restored = pool.values(object_store_cases.restore, reached, path, {"z": 3}, other, generation="old", clients=3)
    assert restored == [[], [], []]
    pool.values(object_store_cases.save, reached, path, axes, STATE, generation="new", overwrite=True, clients=2)
    assert client_cases.restore(path, {"x": 1}, STATE, generation="new") == []
    attempts = {name.split("/")[0] for name in folder_at(path).names()}
    assert len(attempts) == 1


@pytest.mark.share(10, of="object stores")
@pytest.mark.processes
def test_a_manager_of_several_clients(pool, bucket, store):
    for steps in (4, 5):
        found = pool.values(object_store_cases.manage, store.environment, f"{bucket}/run", steps, clients=2)
        assert found[0] == [steps - 2, steps - 1]
    assert dtckpt.CheckpointManager(f"{bucket}/run").restore().step == 4


@pytest.mark.processes
def test_through_dcp(pool, bucket, store):
    path = f"{bucket}/run/dcp"
    answers = pool.values(plugin_cases.save_to_object_store, store.environment, path, clients=2, group=True)
    assert answers == [[[2.0], [2.0]]] * 2
    marker, attempt = sorted({name.split("/")[0] for name in folder_at(path).names()})
    assert (marker, attempt.partition("-")[0].isdigit()) == (".metadata", True)


# --- how TensorStore is asked --------------------------------------------------------------------------


@pytest.fixture
def no_aws(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


ENVIRONMENTS = [
    ({}, {}),
    ({"AWS_DEFAULT_REGION": "eu-west-1"}, {"aws_region": "eu-west-1"}),
    ({"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}, {"aws_region": "a"}),
    ({"AWS_ENDPOINT_URL": "http://h:1/"}, {"endpoint": "http://h:1", "aws_region": "us-east-1"}),
    (
        {"AWS_ENDPOINT_URL": "http://h:1", "AWS_ENDPOINT_URL_S3": "http://s:2", "AWS_REGION": "r"},
        {"endpoint": "http://s:2", "aws_region": "r"},
    ),
    ({"AWS_ACCESS_KEY_ID": "k"}, {"aws_credentials": {"type": "environment"}}),
]


@pytest.mark.parametrize(("environment", "expected"), ENVIRONMENTS)
def test_s3_is_found_from_the_environment(no_aws, monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = open_folder(location_of("s3://bucket/a/b")).kvstore()
    base = {"driver": "s3", "bucket": "bucket", "path": "a/b/", "use_conditional_write": True}
    assert spec == {**base, **expected}


def test_gcs_is_asked_for_by_its_driver():
    import tensorstore

    folder = open_folder(location_of("gs://bucket/a/b"))
    assert folder.kvstore() == {"driver": "gcs", "bucket": "bucket", "path": "a/b/"}
    assert str(folder / "c") == "gs://bucket/a/b/c"
    assert tensorstore.KvStore.Spec((folder / "c").kvstore()).url == "gs://bucket/a/b/c/"
    assert open_folder(location_of("gs://bucket")).kvstore()["path"] == ""


def test_local_files_may_be_asked_for_by_url(tmp_path):
    save(f"file://{tmp_path}/s")
    assert holds(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")


@pytest.mark.share(10, of="object stores")
def test_commands_look_after_a_root_in_a_bucket(bucket, capsys):
    root = f"{bucket}/run"
    with dtckpt.CheckpointManager(root, is_async=False) as manager:
        for step in (0, 10, 20):
            manager.save(step, state(step), metrics={"loss": step})
    assert main(["ls", root, "--json"]) == 0
    *events, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(event["step"], event["is_newest_valid"]) for event in events] == [(0, False), (10, False), (20, True)]
    assert (total["checkpoints"], total["holder"]) == (3, None)
    options = ["--keep", "1", "--keep-best", "1", "--metric", "loss", "--json"]
    assert main(["gc", root, *options]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 1
    assert main(["gc", root, *options, "--yes"]) == 0
    with dtckpt.CheckpointManager(root) as manager:
        assert manager.all_steps() == [0, 20]
    assert holds(f"{root}/step_00000020", 20)
