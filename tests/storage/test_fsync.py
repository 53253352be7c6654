"""Early write-back is a hint: it changes nothing, whatever files come and go meanwhile."""

import ctypes
import errno
import os
import re
import threading
import time

import pytest

from dtckpt.storage.fsync import TrailingWriteback, early_writeback, settle


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
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: Library)
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
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: object())
    with early_writeback(tmp_path):
        assert not [thread for thread in threading.enumerate() if thread.name == "dtckpt-writeback"]


class Ranges:
    """Calls of sync_file_range and posix_fadvise.

    Args:
        monkeypatch: Puts them in place.
        facts: Of the file, to be noted with each call.

    Attributes:
        calls: What was called, the range, and the facts.
        errors: The error number of each of the next calls.
    """

    def __init__(self, monkeypatch, facts=lambda _: ()):
        self.calls, self.errors, self.facts = [], iter([0] * 100), facts

        def sync_file_range(descriptor, offset, nbytes, flags):
            self.note({2: "begin", 7: "wait"}[flags], descriptor, offset, nbytes)
            ctypes.set_errno(error := next(self.errors))
            return -1 if error else 0

        library = type("Library", (), {"sync_file_range": sync_file_range})
        monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: library)
        monkeypatch.setattr(os, "posix_fadvise", self.advise)

    def advise(self, descriptor, offset, nbytes, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        self.note("forget", descriptor, offset, nbytes)

    def note(self, name, descriptor, offset, nbytes):
        facts = self.facts(descriptor)
        self.calls.append((name, offset, nbytes, facts) if facts else (name, offset, nbytes))


def test_a_file_is_written_out_behind_its_writer_who_waits_for_the_oldest_range(monkeypatch):
    ranges = Ranges(monkeypatch)
    writeback = TrailingWriteback(5, num_ranges=2)
    for offset in (0, 10, 20, 30):
        writeback.add(offset, 10)
    assert ranges.calls == [
        ("begin", 0, 10),
        ("begin", 10, 10),
        ("begin", 20, 10),
        ("wait", 0, 10),
        ("forget", 0, 10),
        ("begin", 30, 10),
        ("wait", 10, 10),
        ("forget", 10, 10),
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", range(2))
def test_an_error_of_the_disk_is_raised_because_a_later_fsync_need_not_tell_it(monkeypatch, number, call):
    ranges = Ranges(monkeypatch)
    ranges.errors = iter([0] * call + [number] + [0] * 9)
    writeback = TrailingWriteback(5, num_ranges=0)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        writeback.add(0, 10)
    assert "forget" not in [name for name, *_ in ranges.calls]


def test_a_kernel_without_the_call_writes_out_at_the_sync(monkeypatch):
    ranges = Ranges(monkeypatch)
    ranges.errors = iter([errno.ENOSYS] * 9)
    for _ in range(2):
        TrailingWriteback(5, num_ranges=1).add(0, 10)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: object())
    TrailingWriteback(5, num_ranges=0).add(0, 10)
    assert ranges.calls == [("begin", 0, 10)] * 2


def test_settled_files_are_written_out_as_a_whole_and_then_forgotten(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    calls = Ranges(monkeypatch, lambda descriptor: os.pread(descriptor, 1, 0)).calls
    settle(tmp_path / name for name in "ab")
    assert calls == [(call, 0, 0, name) for name in (b"a", b"b") for call in ("begin", "wait", "forget")]
