"""Chunks that the page cache lacks are read from the disk by several threads, whatever the number of cores."""

import os
import threading

import pytest
import torch

import dtckpt
from dtckpt.checkpoint.reading import read_chunks, verified_reads
from dtckpt.storage import local_values
from dtckpt.storage.local_values import OpenFile, StoredValue

TENSORS = 12
SHAPE = (1024, 1024)  # 4 MiB: a large chunk


def drop(folder):
    """Let the page cache forget the files below a folder."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def is_cold(path):
    file = OpenFile(str(path))
    return StoredValue(file, 0, file.nbytes).is_cold(0, file.nbytes)


@pytest.fixture
def cold_folder(tmp_path):
    """A folder on a file system whose page cache forgets files on demand; a tmpfs has nothing but the cache."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    drop(tmp_path)
    if not is_cold(probe):
        pytest.skip("this file system does not tell, or does not forget, what the page cache has")
    return tmp_path


@pytest.fixture
def readers(monkeypatch):
    """The threads that read large chunks, on a machine where each client has one core."""
    threads = set()
    plain = local_values.StoredValue.read_into

    def read_into(self, memory, start):
        threads.add(threading.current_thread().name)
        plain(self, memory, start)

    monkeypatch.setattr(local_values.StoredValue, "read_into", read_into)
    monkeypatch.setattr(verified_reads, "spare_threads", lambda: 1)
    monkeypatch.setattr("dtckpt.checkpoint.foreign.piece_files.spare_threads", lambda: 1)
    return threads


def test_a_range_is_cold_until_it_was_read(cold_folder):
    path = cold_folder / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    assert not is_cold(path)
    drop(cold_folder)
    assert is_cold(path)
    path.read_bytes()
    assert not is_cold(path)


def test_a_file_system_that_cannot_tell_is_not_cold(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    (tmp_path / "file").write_bytes(b"abc")
    monkeypatch.setattr(os, "preadv", refuse)
    assert not is_cold(tmp_path / "file")


@pytest.mark.parametrize("form", ["ocdbt", "zarr", "safetensors"])
def test_threads_read_from_the_disk(cold_folder, readers, form):
    saved = {f"w{number}": torch.randn(SHAPE) for number in range(TENSORS)}
    kvstore = "ocdbt" if form == "safetensors" else form
    path = cold_folder / "c"
    dtckpt.save(path, saved, options=dtckpt.SaveOptions(kvstore=kvstore))
    if form == "safetensors":
        dtckpt.convert(path, cold_folder / "c.safetensors")
        path = cold_folder / "c.safetensors"
    target = {name: torch.zeros(SHAPE) for name in saved}
    readers.clear()
    drop(cold_folder)
    dtckpt.restore(path, target)
    assert all(target[name].equal(saved[name]) for name in saved)
    # How many threads of the pool come to read depends on how fast each of them is.
    assert readers - {"MainThread"} <= {f"dtckpt-reads_{number}" for number in range(verified_reads.COLD_THREADS)}
    assert readers - {"MainThread"}
    readers.clear()
    dtckpt.restore(path, target)
    assert readers == {"MainThread"}


@pytest.mark.parametrize("cores", [1, 2])
def test_chunks_in_the_page_cache_take_the_threads_of_the_cores(cold_folder, readers, monkeypatch, cores):
    monkeypatch.setattr(verified_reads, "spare_threads", lambda: cores)
    saved = {f"w{number}": torch.randn(SHAPE) for number in range(TENSORS)}
    dtckpt.save(cold_folder / "c", saved)
    target = {name: torch.zeros(SHAPE) for name in saved}
    dtckpt.restore(cold_folder / "c", target)
    readers.clear()
    dtckpt.restore(cold_folder / "c", target)
    allowed = {f"dtckpt-reads_{number}" for number in range(cores)} if cores > 1 else set()
    assert readers <= {"MainThread", *allowed}


def test_a_damaged_chunk_is_found_on_the_disk(cold_folder, readers):
    saved = {f"w{number}": torch.randn(SHAPE) for number in range(TENSORS)}
    dtckpt.save(cold_folder / "c", saved)
    largest = max(
        (path for path in (cold_folder / "c").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    drop(cold_folder)
    with pytest.raises(dtckpt.errors.CheckpointCorruptError, match="is damaged: its digest does not match"):
        dtckpt.restore(cold_folder / "c", {name: torch.zeros(SHAPE) for name in saved})
    assert not [each for each in threading.enumerate() if each.name.startswith("dtckpt-reads")]


def test_the_memory_of_spans_is_bounded():
    assert verified_reads.COLD_THREADS * read_chunks.SPAN_NBYTES <= 8 << 20
