"""Untrusted manifests and other documents: their claims are checked before memory is taken for them."""

import json
import os
import time

import pytest
import torch

import dtckpt
from dtckpt import Region, SaveOptions
from dtckpt.checkpoint.reading.verify import MAX_DAMAGES
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, Manifest

from .untrusted_checkpoints import (
    ELEMENTS,
    TB,
    assert_damaged,
    change_manifest,
    entry_of,
    error_of,
    limit_memory,
    resize_tensor,
    ways_to_read,
)


@pytest.mark.parametrize(
    ("shape", "chunk_shape"),
    [
        ((10 * TB,), (10 * TB,)),  # 40 TB in one chunk
        ((1 << 38,), (1 << 30,)),  # and 1 TB in many
        ((1 << 6, 1 << 31), (1, 1 << 31)),
        ((1 << 12,) * 4, (1, 1, 1 << 12, 1 << 12)),
        ((1 << 60,), (1,)),  # more chunks than have digests
        ((1 << 62, 1 << 62), (1 << 62, 1 << 62)),  # more bytes than numbers have bits
        ((1 << 62, 0, 1 << 62), (1 << 62, 1, 1 << 62)),
        ((-4,), (1,)),
        ((2000,), (0,)),
        ((2000,), (-1,)),
        ((2000,) + (1,) * 40, (2000,) + (1,) * 40),
    ],
    ids=str,
)
def test_a_manifest_that_claims_too_much_is_damaged(saved, shape, chunk_shape):
    change_manifest(saved, resize_tensor("small", shape, chunk_shape))
    with limit_memory(2 << 30):
        work = ways_to_read(saved)
        for name in ("restore", "read", "verify"):
            assert_damaged(work[name])


def test_rows_of_a_huge_chunk_are_not_believed(saved):
    change_manifest(saved, resize_tensor("w", (4, 10 * TB), (4, 10 * TB)))
    with limit_memory(1 << 30), dtckpt.open_checkpoint(saved) as checkpoint:
        assert_damaged(lambda: checkpoint.read("w", Region((0, 0), (1, 1))))


def test_what_was_never_saved_takes_no_memory(saved):
    def change(message):
        resize_tensor("small", (1 << 40,), (1 << 30,))(message)
        entry_of(message, "small").missing[:] = range(1 << 10)

    change_manifest(saved, change)
    with limit_memory(1 << 30):
        assert type(error_of(lambda: dtckpt.restore(saved))) is dtckpt.errors.RegionNotFoundError


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
def test_verify_ends_after_many_damages(saved):
    """A manifest of 8 MB names a million chunks that are missing; to read it again for each would take a day."""
    change_manifest(saved, resize_tensor("small", (1 << 40,), (1 << 20,)))
    start = time.process_time()
    with dtckpt.open_checkpoint(saved) as checkpoint:
        damages = checkpoint.verify().damages
    assert time.process_time() - start < 60
    assert MAX_DAMAGES <= len(damages) < MAX_DAMAGES + 10
    assert any("the rest was not read" in damage.reason for damage in damages)


def test_tiny_chunks_take_little_more_than_their_digests(tmp_path):
    count = 50_000
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(1, dtype=torch.int8)}, options=SaveOptions(fsync=False))
    change_manifest(tmp_path / "s", resize_tensor("w", (count,), (1,)))
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint, limit_memory(48 << 20):
        assert_damaged(lambda: checkpoint.read("w"))
        assert checkpoint.info("w").read_nbytes(Region((0,), (count,))) == count


@pytest.mark.parametrize(
    "tree",
    [
        b"[" * 100_000,
        b'{"list":[' * 5000 + b'{"value":0}' + b"]}" * 5000,
        b'{"list":[' * 100 + b'{"tensor":"w"}' + b"]}" * 100,
        b'{"value":' + b"9" * 10_000 + b"}",
        b'{"dict":[["a",{"value":0}],["a",{"value":0}]]}',
        b'{"float":"' + b"9" * 100 + b'x"}',
        b"\xff",
        b"",
    ],
    ids=lambda tree: repr(tree[:12]),
)
def test_malformed_trees(saved, tree):
    change_manifest(saved, lambda message: setattr(message, "tree", tree))
    error = error_of(lambda: dtckpt.restore(saved))
    assert type(error) is CheckpointCorruptError or not tree


def test_false_counts(saved):
    def huge_run(message):
        entry_of(message, "w").writers[0].count = (1 << 64) - 1

    def huge_client(message):
        entry_of(message, "w").writers[0].client = (1 << 32) - 1

    def no_mesh(message):
        entry_of(message, "w").layout.mesh = (1 << 32) - 1

    def odd_mesh(message):
        message.meshes.add().mesh_dimensions.add(name="x", size=1 << 62)

    def lost(message):
        entry_of(message, "w").missing.append((1 << 64) - 1)

    def long_token(message):
        message.attempt = "x" * (1 << 20)

    def twice(message):
        message.tensors.append(entry_of(message, "w"))

    def elsewhere(message):
        entry_of(message, "w").path = "../../w"

    def costs(message):
        message.phases.add(phase="write", microseconds=[1] * 100_000)

    kept = (saved / MANIFEST_NAME).read_bytes()
    for change in (huge_run, huge_client, no_mesh, odd_mesh, lost, long_token, twice, elsewhere, costs):
        change_manifest(saved, change)
        with limit_memory(1 << 30):
            assert_damaged(lambda: dtckpt.restore(saved))
        (saved / MANIFEST_NAME).write_bytes(kept)


def test_documents_that_state_something_else_change_nothing(tmp_path):
    """What counts is the manifest: another shape, type or codec in a zarr.json is damage to other readers only."""
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(kvstore="zarr", codec="blosc", fsync=False))
    document = tmp_path / "s" / "w" / "zarr.json"
    stated = json.loads(document.read_bytes())
    stated |= {"shape": [10 * TB], "data_type": "float64", "codecs": [{"name": "gzip", "configuration": {"level": 1}}]}
    document.write_bytes(json.dumps(stated).encode())
    assert dtckpt.restore(tmp_path / "s")["w"].equal(ELEMENTS)
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        (damage,) = checkpoint.verify().damages
        assert "zarr.json" in damage.reason


def test_malformed_metrics_count_as_none(tmp_path):
    with dtckpt.CheckpointManager(tmp_path / "run", is_async=False) as manager:
        manager.save(1, {"w": ELEMENTS}, metrics={"loss": 1.0}, force=True)
        file = tmp_path / "run" / "step_00000001" / "metrics.json"
        for odd in (b"[" * 100_000, b'{"loss": 1' + b"0" * 400 + b"}", b"\xff"):
            file.write_bytes(odd)
            assert manager.metrics(1) == {}
        os.truncate(file, 10 * TB)
        with limit_memory(1 << 30):
            assert manager.metrics(1) == {}
        file.unlink()
        os.mkfifo(file)
        assert error_of(lambda: manager.metrics(1)) is None


def test_no_manifest_is_written_that_nobody_would_read(monkeypatch):
    monkeypatch.setattr("dtckpt.format.manifest.MAX_MANIFEST_NBYTES", 100)
    with pytest.raises(dtckpt.errors.ConfigError, match="chunk_nbytes"):
        Manifest("zarr", {}, tree=b"x" * 100).to_bytes()
    assert MAX_MANIFEST_NBYTES >= 1 << 28
