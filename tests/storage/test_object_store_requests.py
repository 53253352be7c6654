"""How much saves and restores ask of an object store: every request takes a round trip."""

import pytest
import torch
from support.states import bits_of, tensor_of

import dtckpt
from dtckpt.errors import CheckpointCorruptError
from dtckpt.storage import chunk_reader
from dtckpt.storage.chunk_reader import FileRun, file_runs
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import location_of
from dtckpt.storage.ocdbt_database import FileRange

from .conftest import folder_at


@pytest.fixture
def requests(store, monkeypatch):
    """The requests that the store answers: action and name."""
    answered = []
    monkeypatch.setattr(store, "refuse", lambda *asked: answered.append(asked))
    return answered


def small_tensors(count):
    return {f"t{number}": tensor_of(f"t{number}", (33, 16), "float32") for number in range(count)}


def test_small_chunks_are_read_together(bucket, requests):
    """Also chunks at a tensor's edge, which are stored padded, and chunks of several sizes."""
    path, tree = f"{bucket}/step_1", {**small_tensors(150), "other": torch.arange(100_000)}
    dtckpt.save(path, tree, options=dtckpt.SaveOptions(chunk_nbytes=1024))
    requests.clear()
    restored = dtckpt.restore(path)
    assert {name: bits_of(tensor) for name, tensor in restored.items()} == {name: bits_of(tree[name]) for name in tree}
    assert len(requests) < 20, requests


def test_damage_in_a_chunk_that_is_read_with_others(bucket, store, requests):
    path = f"{bucket}/step_1"
    dtckpt.save(path, small_tensors(20))
    folder = commit_target_of(location_of(path)).locate()
    name = max(folder.names("client_0/d/"), key=lambda name: len(folder.read(name)))
    data = bytearray(folder.read(name))
    data[5000] ^= 1
    folder.write(name, bytes(data))
    with pytest.raises(CheckpointCorruptError, match=r"of tensor 't\d+' in .* is damaged"):
        dtckpt.restore(path)
    folder.write(name, bytes(data[:5000]))
    with pytest.raises(CheckpointCorruptError):
        dtckpt.restore(path)


def test_requests_of_a_save(bucket, requests):
    """None asks what another one has told already."""
    dtckpt.save(f"{bucket}/step_1", {"w": torch.ones(8)})
    reads = [name for action, name in requests if action == "read"]
    assert len([name for name in reads if name.endswith(".decision")]) == 1, reads
    assert len(requests) <= 24, requests


def test_large_tensors_are_written_as_several_objects(bucket, requests):
    path, tree = f"{bucket}/step_1", {f"w{number}": torch.rand(2 << 20) for number in range(5)}
    dtckpt.save(path, tree)
    written = [name for action, name in requests if action == "write" and "/d/" in name]
    assert len(written) >= 3, written
    restored = dtckpt.restore(path)
    assert {name: bits_of(tensor) for name, tensor in restored.items()} == {name: bits_of(tree[name]) for name in tree}


def test_files_at_one_time(bucket, requests):
    folder = folder_at(bucket) / "folder"
    files = {f"client_{number}/name": str(number).encode() for number in range(5)}
    folder.write_all(files)
    assert list(folder.read_all(reversed(files))) == [*reversed(files.values())]
    with pytest.raises(FileNotFoundError, match="client_7/name"):
        list(folder.read_all([*files, "client_7/name"]))
    folder.remove_below({"client_0": ["name", "never"], "client_3": ["name"]})
    assert folder.names() == ["client_1/name", "client_2/name", "client_4/name"]


def test_ranges_that_lie_near_each_other_are_one_run(monkeypatch):
    monkeypatch.setattr(chunk_reader, "MAX_GAP_NBYTES", 10)
    monkeypatch.setattr(chunk_reader, "MAX_RUN_NBYTES", 100)
    ranges = [
        FileRange("b", 0, 50),
        FileRange("a", 60, 30),
        FileRange("a", 0, 50),
        FileRange("a", 101, 5),
        FileRange("a", 110, 300),
        FileRange("a", 20, 10),
    ]
    assert list(file_runs(ranges)) == [
        FileRun("a", 0, 90, [2, 5, 1]),
        FileRun("a", 101, 106, [3]),
        FileRun("a", 110, 410, [4]),
        FileRun("b", 0, 50, [0]),
    ]
    assert list(file_runs([])) == []
