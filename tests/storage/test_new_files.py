"""New files appear at their path in one step, also where the file system lacks `renameat2`."""

import ctypes
import errno
import os

import pytest

from dtckpt.errors import CheckpointExistsError, StorageError
from dtckpt.storage import local_folder
from dtckpt.storage.new_files import check_new, new_files


@pytest.fixture(params=[None, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP], ids=["renameat2", "38", "22", "95"])
def lacks_renameat2(request, monkeypatch):
    if request.param is None:
        return False

    class Lib:
        @staticmethod
        def renameat2(*_):
            ctypes.set_errno(request.param)
            return -1

    monkeypatch.setattr(local_folder.ctypes, "CDLL", lambda *args, **kwargs: Lib)
    return True


def put(target, text, *, is_file):
    with new_files(target, lambda: None, is_file=is_file) as folder:
        (folder / (target.name if is_file else "data")).write_text(text)
        assert sorted(os.listdir(target.parent)) in ([folder.name], [folder.name, target.name])


def test_files(tmp_path, lacks_renameat2):
    target = tmp_path / "a" / "b" / "file"
    for text in ("one", "two"):
        put(target, text, is_file=True)
        assert target.read_text() == text
    assert os.listdir(target.parent) == ["file"]


def test_directories(tmp_path, lacks_renameat2):
    target = tmp_path / "folder"
    put(target, "one", is_file=False)
    if lacks_renameat2:
        with pytest.raises(StorageError, match="cannot be replaced in one step"):
            put(target, "two", is_file=False)
        assert (target / "data").read_text() == "one"
    else:
        put(target, "two", is_file=False)
        assert (target / "data").read_text() == "two"
    assert os.listdir(tmp_path) == ["folder"]


def test_what_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "file"

    def check():
        check_new(target, lambda path: path.name == "own", is_file=True, overwrite=False)

    def put_late():
        with new_files(target, check, is_file=True) as folder:
            (folder / "file").write_text("new")
            target.write_text("old")

    with pytest.raises(CheckpointExistsError):
        put_late()
    assert target.read_text() == "old"
    with pytest.raises(ZeroDivisionError), new_files(tmp_path / "x", check, is_file=True):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["file"]


def test_what_may_be_replaced(tmp_path):
    def allows(target, *, is_file, overwrite=True):
        try:
            check_new(target, lambda path: path.name.startswith("own"), is_file=is_file, overwrite=overwrite)
        except CheckpointExistsError:
            return False
        return True

    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.touch()
    assert allows(tmp_path / "none", is_file=True, overwrite=False)
    assert allows(folder, is_file=False, overwrite=False)
    assert not allows(folder, is_file=True)
    assert allows(file, is_file=True)
    assert not allows(file, is_file=True, overwrite=False)
    assert not allows(file, is_file=False)
    (folder / "own 1").touch()
    assert allows(folder, is_file=False)
    assert not allows(folder, is_file=False, overwrite=False)
    (folder / "other").touch()
    assert not allows(folder, is_file=False)
