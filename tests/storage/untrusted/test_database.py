"""Untrusted OCDBT databases: they refer to their own files only, and their tree ends."""

import struct

import numpy as np
import pytest
import tensorstore as ts
import torch

import dtckpt
from dtckpt import SaveOptions
from dtckpt.format.digest import Blocks, digest_chunk
from dtckpt.format.grid import ChunkGrid
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.ocdbt_database import OcdbtDatabase
from dtckpt.storage.tensorstore_setup import open_context

from .untrusted_checkpoints import (
    ELEMENTS,
    assert_damaged,
    change_manifest,
    entry_of,
    limit_memory,
    resize_tensor,
)


def odd_database(monkeypatch, location, height=0):
    """Have the newest version of databases begin somewhere."""
    monkeypatch.setattr(OcdbtDatabase, "_root_node", (location, height))


@pytest.mark.parametrize(
    "location",
    [
        "btreenode::../../secret:0:100",
        "btreenode:../:d/x:0:100",
        "btreenode::/etc/passwd:0:100",
        "btreenode::d/./x:0:100",
        "btreenode::d//x:0:100",
        "btreenode:d/\0:x:0:100",
        "btreenode::d/x:0:-100",
        "btreenode::d/x:none:100",
        "btreenode",
    ],
)
def test_a_database_refers_to_its_own_files_only(tmp_path, monkeypatch, location):
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(fsync=False))
    (tmp_path / "secret").write_bytes(bytes(100))
    odd_database(monkeypatch, location)
    assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


def test_a_node_may_be_its_own_child(tmp_path, monkeypatch):
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(fsync=False))
    top = OcdbtDatabase(LocalFolder(tmp_path / "s"))._root_node
    odd_database(monkeypatch, top[0], top[1] + 1)
    assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


def test_chunks_of_a_database_have_bytes_of_their_own(tmp_path):
    """Else many keys of one value would make up a tensor of any size, every byte of it verified."""
    chunk = np.zeros(1 << 20, np.float32)
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(1 << 20)}, options=SaveOptions(chunk_nbytes=4 << 20, fsync=False))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/s/"}, context=open_context()).result()
    transaction = ts.Transaction(atomic=True)
    count = 200
    target = store.with_transaction(transaction)
    for number in range(1, count):
        source = store / "w/c/0"
        source.experimental_copy_range_to(target / f"w/c/{number}").result()
    transaction.commit_async().result()
    change = resize_tensor("w", (count << 20,), (1 << 20,))
    change_manifest(tmp_path / "s", change)

    blocks = Blocks.of(ChunkGrid((count << 20,), (1 << 20,)), 4)

    def signed(message):
        digests = [digest_chunk("w", (number,), chunk, blocks)[0] for number in range(count)]
        entry_of(message, "w").digests[:] = digests

    change_manifest(tmp_path / "s", signed)
    with limit_memory(1 << 30):
        assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))


def test_a_node_that_decompresses_to_more_is_damage(tmp_path, bombs):
    dtckpt.save(tmp_path / "s", {"w": ELEMENTS}, options=SaveOptions(fsync=False))
    body = b"\x0c\xdb\x3a\x2a" + struct.pack("<Q", 14 + len(bombs["zstd"]) + 4) + b"\0\1" + bombs["zstd"]
    (tmp_path / "s" / "manifest.ocdbt").write_bytes(body + bytes(4))
    with limit_memory(1 << 30):
        assert_damaged(lambda: dtckpt.restore(tmp_path / "s"))
