"""Bounded staging: little memory, the values of one moment, and the same errors."""

import threading

import pytest
import torch
from support import forkserver
from support.states import packed

import dtckpt
from dtckpt import Layout, SaveOptions, errors
from dtckpt.checkpoint.saving.staging import BucketSource
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

from . import staging_memory_cases

OPTIONS = SaveOptions(staging_nbytes=8192, chunk_nbytes=4096, overwrite=True)
MIB = 1 << 20


def state():
    return {"w": torch.arange(1 << 15).reshape(1 << 7, -1).float(), "b": torch.arange(3.0).bfloat16(), "n": 1}


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("tree", [state, lambda: {"n": 3}])
def test_the_values_are_those_of_the_call(tmp_path, kvstore, tree):
    saved = tree()
    options = SaveOptions(staging_nbytes=8192, chunk_nbytes=4096, kvstore=kvstore, save_as_bf16=True)
    handle = dtckpt.save_async(tmp_path / "s", saved, options=options)
    for value in saved.values():
        if isinstance(value, torch.Tensor):
            value.fill_(7)
    handle.result()
    restored = dtckpt.restore(tmp_path / "s")
    assert restored.keys() == saved.keys()
    if "w" in saved:
        assert torch.equal(restored["w"], state()["w"].bfloat16().float())
        assert torch.equal(restored["b"], state()["b"])


@pytest.mark.processes
def test_little_memory():
    """A save of 256 MiB takes its bound, and up to three chunks of 16 MiB; without a bound it takes all of it."""
    peaks = {}
    for bound in (0, 32 * MIB):
        ours, theirs = forkserver.Pipe()
        process = forkserver.start(staging_memory_cases.save, 256 * MIB, bound, theirs)
        theirs.close()
        assert ours.poll(120), "the save hangs"
        peaks[bound] = ours.recv()
        ours.close()
        process.join(20)
    assert peaks[0] > 250 * MIB
    assert peaks[32 * MIB] < (32 + 3 * 16 + 32) * MIB, f"{peaks[32 * MIB] / MIB:.0f} MiB"


def test_copies_that_differ(tmp_path):
    mesh = dtckpt.create_mesh({"x": 2}, devices=["CPU:0", "CPU:1"])
    tensor = packed(torch.ones(3000), Layout(["unsharded"], mesh))
    dtckpt.unpack(tensor)[1][2900] = 2
    with pytest.raises(errors.ReplicaMismatchError):
        dtckpt.save_async(tmp_path / "s", {"w": tensor}, options=OPTIONS).result()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", ["write", "commit"])
def test_a_failure_ends_the_call(tmp_path, monkeypatch, at):
    def fail(*_, **__):
        raise errors.StorageFullError("no space is left")

    monkeypatch.setattr(TensorStoreWriter, at, fail)
    with pytest.raises(errors.StorageFullError):
        dtckpt.save_async(tmp_path / "s", state(), options=OPTIONS).result()


def test_a_call_that_is_interrupted_saves_nothing(tmp_path, monkeypatch):
    """The caller's tensors may change after the interrupt, while elements are still to be copied."""
    fetch, wait, is_over = BucketSource.fetch, BucketSource.wait, threading.Event()

    class Interrupted:
        def wait(self):
            raise KeyboardInterrupt

        def set(self):
            pass

    def wait_interrupted(self):
        self._is_copied = Interrupted()
        try:
            wait(self)
        finally:
            is_over.set()

    def fetch_after_it(self, *others):
        assert is_over.wait(30)
        return fetch(self, *others)

    monkeypatch.setattr(BucketSource, "wait", wait_interrupted)
    monkeypatch.setattr(BucketSource, "fetch", fetch_after_it)
    with pytest.raises(KeyboardInterrupt):
        dtckpt.save_async(tmp_path / "s", state(), options=OPTIONS)
    with pytest.raises(errors.CheckpointError, match="was interrupted while it copied the state"):
        dtckpt.save(tmp_path / "s", state())
    assert list(tmp_path.iterdir()) == []


def test_a_bound_must_be_positive():
    with pytest.raises(errors.ConfigError, match="staging_nbytes"):
        SaveOptions(staging_nbytes=0)
