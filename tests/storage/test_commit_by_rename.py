"""The commit by rename: directories appear whole or not at all, at whatever change a save is interrupted."""

import contextlib
import errno
import os
from contextlib import contextmanager

import pytest

from dtckpt.errors import (
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
)
from dtckpt.storage import commit_by_rename, local_folder
from dtckpt.storage.commit_by_rename import DirectoryTarget
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.failures import translate_errors

OLD, NEW = b"old", b"new"


def build(target, content=NEW, token="1"):
    staging = commit_by_rename.begin(target, token)
    (staging.path / "data").write_bytes(content)
    (staging.path / commit_by_rename.MANIFEST_NAME).write_bytes(content)
    return staging


def committed(target, content=OLD):
    commit_by_rename.commit(build(target, content, "0"), overwrite=True)
    return target


def content_of(target):
    return (commit_by_rename.locate(target) / "data").read_bytes()


@pytest.fixture(params=["exchange", "two renames"])
def file_system(request, monkeypatch):
    """With and without an atomic exchange of directories."""
    if request.param == "exchange":
        return
    rename = commit_by_rename.rename

    def no_exchange(source, target, flag=0):
        if flag == commit_by_rename.EXCHANGE:
            raise OSError(errno.EINVAL, "no exchange here", str(target))
        rename(source, target, flag)

    monkeypatch.setattr(commit_by_rename, "rename", no_exchange)


def test_nothing_shows_before_the_commit(tmp_path):
    target = tmp_path / "deep" / "s"
    staging = build(target)
    assert not target.exists()
    with pytest.raises(CheckpointNotFoundError, match="a save to it did not complete"):
        commit_by_rename.locate(target)
    commit_by_rename.commit(staging, overwrite=False)
    assert content_of(target) == NEW
    assert os.listdir(target.parent) == ["s"]


def test_a_replaced_checkpoint_is_there_until_the_commit(tmp_path, file_system):
    target = committed(tmp_path / "s")
    staging = build(target)
    assert content_of(target) == OLD
    commit_by_rename.commit(staging, overwrite=True)
    assert content_of(target) == NEW
    assert os.listdir(tmp_path) == ["s"]


class Crash(BaseException):
    """Ends a process at one point, as far as the files are concerned."""


def crash_at(monkeypatch, number):
    """Let ``number`` changes of the directory tree happen, then crash; return how often it was changed."""
    count = [0]

    def counting(function):
        def change(*args, **kwargs):
            if count[0] == number:
                raise Crash
            count[0] += 1
            return function(*args, **kwargs)

        return change

    monkeypatch.setattr(commit_by_rename, "rename", counting(commit_by_rename.rename))
    monkeypatch.setattr(local_folder.os, "unlink", counting(local_folder.os.unlink))
    monkeypatch.setattr(local_folder.shutil, "rmtree", counting(local_folder.shutil.rmtree))
    return count


def test_a_crash_at_any_change_leaves_the_old_or_the_new(tmp_path, file_system):
    seen = set()
    for number in range(20):
        target = committed(tmp_path / str(number) / "s")
        with pytest.MonkeyPatch.context() as patch:
            count = crash_at(patch, number)
            with contextlib.suppress(Crash):
                commit_by_rename.commit(build(target), overwrite=True)
        seen.add(content_of(target))
        if count[0] < number:
            break
        with pytest.raises(CheckpointExistsError):
            commit_by_rename.check_target(target, overwrite=False)
        # The next attempt cleans up.
        commit_by_rename.commit(build(target, b"newer", "2"), overwrite=True)
        assert content_of(target) == b"newer"
        assert os.listdir(target.parent) == ["s"]
    else:
        pytest.fail("commit never came to its end")
    assert seen == {OLD, NEW}
    assert number > 3


def test_the_newest_attempt_owns_the_target(tmp_path):
    target = tmp_path / "s"
    zombie = build(target, b"zombie", "1")
    staging = build(target, NEW, "2")
    with pytest.raises(StorageError, match="another attempt saves to this path"):
        commit_by_rename.commit(zombie, overwrite=True)
    commit_by_rename.commit(staging, overwrite=False)
    assert content_of(target) == NEW


