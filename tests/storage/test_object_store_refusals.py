"""Object stores that refuse, put off, or never answer: the requests that are tried again, and the texts of errors."""

import itertools
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.states import bits_of

import dtckpt
from dtckpt import Region, SaveOptions
from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StorageError,
    StoragePermissionError,
)
from dtckpt.storage import s3_gcs_folder, tensorstore_setup
from dtckpt.storage.folder import open_folder
from dtckpt.storage.location import location_of

from .conftest import folder_at
from .object_stores import PROTOCOLS
from .saved_states import holds, save


@pytest.fixture
def gateway(store, bucket, monkeypatch):
    """The store, for a test that tells it what to refuse; TensorStore does not ask it for long."""
    monkeypatch.setattr(tensorstore_setup, "RETRIES", {"max_retries": 4, "initial_delay": "10ms", "max_delay": "20ms"})
    monkeypatch.setattr(store, "refuse", store.refuse)
    s3_gcs_folder._shared_context.cache_clear()
    yield store
    s3_gcs_folder._shared_context.cache_clear()


def pass_all(action, name):
    return None


@pytest.mark.share(10, of="object stores")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_what_is_put_off_is_tried_again(gateway, bucket, kvstore):
    count, refused = itertools.count(), set()

    def refuse(action, name):
        number = next(count)
        if number % 3:
            return None
        why = ("put off", "too many")[number % 2]
        refused.add((action, why))
        return why

    gateway.refuse = refuse
    for step in (1, 2):
        save(f"{bucket}/run/step", step, kvstore=kvstore)
        assert holds(f"{bucket}/run/step", step)
    assert {action for action, _ in refused} == {"read", "write", "delete"}
    assert {why for _, why in refused} == {"put off", "too many"}


@pytest.mark.share(10, of="object stores")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_reshard_on_a_store_that_throttles(gateway, bucket, kvstore):
    source, mesh, options = f"{bucket}/run/step", dtckpt.abstract_mesh({"a": 3}), SaveOptions(kvstore=kvstore)
    save(source, kvstore=kvstore)
    count = itertools.count()
    gateway.refuse = lambda action, name: "too many" if next(count) % 3 == 0 else None
    dtckpt.reshard(source, f"{bucket}/new", mesh=mesh, options=options)
    with dtckpt.open_checkpoint(source) as old, dtckpt.open_checkpoint(f"{bucket}/new") as new:
        assert new.verify().is_sound
        assert {name: bits_of(new.read(name)) for name in new.tensors} == {
            name: bits_of(old.read(name)) for name in old.tensors
        }
    gateway.refuse = lambda action, name: "too many" if action == "write" and "/other" in name else None
    with refused("too many"):
        dtckpt.reshard(source, f"{bucket}/other", mesh=mesh, options=options)
    gateway.refuse = pass_all
    with pytest.raises(CheckpointNotFoundError):
        dtckpt.open_checkpoint(f"{bucket}/other")
    assert holds(source)


REFUSALS = {
    "put off": (StorageError, "try again later"),
    "too many": (StorageError, "try again later"),
    "denied": (StoragePermissionError, "permissions"),
    "no bucket": (StorageError, "make the bucket"),
}


def refused(why):
    expected, text = REFUSALS[why]
    return pytest.raises(expected, match=text)


def refused_reads(scheme, why):
    """To TensorStore a bucket of Google's that is not there is an empty one."""
    if (scheme, why) == ("gs", "no bucket"):
        return pytest.raises(CheckpointNotFoundError, match=r"there is no (valid )?checkpoint")
    return refused(why)


@pytest.mark.share(10, of="object stores")
@pytest.mark.parametrize("why", REFUSALS)
def test_refusals_are_explained(gateway, scheme, bucket, why):
    path = f"{bucket}/run/step"
    save(path, 1)
    asked_for = [
        lambda action, name: True,
        lambda action, name: action == "write",
        lambda action, name: action == "write" and "/d/" in name,
    ]
    for is_refused in asked_for:
        gateway.refuse = lambda *asked, is_refused=is_refused: why if is_refused(*asked) else None
        with refused(why):
            save(path, 2)
        gateway.refuse = pass_all
        assert holds(path, 1)
    gateway.refuse = lambda *asked: why
    with refused_reads(scheme, why):
        dtckpt.restore(path)
    gateway.refuse = pass_all
    save(path, 3)
    assert holds(path, 3)


REFUSED_COMMITS = [
    *((scheme, why, REFUSALS[why][1]) for scheme in PROTOCOLS for why in ("put off", "denied")),
    ("s3", "not found", "conditional"),
    ("gs", "no bucket", "make the bucket"),
]


