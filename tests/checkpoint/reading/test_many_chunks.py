"""Reads of a distributed checkpoint of many chunks: the work grows as their number, counted in function calls."""

import io
import pickle
import sys
import threading

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

import dtckpt
from dtckpt.storage import chunk_reader

SIDE = 4


def _write(folder, rows, columns):
    """Write a checkpoint of one tensor, sharded along both dims."""
    stream = io.BytesIO()
    torch.save(torch.ones(SIDE, SIDE), stream)
    places, chunks, data = {}, [], bytearray()
    for row in range(rows):
        for column in range(columns):
            offset = torch.Size((SIDE * row, SIDE * column))
            places[dcp.MetadataIndex("w", offset, len(chunks))] = _StorageInfo("__0_0.distcp", len(data), stream.tell())
            chunks.append(dcp.ChunkStorageMetadata(offset, torch.Size((SIDE, SIDE))))
            data += stream.getvalue()
    shape = torch.Size((SIDE * rows, SIDE * columns))
    tensor = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), shape, chunks)
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata({"w": tensor}, {"w": ("w",)}, places)))


def _count_calls(work):
    """Return how many functions are called by some work, in all threads."""
    events = []
    try:
        threading.setprofile(lambda *_: events.append(None))
        sys.setprofile(lambda *_: events.append(None))
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(events)


def _open(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["w"].is_whole


def _verify(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound


def _restore(path):
    assert bool((dtckpt.restore(path)["w"] == 1).all())


@pytest.mark.parametrize("work", [_open, _verify, _restore])
def test_twice_the_chunks_take_twice_the_calls(tmp_path, work):
    _write(tmp_path / "few", 20, 20)
    _write(tmp_path / "many", 40, 40)
    work(tmp_path / "few")  # imports
    few, many = (_count_calls(lambda path=path: work(path)) for path in (tmp_path / "few", tmp_path / "many"))
    assert many < 5 * few


def test_no_file_is_closed_while_it_is_read(tmp_path, monkeypatch):
    """Two threads may open a file at one time, and only one of the two stays in the list of open files."""
    monkeypatch.setattr(chunk_reader, "MAX_OPEN_FILES", 0)
    _write(tmp_path / "few", 3, 3)
    _verify(tmp_path / "few")
    _restore(tmp_path / "few")
