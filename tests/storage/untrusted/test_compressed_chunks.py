"""Untrusted compressed chunks: none decompresses to more than its elements."""

import os

import numcodecs
import pytest
import torch

import dtckpt
from dtckpt import SaveOptions
from dtckpt._proto import checkpoint_pb2
from dtckpt.format.codecs import zstd_bound
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import location_of

from .untrusted_checkpoints import (
    ELEMENTS,
    assert_damaged,
    limit_memory,
    put_value,
    resize_tensor,
    ways_to_read,
)


@pytest.mark.parametrize("kvstore", ["zarr", "ocdbt"], indirect=True)
@pytest.mark.parametrize("bomb", ["blosc", "zstd", "stated"])
def test_a_chunk_decompresses_to_its_size_only(tmp_path, kvstore, bomb, bombs):
    codec = "zstd" if bomb == "zstd" else "blosc"
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(kvstore=kvstore, codec=codec, fsync=False))
    put_value(tmp_path / "s", kvstore, "w/c/0", bombs[bomb])
    for name, work in ways_to_read(tmp_path / "s").items():
        if name in ("restore", "read", "verify"):
            with limit_memory(1 << 30):
                assert_damaged(work)


@pytest.mark.share(1)
@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_what_compresses_best_is_no_bomb(tmp_path, kvstore, codec):
    """Elements that are all alike come to less than a thousandth; their readers believe them."""
    tree = {"zeros": torch.zeros(64 << 20), "ones": torch.ones(1 << 20, dtype=torch.int8), "one": torch.ones(())}
    options = SaveOptions(kvstore=kvstore, codec=codec, chunk_nbytes=256 << 20, content_digest=False, fsync=False)
    dtckpt.save(tmp_path / "s", tree, options=options)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1 << 20
    restored = dtckpt.restore(tmp_path / "s")
    assert all(restored[name].equal(tensor) for name, tensor in tree.items())


def test_what_does_not_compress_is_read_too(tmp_path):
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    for codec in ("zstd", "blosc"):
        dtckpt.save(tmp_path / codec, {"w": noise}, options=SaveOptions(codec=codec, fsync=False))
        assert dtckpt.restore(tmp_path / codec)["w"].equal(noise)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 131_072, 131_073, 3_000_000])
@pytest.mark.parametrize("kind", ["zeros", "noise", "text"])
def test_the_bound_of_compressed_data_holds(nbytes, kind):
    data = {"zeros": bytes(nbytes), "noise": os.urandom(nbytes), "text": (b"some text %d" * nbytes)[:nbytes]}[kind]
    for level in (-5, 1, 3, 19):
        encoded = bytes(numcodecs.zstd.compress(data, level)) if nbytes else bytes(numcodecs.zstd.compress(b"", level))
        assert nbytes <= zstd_bound(encoded) <= 4 * nbytes + (256 << 10)
        assert zstd_bound(encoded + encoded) == 2 * zstd_bound(encoded)
        for cut in {1, len(encoded) // 2, len(encoded) - 1} - {0, len(encoded)}:
            with pytest.raises(ValueError, match="corrupt"):
                zstd_bound(encoded[:cut])


@pytest.mark.share(3)
@pytest.mark.parametrize("bomb", ["blosc", "zstd"])
def test_objects_are_measured_before_they_are_read(bucket, monkeypatch, bomb, bombs, kvstore):
    """An object may be of any size: of what is too long, a byte is asked for; of a chunk, its elements."""
    path = f"{bucket}/run/s"
    dtckpt.save(path, {"w": ELEMENTS}, options=SaveOptions(kvstore=kvstore, codec=bomb))
    dtckpt.save(f"{path}2", {"small": ELEMENTS}, options=SaveOptions(kvstore=kvstore))
    root = commit_target_of(location_of(path)).locate()
    key = {"zarr": "w/c/0", "ocdbt": "manifest.ocdbt"}[kvstore]
    root.write(key, bombs[bomb])
    with limit_memory(1 << 30):
        assert_damaged(lambda: dtckpt.restore(path))
    assert dtckpt.restore(f"{path}2")["small"].equal(ELEMENTS)

    root = commit_target_of(location_of(f"{path}2")).locate()
    envelope = checkpoint_pb2.ManifestFile.FromString(root.read(MANIFEST_NAME))
    message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
    resize_tensor("small", (1 << 38,), (1 << 30,))(message)
    envelope.manifest = message.SerializeToString()
    envelope.digest = bytes_digest(envelope.manifest)
    root.write(MANIFEST_NAME, envelope.SerializeToString())
    with limit_memory(1 << 30):
        assert_damaged(lambda: dtckpt.restore(f"{path}2"))
    monkeypatch.setattr("dtckpt.checkpoint.open.MAX_MANIFEST_NBYTES", 100)
    assert_damaged(lambda: dtckpt.open_checkpoint(f"{path}2"))
