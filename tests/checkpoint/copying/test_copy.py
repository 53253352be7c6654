"""Copies of checkpoints and roots: verification, the files that an interrupted call leaves, and the files that the next
call keeps."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.shares import amount

import dtckpt
from dtckpt import errors
from dtckpt.storage import whole_files
from dtckpt.storage.commit_by_rename import DirectoryAttempt
from dtckpt.storage.whole_files import RateLimit

from .roots import OPTIONS, files_in, flip, is_equal, is_step, leftovers, link_copy, save_steps, state, step_folder


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_copy_has_the_same_files(tmp_path, kind):
    dtckpt.save(tmp_path / "s", state(1), options=OPTIONS[kind])
    report = dtckpt.copy(tmp_path / "s", tmp_path / "deep" / "d")
    assert is_equal(tmp_path / "s", tmp_path / "deep" / "d")
    assert is_step(tmp_path / "deep" / "d", 1)
    assert dtckpt.open_checkpoint(tmp_path / "deep" / "d").verify().is_sound
    assert report.nbytes == sum(file.stat().st_size for file in files_in(tmp_path / "s"))
    assert os.listdir(tmp_path / "deep") == ["d"]


@pytest.mark.parametrize(
    "tree",
    [{}, {"a": torch.zeros(0, 3)}, {"s": torch.tensor(2.0), "n": None}, {"w": torch.zeros(1 << 20, dtype=torch.int8)}],
)
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_odd_checkpoints(tmp_path, tree, kvstore):
    dtckpt.save(tmp_path / "s", tree, options=dtckpt.SaveOptions(kvstore=kvstore))
    dtckpt.copy(tmp_path / "s", tmp_path / "d")
    assert is_equal(tmp_path / "s", tmp_path / "d")


def test_the_steps_of_a_root(tmp_path):
    save_steps(tmp_path / "run", [1, 2, 3])
    assert [each.num_files for each in dtckpt.copy(tmp_path / "run", tmp_path / "a").checkpoints] == [6, 6, 6]
    with dtckpt.CheckpointManager(tmp_path / "a") as manager:
        assert manager.all_steps() == [1, 2, 3]
        assert manager.metrics(2) == {"loss": 0.2}
        assert manager.restore().step == 3
    dtckpt.copy(tmp_path / "run", tmp_path / "b", newest=1)
    dtckpt.copy(tmp_path / "run", tmp_path / "b", steps=[1])
    assert sorted(os.listdir(tmp_path / "b")) == ["step_00000001", "step_00000003"]
    again = dtckpt.copy(tmp_path / "run", tmp_path / "b")
    assert [each.was_there for each in again.checkpoints] == [True, False, True]
    with pytest.raises(errors.CheckpointNotFoundError, match=r"lacks steps 7; it has 1, 2, 3"):
        dtckpt.copy(tmp_path / "run", tmp_path / "b", steps=[7])
    with pytest.raises(errors.CheckpointNotFoundError, match="neither a checkpoint of dtckpt nor a root"):
        dtckpt.copy(tmp_path / "none", tmp_path / "b")


def test_another_checkpoint_at_the_target_stays(tmp_path):
    for name, step in (("s", 1), ("d", 2)):
        dtckpt.save(tmp_path / name, state(step))
    with pytest.raises(errors.CheckpointExistsError):
        dtckpt.copy(tmp_path / "s", tmp_path / "d")
    assert is_step(tmp_path / "d", 2)
    dtckpt.copy(tmp_path / "s", tmp_path / "d", overwrite=True)
    assert is_step(tmp_path / "d", 1)
    files_in(tmp_path / "d")[-1].unlink()  # the same checkpoint, not whole
    dtckpt.copy(tmp_path / "s", tmp_path / "d")
    assert is_equal(tmp_path / "s", tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["d", "s"]


def test_arguments_that_cannot_be_used(tmp_path):
    save_steps(tmp_path / "run", [1])
    for target, options, text in (
        (tmp_path / "run" / "in", {}, "overlap; choose another"),
        (tmp_path / "d", {"newest": 0}, "newest must be"),
        (tmp_path / "d", {"max_rate": 0}, "max_rate must be"),
        ("memory://d", {"keep_links": True}, "two directories"),
    ):
        with pytest.raises(errors.ConfigError, match=text):
            dtckpt.copy(tmp_path / "run", target, **options)
    with pytest.raises(errors.ConfigError, match="is a checkpoint itself"):
        dtckpt.copy(step_folder(tmp_path / "run", 1), tmp_path / "d", newest=1)
    with pytest.raises(errors.ConfigError, match="reshard --format zarr"):
        dtckpt.copy(step_folder(tmp_path / "run", 1), "memory://run/d")


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_damaged_source_is_not_copied(tmp_path, kind):
    save_steps(tmp_path / "run", [1, 2], kind)
    file = max(files_in(step_folder(tmp_path / "run", 1)), key=lambda file: file.stat().st_size)
    flip(file, 2000)
    with pytest.raises(errors.CheckpointCorruptError, match=r"chunk .* of tensor '(w|half)'"):
        dtckpt.copy(step_folder(tmp_path / "run", 1), tmp_path / "d")
    assert not (tmp_path / "d").exists()
    report = dtckpt.copy(tmp_path / "run", tmp_path / "copies")
    assert [bool(each.failure) for each in report.checkpoints] == [True, False]
    assert is_step(step_folder(tmp_path / "copies", 2), 2)
    file.unlink()
    with pytest.raises(errors.CheckpointCorruptError):
        dtckpt.copy(step_folder(tmp_path / "run", 1), tmp_path / "d")


def test_a_copy_that_does_not_read_back_is_not_committed(tmp_path, monkeypatch):
    # One thread copies in the order of names, so the small file is whole before the large one fails.
    tree = {"a": torch.ones(3), "z": torch.arange(100_000.0)}
    dtckpt.save(tmp_path / "s", tree, options=dtckpt.SaveOptions(kvstore="zarr"))
    write = os.pwrite

    def write_and_lose(descriptor, data, offset):
        count = write(descriptor, data, offset)
        if count > 200_000:
            write(descriptor, b"lost", offset + 1000)
        return count

    monkeypatch.setattr(whole_files.os, "pwrite", write_and_lose)
    with pytest.raises(errors.StorageError, match="does not read back as it was written"):
        dtckpt.copy(tmp_path / "s", tmp_path / "d", threads=1)
    assert not (tmp_path / "d").exists()
    monkeypatch.undo()
    assert dtckpt.copy(tmp_path / "s", tmp_path / "d").checkpoints[0].num_kept
    assert is_equal(tmp_path / "s", tmp_path / "d")


def test_a_full_disk(tmp_path, monkeypatch):
    dtckpt.save(tmp_path / "s", state(1))

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(whole_files.os, "pwrite", refuse)
    with pytest.raises(errors.StorageFullError, match="free space"):
        dtckpt.copy(tmp_path / "s", tmp_path / "d")
    monkeypatch.undo()
    dtckpt.copy(tmp_path / "s", tmp_path / "d")
    assert is_equal(tmp_path / "s", tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["d", "s"]


# --- calls that were cut ------------------------------------------------------------------------------------------


class Cut(BaseException):
    """The end of a process, as far as its files go."""


def cut(tmp_path, monkeypatch, kind="ocdbt"):
    """Copy a checkpoint up to the commit."""
    dtckpt.save(tmp_path / "s", state(1), options=OPTIONS[kind])

    def end(*_, **__):
        raise Cut

    monkeypatch.setattr(DirectoryAttempt, "commit", end)
    with pytest.raises(Cut):
        dtckpt.copy(tmp_path / "s", tmp_path / "d")
    monkeypatch.undo()
    (name,) = leftovers(tmp_path)
    assert not (tmp_path / "d").exists()
    return tmp_path / name


@pytest.mark.parametrize("kind", OPTIONS)
def test_files_of_a_call_that_was_cut_are_kept_if_they_are_verified(tmp_path, monkeypatch, kind):
    building = cut(tmp_path, monkeypatch, kind)
    files = [file for file in files_in(building) if file.name != "dtckpt.manifest"]
    large = sorted(files, key=lambda file: file.stat().st_size)
    flip(large[-1], large[-1].stat().st_size // 2)
    large[-2].write_bytes(large[-2].read_bytes()[:-1])
    large[-3].write_bytes(large[-3].read_bytes() + b"more")
    (building / "stray").write_text("of another call")
    report = dtckpt.copy(tmp_path / "s", tmp_path / "d")
    assert is_equal(tmp_path / "s", tmp_path / "d")
    assert report.checkpoints[0].num_kept == len(files) - 3
    assert sorted(os.listdir(tmp_path)) == ["d", "s"]


def test_a_byte_that_no_digest_covers_is_compared_with_the_source(tmp_path, monkeypatch):
    building = cut(tmp_path, monkeypatch)
    for file in files_in(building):
        if file.name != "dtckpt.manifest":
            flip(file, file.stat().st_size - 1)
    dtckpt.copy(tmp_path / "s", tmp_path / "d")
    assert is_equal(tmp_path / "s", tmp_path / "d")


def test_copies_that_are_killed(tmp_path):
    save_steps(tmp_path / "run", [1, 2, 3])
    command = [sys.executable, "-m", "dtckpt", "copy", tmp_path / "run", tmp_path / "d", "--max-rate", "1MB"]
    for number in range(amount(2, 20)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (tmp_path / "d").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1 * number % 0.7)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (tmp_path / "d").exists():
            for step in (1, 2, 3):
                target = step_folder(tmp_path / "d", step)
                assert not target.exists() or is_equal(step_folder(tmp_path / "run", step), target)
    dtckpt.copy(tmp_path / "run", tmp_path / "d")
    assert all(is_step(step_folder(tmp_path / "d", step), step) for step in (1, 2, 3))
    assert leftovers(tmp_path / "d") == []


# --- other processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["replace", "remove"])
@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_a_source_that_changes_meanwhile(tmp_path, change, kind):
    dtckpt.save(tmp_path / "s", state(1), options=OPTIONS[kind])
    changed = []

    def progress(*_):
        if not changed:
            changed.append(True)
            if change == "replace":
                dtckpt.save(tmp_path / "s", state(2), options=OPTIONS[kind])
            else:
                shutil.rmtree(tmp_path / "s")

    with pytest.raises(errors.CheckpointConflictError, match="was replaced or removed"):
        dtckpt.copy(tmp_path / "s", tmp_path / "d", progress=progress, threads=1)
    assert not (tmp_path / "d").exists()


def test_two_copies_at_once(tmp_path):
    dtckpt.save(tmp_path / "s", state(1))
    refused = []

    def progress(*_):
        if not refused:
            refused.append(True)
            with pytest.raises(errors.CheckpointConflictError, match="another process is copying"):
                dtckpt.copy(tmp_path / "s", tmp_path / "d")

    dtckpt.copy(tmp_path / "s", tmp_path / "d", progress=progress, threads=1)
    assert refused
    assert is_equal(tmp_path / "s", tmp_path / "d")


# --- links --------------------------------------------------------------------------------------------------------


def inodes(folder):
    return {file.relative_to(folder): file.stat().st_ino for file in files_in(folder)}


@pytest.mark.parametrize("is_cut", [False, True])
def test_hard_links_stay_hard_links(tmp_path, is_cut):
    save_steps(tmp_path / "run", [1])
    for step in (2, 3):
        link_copy(step_folder(tmp_path / "run", 1), step_folder(tmp_path / "run", step))
    if is_cut:
        dtckpt.copy(tmp_path / "run", tmp_path / "d", steps=[1], keep_links=True)
    report = dtckpt.copy(tmp_path / "run", tmp_path / "d", keep_links=True)
    first, *others = (inodes(step_folder(tmp_path / "d", step)) for step in (1, 2, 3))
    manifest = {file for file in first if file.name == "dtckpt.manifest"}
    for other in others:
        assert {file for file in first if first[file] != other[file]} == manifest
    assert [each.num_linked for each in report.checkpoints[1:]] == [len(first) - 1] * 2
    dtckpt.copy(tmp_path / "run", tmp_path / "apart")
    assert not set(inodes(step_folder(tmp_path / "apart", 1)).values()) & set(
        inodes(step_folder(tmp_path / "apart", 2)).values()
    )


def test_a_damaged_copy_is_not_linked_to(tmp_path):
    save_steps(tmp_path / "run", [1])
    link_copy(step_folder(tmp_path / "run", 1), step_folder(tmp_path / "run", 2))
    dtckpt.copy(tmp_path / "run", tmp_path / "d", steps=[1])
    file = max(files_in(step_folder(tmp_path / "d", 1)), key=lambda file: file.stat().st_size)
    flip(file, 500)
    dtckpt.copy(tmp_path / "run", tmp_path / "d", keep_links=True)
    assert is_step(step_folder(tmp_path / "d", 2), 2 - 1)
    assert is_equal(step_folder(tmp_path / "run", 2), step_folder(tmp_path / "d", 2))


def test_another_file_that_has_the_inode_now(tmp_path):
    """A job removes steps and saves others while they are copied, and file systems use inodes again."""
    run, copies = save_steps(tmp_path / "run", [1], "zarr"), tmp_path / "copies"
    save_steps(tmp_path / "other", [7], "zarr")
    first, second = step_folder(run, 1), step_folder(run, 2)
    link_copy(first, second)
    name = max(files_in(first), key=lambda file: file.stat().st_size).relative_to(first)
    inode, replaced = (first / name).stat().st_ino, []

    def replace(_):
        if not replaced:
            replaced.append(True)
            (tmp_path / "again").hardlink_to(first / name)
            shutil.rmtree(first)
            shutil.rmtree(second)
            step_folder(tmp_path / "other", 7).rename(second)
            (tmp_path / "again").write_bytes((second / name).read_bytes())
            (tmp_path / "again").replace(second / name)
            assert (second / name).stat().st_ino == inode

    dtckpt.copy(run, copies, keep_links=True, copied=replace)
    assert is_step(step_folder(copies, 1), 1)
    assert is_step(step_folder(copies, 2), 7)


def test_links_of_a_prepared_root_lead_nowhere(tmp_path):
    save_steps(tmp_path / "run", [1])
    (tmp_path / "secret").write_text("secret")
    step = step_folder(tmp_path / "run", 1)
    (step / "note").symlink_to(tmp_path / "secret")
    (step / "more").symlink_to(tmp_path)
    dtckpt.copy(tmp_path / "run", tmp_path / "d")
    assert not any("secret" in file.read_text(errors="replace") for file in files_in(tmp_path / "d"))
    file = max(files_in(step), key=lambda file: file.stat().st_size)
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    report = dtckpt.copy(tmp_path / "run", tmp_path / "e")
    assert "is missing, or is a link" in report.failed[0].failure


def test_the_rate_is_bounded():
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    limit = RateLimit(1000.0, lambda: now[0], sleep)
    for _ in range(5):
        limit.take(500)
    assert now[0] == pytest.approx(102.0)
    now[0] += 60  # time that was not used is not saved up
    limit.take(500)
    limit.take(500)
    assert now[0] == pytest.approx(162.5)
    RateLimit(None, lambda: 0.0, sleep).take(1 << 60)
    assert len(slept) == 5
