"""Files of samples are replaced between the opening and the reads: no tensor has other elements than before."""

import json
import os

import pytest
import safetensors.torch
import tensorstore as ts
import torch

import dtckpt
from dtckpt import errors
from dtckpt.checkpoint.foreign import safetensors_files

from .sample_files import copied_sample, facts, read_all, sample_names


def in_place(file, data):
    status = os.stat(file)
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def renamed(file, data):
    """Put another file in its place, which has the same times."""
    status = os.stat(file)
    draft = file.with_name("draft")
    draft.write_bytes(data)
    os.utime(draft, ns=(status.st_atime_ns, status.st_mtime_ns))
    draft.rename(file)


CHANGES = (
    (in_place, lambda data: bytes(byte ^ 0x55 for byte in data)),
    (renamed, lambda data: bytes(byte ^ 0x55 for byte in data)),
    (renamed, lambda data: data[: len(data) // 2]),
    (in_place, lambda data: data + data[:64]),
)


def changed_files(path, files):
    """Replace each file of a checkpoint while it is open; return the files that reads named as replaced."""
    whole = read_all(path)
    told = set()
    for number, file in enumerate(files):
        replace, change = CHANGES[number % len(CHANGES)]
        data = file.read_bytes()
        with dtckpt.open_checkpoint(path) as checkpoint:
            replace(file, change(data))
            for name, wanted in whole.items():
                try:
                    assert facts(checkpoint.read(name)) == wanted, file
                except errors.CheckpointConflictError as error:
                    told |= {file} if f"{file.name} was " in error.message else set()
        in_place(file, data)
    return told


@pytest.mark.share(3)
@pytest.mark.parametrize("name", sample_names())
def test_a_file_is_replaced_after_the_opening(name, tmp_path):
    root, path = copied_sample(name, tmp_path / "copy")
    files = sorted(file for file in root.rglob("*") if file.is_file())
    told = changed_files(path, [*files[:12], *files[12::7]])
    # Small arrays of a database are in its nodes, which are read when it is opened.
    assert told or name.startswith("orbax/")


def write_database(path, tensors):
    """Write tensors as Orbax does, in a database, with values that are too large for its nodes."""
    safetensors.torch.save_file(tensors, path.with_name("source.safetensors"))
    plain = path.with_name("plain")
    dtckpt.convert(path.with_name("source.safetensors"), plain, to="orbax")
    path.mkdir()
    metadata = json.loads((plain / "_METADATA").read_text()) | {"use_ocdbt": True}
    (path / "_METADATA").write_text(json.dumps(metadata))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    for file in plain.rglob("*"):
        if file.is_file() and file.parent != plain:
            store[str(file.relative_to(plain))] = file.read_bytes()


def test_a_data_file_of_a_database(tmp_path):
    write_database(tmp_path / "orbax", {"w": torch.rand(64, 64)})
    files = sorted((tmp_path / "orbax").glob("d/*"))
    assert len(files) > 1
    assert changed_files(tmp_path / "orbax", files)


def test_a_chunk_file_is_added_or_removed(tmp_path):
    """A chunk of Orbax that is not stored is made of zeros."""
    _, path = copied_sample("orbax/v0_plain_zarr2_mesh2x2", tmp_path / "copy")
    metadata = json.loads((path / "_METADATA").read_text()) | {"store_array_data_equal_to_fill_value": False}
    (path / "_METADATA").write_text(json.dumps(metadata))
    for document in path.glob("*/.zarray"):
        document.write_text(json.dumps(json.loads(document.read_text()) | {"fill_value": 0}))
    with dtckpt.open_checkpoint(path) as checkpoint:
        name = next(name for name, info in checkpoint.tensors.items() if info.num_chunks > 1)
        wanted = facts(checkpoint.read(name))
        chunk = path / checkpoint.tensors[name].chunks[0].key
        data = chunk.read_bytes()
        chunk.unlink()
        with pytest.raises(errors.CheckpointConflictError, match=f"{chunk.name} was removed"):
            checkpoint.read(name)
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert facts(checkpoint.read(name)) != wanted
        chunk.write_bytes(data)
        with pytest.raises(errors.CheckpointConflictError, match=f"{chunk.name} was added"):
            checkpoint.read(name)


def test_a_file_is_replaced_during_the_opening(tmp_path, monkeypatch):
    """The header of one file never describes the elements of another file."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    safetensors.torch.save_file({"c": torch.zeros(4), "d": torch.ones(4)}, tmp_path / "other")
    read_header = safetensors_files.read_header

    def read_and_replace(folder, file):
        header = read_header(folder, file)
        (tmp_path / "other").rename(path)
        return header

    monkeypatch.setattr(safetensors_files, "read_header", read_and_replace)
    with pytest.raises(errors.CheckpointConflictError, match=r"model\.safetensors was replaced or changed"):
        dtckpt.open_checkpoint(path)
    monkeypatch.undo()
    assert read_all(path).keys() == {"c", "d"}
