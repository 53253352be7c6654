"""A process may remove files of a host's folder that no live process has filled."""

import subprocess
import sys

import pytest

from dtckpt.checkpoint.parts import host_folder
from dtckpt.checkpoint.parts.host_folder import HostFolder, PartFile
from dtckpt.checkpoint.parts.records import PartIndex, SaveId

FILLS = """
import sys
from pathlib import Path
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
folder = HostFolder(Path(sys.argv[1]), "root", host="here")
folder.make()
spare = folder.take(8)
for number in (1, 3):
    save, file = SaveId(number, 1, 1, False, "00000000"), folder.take(8)
    index = PartIndex(save, 0, 8, b"{}", (), (), {}, ())
    folder.put(file, index, index.to_bytes(), is_voted=True)
print("filled", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path):
    made = HostFolder(tmp_path, "root", host="here")
    made.make()
    yield made
    made.close()


def filled(folder, number):
    save, file = SaveId(number, 1, 1, False, "00000000"), folder.take(8)
    index = PartIndex(save, 0, 8, b"{}", (), (), {}, ())
    folder.put(file, index, index.to_bytes(), is_voted=True)
    return save


def numbers(folder):
    return sorted(save.number for save in folder.parts().voted)


def spare(folder):
    return sorted(path.name for path in (folder.path / "spare").iterdir())


def remove_from_the_dead(folder, **options):
    folder.remove_spare_of_the_dead()
    folder.remove_saves_of_the_dead(**options)


def test_files_of_a_process_stay_as_long_as_it_lives(folder, tmp_path):
    """As other containers of the host see it, too: these may have other numbers of processes."""
    mine, own = folder.take(8), filled(folder, 2)
    process = subprocess.Popen(
        [sys.executable, "-c", FILLS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "filled\n"
        assert len(spare(folder)) == 2
        other = HostFolder(tmp_path, "root", host="here")
        remove_from_the_dead(other)
        assert (numbers(folder), len(spare(folder))) == ([1, 2, 3], 2)
    finally:
        process.kill()
        process.communicate()
    remove_from_the_dead(other, before=3)
    assert (numbers(folder), spare(folder)) == ([2, 3], [mine.path.name])
    remove_from_the_dead(folder)
    assert numbers(folder) == [own.number]


def test_a_file_is_free_when_its_process_is_not_alone_with_the_save(folder, tmp_path):
    """One of two clients of a save is gone: the save stays for the other one."""
    save = filled(folder, 1)
    (folder.path / save.name / "1.data").write_bytes(bytes(8))
    remove_from_the_dead(HostFolder(tmp_path, "root", host="here"))
    assert numbers(folder) == [1]


def test_a_new_file_is_not_taken_for_one_of_the_dead(folder, monkeypatch):
    """Another process looks at it before it is locked."""
    new_file, made = host_folder.LocalFolder.new_file, []

    def seen(self, name):
        made.append(new_file(self, name))
        if len(made) == 1:
            folder.remove_spare_of_the_dead()
        return made[-1]

    monkeypatch.setattr(host_folder.LocalFolder, "new_file", seen)
    assert folder.take(8).is_whole()
    assert len(made) == 2


def test_a_process_that_closes_the_folder_first(folder, tmp_path):
    """Then there is no ``spare``: the files of the others go all the same."""
    save, other = filled(folder, 1), HostFolder(tmp_path, "root", host="here")
    other.make()
    second = filled(other, 2)
    (folder.path / "spare").rmdir()
    folder.remove(save, 0)
    folder.remove_if_empty()
    assert numbers(other) == [second.number]
    other.remove(second, 0)
    other.close()
    other.remove_if_empty()
    assert not folder.path.exists()


def test_a_file_system_without_locks(folder, monkeypatch):
    """On such a file system the owner of the files is unknown, so they stay."""

    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(host_folder.fcntl, "flock", refuse)
    assert isinstance(folder.take(8), PartFile)
    save = filled(folder, 1)
    remove_from_the_dead(folder)
    assert (numbers(folder), len(spare(folder))) == ([save.number], 1)
