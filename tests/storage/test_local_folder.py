"""`LocalFolder`: files in a directory that other processes write to."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from dtckpt.storage import local_folder
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.local_folder import LocalFolder


@pytest.fixture
def replaced_before_open(monkeypatch):
    """Return a function that lets a longer file take a file's place just before the next open of it."""
    real = os.open

    def arm(path: Path, data: bytes) -> None:
        def replacing(name, *args, **kwargs):
            if name == str(path) and not Path(f"{path}.new").exists():
                Path(f"{path}.new").write_bytes(data)
                os.replace(f"{path}.new", path)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(os, "open", replacing)

    return arm


@pytest.mark.parametrize("read", [lambda folder: folder.read("f"), lambda folder: folder.read_whole("f", 100)])
def test_file_that_is_replaced_amid_a_read_is_read_whole(tmp_path, replaced_before_open, read):
    (tmp_path / "f").write_bytes(b"short")
    replaced_before_open(tmp_path / "f", b"longer than before")
    assert read(LocalFolder(tmp_path)) == b"longer than before"


def test_bound_is_that_of_the_file_that_is_open(tmp_path, replaced_before_open):
    (tmp_path / "f").write_bytes(b"short")
    replaced_before_open(tmp_path / "f", b"longer than before")
    with pytest.raises(MalformedError, match="f is too long: it has more than 10 bytes"):
        LocalFolder(tmp_path).read_whole("f", 10)


def test_fifo_that_takes_a_files_place_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"short")
    real = os.open

    def replacing(name, *args, **kwargs):
        os.unlink(name)
        os.mkfifo(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", replacing)
    with pytest.raises(MalformedError, match="is a fifo, expected a file"):
        LocalFolder(tmp_path).read("f")


def test_readers_find_the_former_content_or_the_new_one(tmp_path, monkeypatch):
    """A write that fails halfway leaves the former content, and its draft does not disturb the next one."""
    folder = LocalFolder(tmp_path)
    folder.replace(".f", b"one")
    real = local_folder._fill

    def half(descriptor, data):
        real(descriptor, data[:1])
        raise OSError("no space")

    monkeypatch.setattr(local_folder, "_fill", half)
    with pytest.raises(OSError, match="no space"):
        folder.replace(".f", b"two")
    assert folder.read(".f") == b"one"
    monkeypatch.undo()
    folder.replace(".f", b"three")
    assert folder.read(".f") == b"three"
    assert [path.name for path in tmp_path.iterdir()] == [".f"]


# --- files that two directories share ---


@pytest.fixture
def pair(tmp_path):
    """Two directories; the first has files at two depths."""
    (tmp_path / "a" / "x" / "y").mkdir(parents=True)
    (tmp_path / "a" / "x" / "f").write_bytes(b"one")
    (tmp_path / "a" / "x" / "y" / "g").write_bytes(b"three")
    (tmp_path / "b").mkdir()
    return LocalFolder(tmp_path / "a"), LocalFolder(tmp_path, "b")


def test_a_shared_file_has_two_names(pair):
    source, target = pair
    assert target.share(source, {"x/f": 3, "x/y/g": 5})
    assert target.share(source, {"x/f": 3})  # again, as another client may
    for name in ("x/f", "x/y/g"):
        assert os.path.samefile(source.path / name, target.path / name)
    target.write("x/f", b"other")
    target.replace("x/y/g", b"other")
    assert source.read("x/f") == b"one"
    assert source.read("x/y/g") == b"three"


@pytest.mark.parametrize("with_copy_range", [True, False])
def test_a_file_that_cannot_be_linked_is_copied(pair, monkeypatch, with_copy_range):
    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(os, "link", refuse)
    if not with_copy_range:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    source, target = pair
    assert target.share(source, {"x/f": 3, "x/y/g": 5})
    assert not os.path.samefile(source.path / "x/f", target.path / "x/f")
    assert target.read("x/y/g") == b"three"
    assert sorted(os.listdir(target.path / "x")) == ["f", "y"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("f", path)])
def test_only_regular_files_are_shared(pair, make):
    source, target = pair
    make(source.path / "x" / "odd")
    with pytest.raises(MalformedError, match="odd is no file of at least 0 bytes"):
        target.share(source, {"x/odd": 0})
    with pytest.raises(MalformedError, match="f is no file of at least 4 bytes"):
        target.share(source, {"x/f": 4})
    with pytest.raises(FileNotFoundError):
        target.share(source, {"x/gone": 0})


def test_no_link_leads_out_of_the_target(pair, tmp_path):
    source, target = pair
    (tmp_path / "elsewhere").mkdir()
    (target.path / "x").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        target.share(source, {"x/f": 3})
    assert not os.listdir(tmp_path / "elsewhere")


def test_a_held_directory_stays_the_same_whatever_has_its_name(pair, tmp_path):
    source, target = pair
    held = source.hold()
    os.rename(source.path, tmp_path / "aside")
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "a" / "x" / "f").write_bytes(b"another")
    assert held.read("x/f") == (held / "x").read("f") == b"one"
    assert target.share(held, {"x/f": 3})
    assert str(held / "x") == str(tmp_path / "a" / "x")
    inner = held / "x"
    del held
    assert inner.read("f") == b"one"
    descriptors = len(os.listdir("/proc/self/fd"))
    del inner
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    shutil.rmtree(tmp_path / "aside")
