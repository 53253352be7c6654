"""Chunks that the page cache lacks are read from the disk by several threads, whatever the number of cores."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

import dtckpt
from dtckpt.checkpoint.reading import read_chunks, verified_reads
from dtckpt.storage import local_values
from dtckpt.storage.local_values import OpenFile, StoredValue

TENSORS = 12
SHAPE = (1024, 1024)  # 4 MiB: a large chunk


DROPS = 50
"""Attempts to drop a folder from the page cache: the kernel keeps pages that another processor has just touched."""


def drop(folder):
    """Ask the page cache to forget the files below a folder."""
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


@pytest.fixture
def page_cache(monkeypatch):
    """The reader's view of the page cache. The kernel may keep pages that it was asked to forget."""
    state = SimpleNamespace(is_empty=False)
    monkeypatch.setattr(local_values.StoredValue, "is_cold", lambda *_: state.is_empty)
    return state


def test_a_range_is_cold_until_it_was_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    for _ in range(DROPS):
        drop(tmp_path)
        if is_cold(path):
            break
    else:
        pytest.skip("this file system does not tell, or does not forget, what the page cache has")
    path.read_bytes()
    assert not is_cold(path)


def test_a_file_system_that_cannot_tell_is_not_cold(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    (tmp_path / "file").write_bytes(b"abc")
    monkeypatch.setattr(os, "preadv", refuse)
    assert not is_cold(tmp_path / "file")


@pytest.mark.parametrize("form", ["ocdbt", "zarr", "safetensors"])
def test_threads_read_from_the_disk(tmp_path, page_cache, readers, form):
    saved = {f"w{number}": torch.randn(SHAPE) for number in range(TENSORS)}
    kvstore = "ocdbt" if form == "safetensors" else form
    path = tmp_path / "c"
    dtckpt.save(path, saved, options=dtckpt.SaveOptions(kvstore=kvstore))
    if form == "safetensors":
        dtckpt.convert(path, tmp_path / "c.safetensors")
        path = tmp_path / "c.safetensors"
    target = {name: torch.zeros(SHAPE) for name in saved}
    readers.clear()
    page_cache.is_empty = True
    dtckpt.restore(path, target)
    assert all(target[name].equal(saved[name]) for name in saved)
    # How many threads of the pool come to read depends on how fast each of them is.
    assert readers - {"MainThread"} <= {f"dtckpt-reads_{number}" for number in range(verified_reads.COLD_THREADS)}
    assert readers - {"MainThread"}
    readers.clear()
    page_cache.is_empty = False
    dtckpt.restore(path, target)
    assert readers == {"MainThread"}


@pytest.mark.parametrize("cores", [1, 2])
def test_chunks_in_the_page_cache_take_the_threads_of_the_cores(tmp_path, page_cache, readers, monkeypatch, cores):
    monkeypatch.setattr(verified_reads, "spare_threads", lambda: cores)
    saved = {f"w{number}": torch.randn(SHAPE) for number in range(TENSORS)}
    dtckpt.save(tmp_path / "c", saved)
    target = {name: torch.zeros(SHAPE) for name in saved}
    dtckpt.restore(tmp_path / "c", target)
    readers.clear()
    dtckpt.restore(tmp_path / "c", target)
    allowed = {f"dtckpt-reads_{number}" for number in range(cores)} if cores > 1 else set()
    assert readers <= {"MainThread", *allowed}


def test_a_damaged_chunk_is_found_on_the_disk(tmp_path, page_cache, readers):
    saved = {f"w{number}": torch.randn(SHAPE) for number in range(TENSORS)}
    dtckpt.save(tmp_path / "c", saved)
    largest = max(
        (path for path in (tmp_path / "c").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    page_cache.is_empty = True
    with pytest.raises(dtckpt.errors.CheckpointCorruptError, match="is damaged: its digest does not match"):
        dtckpt.restore(tmp_path / "c", {name: torch.zeros(SHAPE) for name in saved})
    assert not [each for each in threading.enumerate() if each.name.startswith("dtckpt-reads")]


def test_the_memory_of_spans_is_bounded():
    assert verified_reads.COLD_THREADS * read_chunks.SPAN_NBYTES <= 8 << 20
