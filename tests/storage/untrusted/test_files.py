"""Untrusted files: a fifo, a device, or a file of any length neither hangs a reader nor fills its memory."""

import os
import shutil
import socket

import pytest

import dtckpt
from dtckpt import SaveOptions
from dtckpt.cli.main import main
from dtckpt.errors import StoragePermissionError
from dtckpt.format.manifest import MANIFEST_NAME

from .untrusted_checkpoints import (
    ELEMENTS,
    TB,
    assert_damaged,
    error_of,
    limit_memory,
    ways_to_read,
)


def fifo(path):
    os.mkfifo(path)


def linked_fifo(path):
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def folder(path):
    path.mkdir()


def device(path):
    path.symlink_to("/dev/zero")


def terminal(path):
    path.symlink_to("/dev/ptmx")


def loop(path):
    path.symlink_to(path.name)


def bound_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


KINDS = [fifo, linked_fifo, folder, device, terminal, loop, bound_socket]


def data_files(path):
    """Files that hold chunks, and files that lead to them."""
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and file.name not in (MANIFEST_NAME, "zarr.json", "dtckpt.blocks", "metrics.json")
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_file_of_another_kind_is_damage(saved, kind):
    for file in data_files(saved):
        if file.stat().st_size < 100 and "c" in file.parts:
            continue
        kept = file.read_bytes()
        file.unlink()
        kind(file)
        tensor = file.relative_to(saved).parts[0] if "c" in file.parts else "w"
        for name, work in ways_to_read(saved).items():
            if name != "rows" or tensor == "w":
                assert_damaged(work)
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
        file.with_name("elsewhere").unlink(missing_ok=True)
        file.write_bytes(kept)
    assert all(error_of(work) is None for work in ways_to_read(saved).values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not loop], ids=lambda kind: kind.__name__)
def test_a_manifest_of_another_kind_is_damage(saved, kind):
    (saved / MANIFEST_NAME).unlink()
    kind(saved / MANIFEST_NAME)
    for work in ways_to_read(saved).values():
        assert_damaged(work)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_digests_of_blocks_of_another_kind_are_damage(saved, kind):
    blocks = saved / "client_0" / "dtckpt.blocks"
    blocks.unlink()
    kind(blocks)
    work = ways_to_read(saved)
    assert_damaged(work["rows"])
    assert_damaged(work["verify"])
    assert error_of(work["restore"]) is None


def test_a_client_s_folder_may_be_a_fifo(saved):
    shutil.rmtree(saved / "client_0")
    os.mkfifo(saved / "client_0")
    work = ways_to_read(saved)
    assert_damaged(work["rows"])
    assert_damaged(work["verify"])


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_document_of_another_kind_is_damage(saved, kind):
    (saved / "w" / "zarr.json").unlink()
    kind(saved / "w" / "zarr.json")
    assert_damaged(ways_to_read(saved)["verify"])
    assert error_of(ways_to_read(saved)["restore"]) is None


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
def test_fsspec_s_folders_are_read_with_the_same_care(tmp_path, kvstore):
    dtckpt.save(f"local://{tmp_path}/run/s", {"w": ELEMENTS}, options=SaveOptions(kvstore="zarr"))
    (chunk,) = (tmp_path / "run").rglob("c/0")
    chunk.unlink()
    os.mkfifo(chunk)
    assert_damaged(lambda: dtckpt.restore(f"local://{tmp_path}/run/s"))
    (manifest,) = (tmp_path / "run").rglob(MANIFEST_NAME)
    os.truncate(manifest, 10 * TB)
    with limit_memory(1 << 30):
        assert_damaged(lambda: dtckpt.restore(f"local://{tmp_path}/run/s"))


def test_what_may_not_be_read_is_no_damage(saved, monkeypatch):
    def denied(path, *rest, **more):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", denied)
    assert type(error_of(lambda: dtckpt.restore(saved))) is StoragePermissionError


def test_the_command_line_tells_damage_by_its_exit_code(saved, capsys):
    (saved / MANIFEST_NAME).unlink()
    os.mkfifo(saved / MANIFEST_NAME)
    for command in (["verify"], ["inspect"], ["reshard", "--mesh", "x=1"]):
        target = [str(saved.with_name("other"))] * (command[0] == "reshard")
        assert main([command[0], str(saved), *target, *command[1:]]) == 1
        assert "is a fifo" in capsys.readouterr().err


def test_long_files_are_not_read(saved, kvstore):
    for file in [saved / MANIFEST_NAME, *([saved / "manifest.ocdbt"] if kvstore == "ocdbt" else [])]:
        kept = file.stat().st_size
        os.truncate(file, 10 * TB)
        with limit_memory(1 << 30):
            for work in ways_to_read(saved).values():
                assert_damaged(work)
        os.truncate(file, kept)
    assert error_of(ways_to_read(saved)["restore"]) is None


@pytest.mark.parametrize("kvstore", ["zarr"], indirect=True)
def test_more_than_a_chunk_is_not_read(saved):
    os.truncate(saved / "small" / "c" / "0", 10 * TB)
    os.truncate(saved / "w" / "zarr.json", 10 * TB)
    with limit_memory(1 << 30):
        assert dtckpt.restore(saved)["small"].equal(ELEMENTS)
        assert_damaged(ways_to_read(saved)["verify"])
