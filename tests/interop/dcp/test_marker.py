"""The file ``.metadata``, by which programs find checkpoints of DCP, in checkpoints that the plug-in has saved."""

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

import dtckpt
from dtckpt.checkpoint.converting.convert import convert
from dtckpt.checkpoint.foreign.dcp_metadata import OWN_MARKER
from dtckpt.errors import CheckpointExistsError, CheckpointIncompleteError, StorageError
from dtckpt.format.names import DCP_METADATA_NAME
from dtckpt.interop import DtckptStorageReader, DtckptStorageWriter
from dtckpt.interop.dcp import known_saves
from dtckpt.storage import commit_by_decision, commit_by_rename
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import location_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def store():
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["directory", "object store"])
def place(request, tmp_path):
    return str(tmp_path / "run" / "step-10") if request.param == "directory" else "memory://run/step-10"


def options_at(place):
    return dtckpt.SaveOptions(kvstore="zarr", overwrite=True) if "memory:" in str(place) else None


def save(place, value=1.0):
    writer = DtckptStorageWriter(place, options=options_at(place))
    dcp.save({"a": torch.full((3,), value)}, storage_writer=writer)


def markers(place):
    """Return the paths of all files of this name below a run."""
    if "://" in place:
        return [path.removeprefix("/run/") for path in MemoryFileSystem.store if path.endswith(DCP_METADATA_NAME)]
    run = Path(place).parent
    return [str(path.relative_to(run)) for path in run.rglob(DCP_METADATA_NAME)]


def test_it_is_there_once_the_checkpoint_is_committed(place, monkeypatch):
    def fail(*_, **__):
        assert markers(place) == []  # also not in what is under construction, where programs look, too
        raise StorageError("no commit")

    with monkeypatch.context() as patched:
        patched.setattr(commit_by_rename, "commit", fail)
        patched.setattr(commit_by_decision.AttemptRegister, "give_up_older", fail)
        with pytest.raises(dcp.CheckpointException, match="no commit"):
            save(place)
    assert markers(place) == []
    for value in (1.0, 2.0):
        save(place, value)
        assert markers(place) == [f"step-10/{DCP_METADATA_NAME}"]
    assert dtckpt.restore(place)["a"].tolist() == [2.0] * 3
    assert dtckpt.open_checkpoint(place).verify().is_sound


def test_it_goes_with_the_checkpoint(place):
    save(place)
    commit_target_of(location_of(place)).remove()
    assert markers(place) == []


def test_the_reader_of_pytorch_names_ours(place):
    save(place)
    state = {"a": torch.zeros(3)}
    with pytest.raises(dcp.CheckpointException, match=re.escape("storage_reader=DtckptStorageReader()")):
        dcp.load(state, checkpoint_id=place)
    dcp.load(state, checkpoint_id=place, storage_reader=DtckptStorageReader())
    assert state["a"].tolist() == [1.0] * 3


def test_a_checkpoint_of_save_takes_its_place(place):
    save(place)
    dtckpt.save(place, {"b": torch.ones(1)}, options=options_at(place) or dtckpt.SaveOptions(overwrite=True))
    assert list(dtckpt.restore(place)) == ["b"]
    # At an object store it stays: there is a checkpoint that our reader reads.
    assert markers(place) == ([f"step-10/{DCP_METADATA_NAME}"] if "://" in place else [])
    save(place)
    assert list(dtckpt.restore(place)) == ["a"]


def test_copies_and_exports(tmp_path):
    place = tmp_path / "step-10"
    save(place)
    shutil.copytree(place, tmp_path / "copy")
    assert dtckpt.open_checkpoint(tmp_path / "copy").verify().is_sound
    convert(place, tmp_path / "exported", to="dcp")
    state = {"a": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path / "exported")
    assert state["a"].tolist() == [1.0] * 3
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "exported", place, to="dcp")
    assert dtckpt.open_checkpoint(place).verify().is_sound
    command = [sys.executable, "-m", "dtckpt", "inspect", str(place)]
    assert "a" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_a_manifest_it_is_no_checkpoint(tmp_path):
    (tmp_path / DCP_METADATA_NAME).write_bytes(OWN_MARKER)
    for path in (tmp_path, tmp_path / DCP_METADATA_NAME):
        with pytest.raises(CheckpointIncompleteError, match="marks a checkpoint of dtckpt"):
            dtckpt.open_checkpoint(path)


def test_a_replaced_checkpoint_of_another_run_is_named(place, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    save(place)
    save(place)  # this run's own
    assert not caplog.records
    monkeypatch.setattr(known_saves, "incarnation", lambda: 1)  # the next run
    save(place)
    assert [place in record.getMessage() for record in caplog.records] == [True]
    caplog.clear()
    # A run that has loaded the checkpoint goes on with it.
    dcp.load({"a": torch.zeros(3)}, storage_reader=DtckptStorageReader(place))
    save(place)
    assert not caplog.records


def test_a_damaged_checkpoint_is_replaced_with_a_warning(tmp_path, caplog):
    save(tmp_path / "step")
    manifest = tmp_path / "step" / "dtckpt.manifest"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    save(tmp_path / "step", 2.0)
    assert "cannot be read" in caplog.text
    assert dtckpt.restore(tmp_path / "step")["a"].tolist() == [2.0] * 3


def test_a_tensor_of_that_name(tmp_path):
    writer = DtckptStorageWriter(tmp_path / "step", options=dtckpt.SaveOptions(kvstore="zarr"))
    dcp.save({DCP_METADATA_NAME: torch.ones(2), "a": torch.ones(1)}, storage_writer=writer)
    assert (tmp_path / "step" / DCP_METADATA_NAME).read_bytes() == OWN_MARKER
    assert dtckpt.restore(tmp_path / "step")[DCP_METADATA_NAME].tolist() == [1.0, 1.0]