def test_a_newer_attempt_is_left_alone_while_it_lives(tmp_path):
    """An attempt that froze before it began is the last to begin, and yet not the newest."""
    target = tmp_path / "s"
    newer = build(target, NEW, "10-a")
    with lock_directory(newer.path):
        for token in ("9-b", "0-b"):
            with pytest.raises(StorageError, match="another attempt saves to this path, and took over"):
                commit_by_rename.begin(target, token)
        assert commit_by_rename.is_own(newer)
    commit_by_rename.begin(target, "9-b")
    assert not newer.path.exists()


def test_what_nobody_can_have_locked_does_not_live(tmp_path):
    stray = tmp_path / ".s.dtckpt-new-10-a"
    stray.write_bytes(b"a file")
    assert commit_by_rename.begin(tmp_path / "s", "9-b").path.is_dir()
    assert not stray.exists()


@pytest.mark.parametrize("token", ["10-b", "11-b"])
def test_an_attempt_that_is_not_newer_is_taken_away_although_it_lives(tmp_path, token):
    older = build(tmp_path / "s", NEW, "10-a")
    with lock_directory(older.path):
        commit_by_rename.begin(tmp_path / "s", token)
    assert not older.path.exists()


def test_something_that_took_the_target_meanwhile(tmp_path):
    target = tmp_path / "s"
    staging = build(target)
    target.mkdir()
    (target / "photo").write_bytes(b"x")
    with pytest.raises(CheckpointExistsError):
        commit_by_rename.commit(staging, overwrite=True)
    assert (target / "photo").read_bytes() == b"x"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_file_systems_without_renameat2(tmp_path, monkeypatch, code):
    class Lib:
        @staticmethod
        def renameat2(*_):
            local_folder.ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(local_folder.ctypes, "CDLL", lambda *args, **kwargs: Lib)
    target = tmp_path / "s"
    commit_by_rename.commit(build(target, OLD, "0"), overwrite=False)
    assert content_of(target) == OLD
    commit_by_rename.commit(build(target, NEW, "1"), overwrite=True)
    assert content_of(target) == NEW
    assert os.listdir(tmp_path) == ["s"]


def test_where_there_is_nothing(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        commit_by_rename.locate(tmp_path / "none" / "s")
    (tmp_path / "s").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        commit_by_rename.locate(tmp_path / "s")
    (tmp_path / "s" / "data").write_bytes(b"")
    with pytest.raises(CheckpointIncompleteError):
        commit_by_rename.locate(tmp_path / "s")


def test_other_checkpoints_nearby_are_left_alone(tmp_path):
    for name in ("s", "s.dtckpt-new-1", "t", ".s", "s2"):
        committed(tmp_path / name)
    build(tmp_path / "t", token="7")
    committed(tmp_path / "s", NEW)
    assert content_of(tmp_path / "t") == OLD
    assert (tmp_path / ".t.dtckpt-new-7").exists()
    assert content_of(tmp_path / ".s") == content_of(tmp_path / "s.dtckpt-new-1") == OLD


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageFullError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), StorageFullError),
        (OSError(errno.EACCES, "Permission denied"), StoragePermissionError),
        (OSError(errno.EPERM, "Operation not permitted"), StoragePermissionError),
        (OSError(errno.EROFS, "Read-only file system"), StoragePermissionError),
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (ValueError("FAILED_PRECONDITION: No space left on device [OS error 28]"), StorageFullError),
        (ValueError("RESOURCE_EXHAUSTED: Disk quota exceeded"), StorageFullError),
        (ValueError("PERMISSION_DENIED: Failed to open"), StoragePermissionError),
        (ValueError("UNAVAILABLE: try again"), StorageError),
        (NotImplementedError("no"), StorageError),
    ],
)
def test_what_storage_says_in_our_words(raised, error):
    with (
        pytest.raises(error, match=r"^cannot write chunk 3 at /x: ") as caught,
        translate_errors("write chunk 3", "/x"),
    ):
        raise raised
    assert type(caught.value) is error
    assert caught.value.__cause__ is raised


@contextmanager
def kept_open(staging):
    """Hold a directory open, as `DirectoryAttempt` does: else a new directory may get the same inode."""
    descriptor = os.open(staging.path, os.O_RDONLY | os.O_DIRECTORY)
    yield
    os.close(descriptor)


def late(staging):
    """Do what a writer of an attempt that was given up may still do: make its directory again, and fill it."""
    staging.path.mkdir(exist_ok=True)
    (staging.path / commit_by_rename.MANIFEST_NAME).write_bytes(b"late")


