"""A save that fails at any step leaves what was there, and nothing else."""

import errno
import json

import pytest
import torch

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh, errors
from dtckpt.checkpoint.saving import agree, construction, merge
from dtckpt.checkpoint.saving.agree import Summary
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES
from dtckpt.coordination.api import MAX_PAYLOAD_BYTES
from dtckpt.storage import commit_by_rename, local_folder, zarr_tensorstore

OLD, NEW = {"w": torch.zeros(64, 4), "step": 1}, {"w": torch.ones(64, 4), "step": 2}
STEPS = {
    "planning": (agree, "kept_plan"),
    "the directory": (commit_by_rename, "begin"),
    "a write": (zarr_tensorstore.TensorStoreWriter, "write"),
    "the writes' end": (zarr_tensorstore.TensorStoreWriter, "commit"),
    "a write's sync": (local_folder.LocalFolder, "sync"),
    "the chunk list": (local_folder.LocalFolder, "write"),
    "merging": (merge, "merge"),
    "tidying": (construction, "remove_working_files"),
    "the commit": (commit_by_rename, "commit"),
    "syncing": (commit_by_rename, "sync_all"),
    "renaming": (commit_by_rename, "_replace"),
}
FAILURES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), (errors.StorageFullError, OSError)),
    "bug": (ZeroDivisionError("oops"), ZeroDivisionError),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.share(16)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_the_old_checkpoint_survives(tmp_path, monkeypatch, kvstore, step, failure):
    options = SaveOptions(kvstore=kvstore, overwrite=True, chunk_nbytes=256)
    dtckpt.save(tmp_path / "s", OLD, options=options)
    raised, expected = FAILURES[failure]

    def fail(*args, **kwargs):
        raise raised

    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], fail)
        with pytest.raises(expected):
            dtckpt.save(tmp_path / "s", NEW, options=options)
        with pytest.raises(expected):
            dtckpt.save(tmp_path / "t", NEW, options=options) if step != "renaming" else fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    restored = dtckpt.restore(tmp_path / "s")
    assert restored["step"] == 1
    assert restored["w"].equal(OLD["w"])
    dtckpt.save(tmp_path / "s", NEW, options=options)
    assert dtckpt.restore(tmp_path / "s")["w"].equal(NEW["w"])


def test_a_reader_keeps_what_it_opened(tmp_path):
    """A checkpoint that is replaced while it is open is read as it was, or not at all."""
    for kvstore in ("ocdbt", "zarr"):
        options = SaveOptions(kvstore=kvstore, overwrite=True, chunk_nbytes=256)
        dtckpt.save(tmp_path / "s", OLD, options=options)
        with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
            dtckpt.save(tmp_path / "s", NEW, options=options)
            try:
                found = checkpoint.read("w")
            except errors.CheckpointError:
                continue
            assert found.equal(OLD["w"])


@pytest.mark.parametrize("path", ["x" * 3000, "é" * 2000, '\\"' * 1500, "日" * 3000])
def test_what_clients_compare_fits_a_payload(path):
    token, largest = f"{2**63:020d}-1-7fffffffffffffff-abcdef01", 2**64 - 1
    summary = Summary.of(path, token, largest, b"", SaveOptions(), unions=(largest,) * KEPT_STRUCTURES)
    data = summary.to_bytes()
    assert len(data) <= MAX_PAYLOAD_BYTES
    assert Summary.from_bytes(data) == summary
    assert json.loads(data)
    assert Summary.of("y" + path, "", 0, b"", SaveOptions()) != Summary.of("z" + path, "", 0, b"", SaveOptions())


def test_reshard_within_bounded_memory(tmp_path):
    mesh = abstract_mesh({"x": 4})
    whole = torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)
    dtckpt.save(tmp_path / "s", {"w": whole}, options=SaveOptions(chunk_nbytes=1 << 14))
    seen = []
    dtckpt.reshard(
        tmp_path / "s",
        tmp_path / "t",
        mesh=mesh,
        layouts={"w": Layout(["unsharded", "x"], mesh)},
        max_memory=(1 << 18) + (1 << 16),
        progress=lambda name, nbytes: seen.append((name, nbytes)),
    )
    assert dtckpt.restore(tmp_path / "t")["w"].equal(whole)
    assert {name for name, _ in seen} == {"w"}
    assert sum(nbytes for _, nbytes in seen) == whole.nbytes
    assert max(nbytes for _, nbytes in seen) <= 1 << 16