@pytest.mark.share(10, of="object stores")
@pytest.mark.parametrize(("scheme", "why", "text"), REFUSED_COMMITS, indirect=["scheme"])
def test_a_commit_that_is_refused(gateway, bucket, why, text):
    path = f"{bucket}/run/step"
    save(path, 1)
    gateway.refuse = lambda action, name: why if action == "write" and name.endswith(".decision") else None
    with pytest.raises(StorageError, match=text):
        save(path, 2)
    gateway.refuse = pass_all
    assert holds(path, 1)
    save(path, 3)
    assert holds(path, 3)


def test_models_in_safetensors_files(bucket):
    """Another library's files are read where they are, each client only the bytes that it needs."""
    tensors = {"a": torch.arange(6000.0).reshape(60, 100), "b": torch.ones(7, dtype=torch.bfloat16)}
    folder = open_folder(location_of(f"{bucket}/zoo/m"))
    folder.write("model.safetensors", safetensors.torch.save(tensors))
    for url in (f"{bucket}/zoo/m", f"{bucket}/zoo/m/model.safetensors"):
        restored = dtckpt.restore(url)
        assert all(torch.equal(restored[name], tensor) for name, tensor in tensors.items())
        with dtckpt.open_checkpoint(url) as checkpoint:
            into = np.zeros((3, 100), np.float32)
            assert checkpoint.read_into("a", Region((5, 0), (3, 100)), into) == into.nbytes
            assert np.array_equal(into, tensors["a"][5:8].numpy())
    folder.write("model.safetensors", safetensors.torch.save(tensors)[:-1])
    with pytest.raises(CheckpointCorruptError, match=r"model.safetensors is missing or cut short"):
        dtckpt.open_checkpoint(f"{bucket}/zoo/m")
    with pytest.raises(CheckpointNotFoundError):
        dtckpt.open_checkpoint(f"{bucket}/zoo/none.safetensors")


def test_only_one_of_many_creates(bucket):
    folder = folder_at(bucket)
    with ThreadPoolExecutor(16) as pool:
        for name in "abcdefgh":
            created = list(pool.map(lambda data, name=name: folder.create(name, data), [b"%d" % n for n in range(16)]))
            assert created.count(True) == 1
            assert folder.read(name) == b"%d" % created.index(True)


def test_a_bucket_that_is_not_there(scheme, bucket):
    path = f"{bucket}-1/run/step"
    with refused("no bucket"):
        save(path)
    with refused_reads(scheme, "no bucket"):
        dtckpt.restore(path)
    with refused_reads(scheme, "no bucket"):
        dtckpt.CheckpointManager(path).restore()


ASK_A_MUTE = """
import sys
import dtckpt
from dtckpt.storage import s3_gcs_folder, tensorstore_setup

s3_gcs_folder.SILENCE_S = 1
tensorstore_setup.RETRIES = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "20ms"}
try:
    dtckpt.restore(sys.argv[1])
except dtckpt.errors.StorageError as error:
    print("told:", error)
"""


@pytest.mark.share(10, of="object stores")
@pytest.mark.processes
@pytest.mark.parametrize("scheme", PROTOCOLS)
def test_a_server_that_never_answers_is_not_waited_for_without_end(scheme):
    """In a new process: TensorStore takes the bound when it makes its first request."""
    protocol, path = PROTOCOLS[scheme], f"{scheme}://bucket-1/run/step"
    with socket.create_server(("127.0.0.1", 0)) as mute:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TENSORSTORE_")}
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        environment = {**inherited, **protocol.environment, protocol.url_variable: url}
        command = [sys.executable, "-c", ASK_A_MUTE, path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.startswith(f"told: cannot open the checkpoint at {path}")


class Flaky(MemoryFileSystem):
    """Puts off every other read and write."""

    protocol = "flaky"
    count = itertools.count()

    def _put_off(self):
        if next(self.count) % 2:
            raise RuntimeError("503 Slow Down: Service Unavailable")

    def pipe_file(self, *args, **options):
        self._put_off()
        super().pipe_file(*args, **options)

    def cat_file(self, *args, **options):
        self._put_off()
        return super().cat_file(*args, **options)


def test_what_other_file_systems_put_off_is_tried_again(monkeypatch):
    import fsspec

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    MemoryFileSystem.store.clear()
    save("flaky://run/step", kvstore="zarr")
    assert holds("flaky://run/step")
    monkeypatch.setattr(Flaky, "count", itertools.repeat(1))
    monkeypatch.setattr("dtckpt.storage.fsspec_folder.MAX_TRIES", 2)
    with pytest.raises(StorageError, match="Service Unavailable"):
        dtckpt.restore("flaky://run/step")
    MemoryFileSystem.store.clear()