def test_a_directory_made_anew_by_a_late_writer_is_not_committed(tmp_path, file_system):
    target = committed(tmp_path / "s")
    zombie = build(target, b"zombie", "1")
    with kept_open(zombie):
        staging = build(target, NEW, "2")
        late(zombie)
        with pytest.raises(StorageError, match="another attempt saves to this path"):
            commit_by_rename.commit(zombie, overwrite=True)
    assert content_of(target) == OLD
    commit_by_rename.commit(staging, overwrite=True)
    assert content_of(target) == NEW


def test_an_attempt_taken_over_between_check_and_exchange_puts_the_old_one_back(tmp_path, file_system, monkeypatch):
    target = committed(tmp_path / "s")
    zombie = build(target, b"zombie", "1")
    validate = commit_by_rename._validate_own
    calls = []

    def validate_then_lose(staging, path):
        validate(staging, path)
        if not calls:
            calls.append(build(target, NEW, "2"))
            late(zombie)

    monkeypatch.setattr(commit_by_rename, "_validate_own", validate_then_lose)
    with kept_open(zombie), pytest.raises(StorageError, match="another attempt saves to this path"):
        commit_by_rename.commit(zombie, overwrite=True)
    assert content_of(target) == OLD
    commit_by_rename.commit(calls[0], overwrite=True)
    assert content_of(target) == NEW


@pytest.mark.parametrize("is_replacing", [False, True])
def test_of_two_attempts_that_commit_at_one_time_the_last_one_stays(tmp_path, monkeypatch, is_replacing):
    target = committed(tmp_path / "s") if is_replacing else tmp_path / "s"
    first, second = (commit_by_rename.begin_shared(target, token) for token in "12")
    for each, content in ((first, b"first"), (second, b"second")):
        for name in ("data", commit_by_rename.MANIFEST_NAME):
            (each.path / name).write_bytes(content)
    rename, left = commit_by_rename.rename, [second]

    def renamed(source, to, flags=0):
        rename(source, to, flags)
        if left and source == first.path:
            commit_by_rename.commit(left.pop(), overwrite=True)

    monkeypatch.setattr(commit_by_rename, "rename", renamed)
    with pytest.raises(StorageError, match="another attempt saves to this path"):
        commit_by_rename.commit(first, overwrite=True)
    assert content_of(target) == b"second"


def test_a_removed_checkpoint_stays_removed(tmp_path, monkeypatch):
    target = committed(tmp_path / "s")
    with monkeypatch.context() as patch:
        # The writer dies when the new checkpoint stands, before the old one is deleted.
        patch.setattr(local_folder.shutil, "rmtree", lambda *args, **kwargs: None)
        commit_by_rename.commit(build(target), overwrite=True)
    local_folder.shutil.rmtree(target)
    with pytest.raises(CheckpointNotFoundError):
        commit_by_rename.locate(target)
    commit_by_rename.check_target(target, overwrite=False)
    commit_by_rename.commit(build(target, b"newer", "2"), overwrite=False)
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("name", [".s.dtckpt-new-1", ".s.dtckpt-old-1", ".s.dtckpt-trash-1"])
def test_names_of_working_directories_are_no_targets(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be a checkpoint"):
        commit_by_rename.validate_name(tmp_path / name)


def test_a_directory_that_cannot_be_looked_at_hides_no_other_error(tmp_path, monkeypatch, caplog):
    staging = build(tmp_path / "s")

    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(commit_by_rename, "inode_of", fail)
    commit_by_rename.abandon(staging)
    commit_by_rename.sweep(staging.path, staging.target, staging.inode)
    assert [record.message.partition(": ")[0] for record in caplog.records] == [f"cannot take away {staging.path}"] * 2


def test_a_directory_that_cannot_be_read_is_not_taken_for_synced(tmp_path, monkeypatch):
    staging, scandir = build(tmp_path / "s"), os.scandir
    (staging.path / "below").mkdir()

    def fail(path):
        if str(path).endswith("below"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        commit_by_rename.commit(staging, overwrite=False)
    assert not staging.target.exists()


def test_what_late_writes_make_anew_is_swept_though_the_inode_of_what_was_there_is_free_again(tmp_path):
    target = DirectoryTarget(tmp_path / "s")
    led = target.begin("1")
    joined = target.join("1")
    led.abandon()
    del led
    directory = joined.folder.path
    directory.mkdir()
    joined.sweep()
    assert list(tmp_path.iterdir()) == []
