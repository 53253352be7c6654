"""Early write-back is a hint: it changes nothing, whatever files come and go meanwhile."""

import ctypes
import os
import threading
import time

import pytest

from dtckpt.storage.fsync import early_writeback, settle


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.fixture
def ranges(monkeypatch):
    """Calls of sync_file_range: the file's first bytes at that time."""
    found = []

    class Library:
        @staticmethod
        def sync_file_range(descriptor, offset, nbytes, flags):
            assert (offset, nbytes, flags) == (0, 0, 2)
            found.append(os.pread(descriptor, 9, 0))

    Library.sync_file_range.argtypes = ()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    return found


def test_files_are_written_out_while_they_grow(tmp_path, ranges):
    with early_writeback(tmp_path / "d"):
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "one").write_bytes(b"1")
        wait_until(lambda: b"1" in ranges)
        (tmp_path / "d" / "one").write_bytes(b"1, longer")
        (tmp_path / "d" / "two").write_bytes(b"2")
        wait_until(lambda: {b"1, longer", b"2"} <= set(ranges))
        (tmp_path / "d" / "one").unlink()
        seen = len(ranges)
        wait_until(lambda: len(ranges) > seen + 2)
    assert not [thread for thread in threading.enumerate() if thread.name == "dtckpt-writeback"]


def test_a_file_that_is_gone_keeps_no_other_back(tmp_path, ranges):
    with early_writeback(tmp_path):
        for i in range(50):
            (tmp_path / f"{i}").symlink_to("gone")
        (tmp_path / "one").write_bytes(b"1")
        wait_until(lambda: b"1" in ranges)


def test_only_new_files_are_written_out_and_once_more_at_the_end(tmp_path, ranges):
    (tmp_path / "old").write_bytes(b"old")
    with early_writeback(tmp_path):
        (tmp_path / "new").write_bytes(b"new")
    assert set(ranges) == {b"new"}


def test_errors_of_the_work_come_through(tmp_path):
    with pytest.raises(ZeroDivisionError), early_writeback(tmp_path / "nowhere"):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "dtckpt-writeback"]


def test_where_there_is_no_such_call(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with early_writeback(tmp_path):
        assert not [thread for thread in threading.enumerate() if thread.name == "dtckpt-writeback"]


def test_settled_files_are_synced_and_then_forgotten(tmp_path, monkeypatch):
    asked = []
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append(("sync", os.pread(descriptor, 1, 0))))
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda descriptor, start, nbytes, advice: asked.append((advice, os.pread(descriptor, 1, 0))),
    )
    settle(tmp_path / name for name in "ab")
    forgotten = os.POSIX_FADV_DONTNEED
    assert asked == [("sync", b"a"), (forgotten, b"a"), ("sync", b"b"), (forgotten, b"b")]
    monkeypatch.delattr(os, "posix_fadvise")
    settle([tmp_path / "a"])
    assert asked[4:] == [("sync", b"a")]
