"""`LocalFolder`: files in a directory that other processes write to."""

import os
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
