"""Reads of chunks from local files: values are found in any shape of database, and read as they were saved."""

import mmap
import os

import numpy as np
import pytest
import tensorstore as ts
import torch

import dtckpt
from dtckpt import Region, SaveOptions
from dtckpt.errors import CheckpointCorruptError
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.local_values import OpenFile, StoredValue
from dtckpt.storage.ocdbt_database import FileRange, OcdbtDatabase
from dtckpt.storage.tensorstore_setup import open_context

KEYS = [f"model/layers/{number:03}/{name}/c/0" for number in range(60) for name in ("a", "wörter ab:c")]
VALUES = {key: f"value of {key}".encode() for key in KEYS}


@pytest.fixture(params=[700, 8 << 20], ids=["many nodes", "one node"])
def database(request, tmp_path):
    """A database, of nodes of nodes if they are small."""
    folder = LocalFolder(tmp_path)
    config = {"max_decoded_node_bytes": request.param, "max_inline_value_bytes": 8}
    context = open_context()
    store = ts.KvStore.open({"driver": "ocdbt", "base": folder.kvstore(), "config": config}, context=context).result()
    transaction = ts.Transaction(atomic=True)
    for key, value in {**VALUES, "inline": b"1"}.items():
        store.with_transaction(transaction).write(key, value).result()
    transaction.commit_async().result()
    return OcdbtDatabase(folder)


def value_at(tmp_path, stored: FileRange) -> StoredValue:
    return StoredValue(OpenFile(f"{tmp_path}/{stored.file}"), stored.start, stored.nbytes)


def content(value: StoredValue) -> bytes:
    memory = bytearray(value.nbytes)
    value.read_into(memoryview(memory), 0)
    return bytes(memory)


def test_all_values_are_found(database, tmp_path):
    assert {key: content(value_at(tmp_path, database.find(key))) for key in KEYS} == VALUES


def test_a_small_value_comes_with_its_node(database):
    assert database.find("inline") == b"1"


@pytest.mark.parametrize("key", ["model", "zzz", "", "model/layers/000/b/c/0"])
def test_what_is_not_there_is_missing(database, key):
    with pytest.raises(FileNotFoundError):
        database.find(key)


def test_few_places_are_kept(database, monkeypatch, tmp_path):
    monkeypatch.setattr("dtckpt.storage.ocdbt_database.MAX_CACHED_KEYS", 20)
    monkeypatch.setattr("dtckpt.storage.ocdbt_database.MAX_HEIGHT", 4)
    assert [content(value_at(tmp_path, database.find(key))) for key in KEYS[::-1]] == [
        VALUES[key] for key in KEYS[::-1]
    ]
    assert len(database._cache) <= 5


def test_a_value_is_read_to_its_end_only(database, tmp_path):
    value, memory = value_at(tmp_path, database.find(KEYS[0])), bytearray(100)
    with pytest.raises(ValueError, match="cut short"):
        value.read_into(memoryview(memory), 0)
    value.read_into(memoryview(memory)[:5], 3)
    assert memory[:5] == VALUES[KEYS[0]][3:8]


def test_a_file_is_open_as_long_as_somebody_reads_from_it(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    value, memory = value_at(tmp_path, FileRange("x", 0, 7)), bytearray(7)
    (tmp_path / "x").unlink()
    value.read_into(memoryview(memory), 0)
    number = value.file.descriptor
    assert memory == b"content"
    del value
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_chunk_that_is_cut_short_or_missing_is_damage(tmp_path, kvstore, damage):
    tree = {"w": torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore=kvstore))
    largest = max(
        (path for path in (tmp_path / "s").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    if damage == "cut":
        os.truncate(largest, 100_000)
    else:
        largest.unlink()
    with pytest.raises(CheckpointCorruptError, match=r"'w'.*(cut short|missing)"):
        dtckpt.restore(tmp_path / "s")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_of_chunks_go_where_they_are_wanted(tmp_path, dtype):
    """Regions that meet blocks of chunks, some of them cut short by the grid, in every way."""
    whole = torch.arange(700 * 300, dtype=torch.float32).reshape(1, 700, 300)
    dtckpt.save(tmp_path / "s", {"w": whole}, options=SaveOptions(chunk_nbytes=1 << 19, fsync=False))
    regions = [
        Region((0, 0, 0), (1, 700, 300)),
        Region((0, 100, 0), (1, 500, 300)),
        Region((0, 218, 0), (1, 1, 300)),
        Region((0, 219, 7), (1, 400, 11)),
        Region((0, 699, 299), (1, 1, 1)),
    ]
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.info("w").num_chunks > 1
        for region in regions:
            memory = torch.zeros(region.shape, dtype=dtype)
            wide = np.zeros((*region.shape[:-1], 2 * region.shape[-1]), np.float32)
            strided = wide[..., ::2]
            host = memory.numpy() if dtype != torch.bfloat16 else dtckpt.checkpoint.leaves.host_array(memory)
            checkpoint.read_all([("w", [(region, host), (region, strided)])])
            assert memory.equal(whole[region.slices()].to(dtype))
            assert np.array_equal(strided, whole[region.slices()].numpy())
            assert not wide[..., 1::2].any()
            assert checkpoint.read("w", region).equal(whole[region.slices()])


@pytest.mark.parametrize("is_held", [True, False])
def test_the_page_cache_is_asked_for_one_page_of_the_value(tmp_path, monkeypatch, is_held):
    """Not for the page of the last byte, which may be the next value's, too."""
    (tmp_path / "value").write_bytes(bytes(1 << 20))
    value = value_at(tmp_path, FileRange("value", 0, 1 << 20))
    probed = []

    def probe(number, memory, place, flags):
        probed.append(place)
        if not is_held:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", probe)
    assert value.is_cold(100, 300_000) is not is_held
    (place,) = probed
    assert place // mmap.PAGESIZE * mmap.PAGESIZE >= 100
    assert (place // mmap.PAGESIZE + 1) * mmap.PAGESIZE <= 300_000
