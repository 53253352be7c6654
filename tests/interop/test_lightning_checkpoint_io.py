"""`DtckptCheckpointIO` by itself: saves, loads and removals, and the files after a failed save."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

import dtckpt
from dtckpt.errors import ConfigTypeError, StorageError
from dtckpt.interop import DtckptCheckpointIO

CHECKPOINT = {
    "epoch": 1,
    "state_dict": {"w": torch.arange(3.0)},
    "callbacks": {"ModelCheckpoint{'monitor': 'val'}": {"best_k_models": {"/ckpt/epoch=0.ckpt": torch.tensor(0.5)}}},
    "lr_schedulers": [],
}


def names(folder):
    return sorted(os.listdir(folder))


def test_what_is_saved_is_loaded(tmp_path):
    io, path = DtckptCheckpointIO(), str(tmp_path / "epoch=0-step=4.ckpt")
    io.save_checkpoint(CHECKPOINT, path)
    for loaded in (io.load_checkpoint(path), io.load_checkpoint(path, "cpu", weights_only=True), dtckpt.restore(path)):
        assert str(loaded) == str(CHECKPOINT)
    io.save_checkpoint({"state_dict": {"w": torch.rand(9)}}, path, dtckpt.SaveOptions(save_as_bf16=True))
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["state_dict/w"].stored_dtype == torch.bfloat16
    with pytest.raises(ConfigTypeError, match="storage_options must be"):
        io.save_checkpoint(CHECKPOINT, path, {"a": 1})


@pytest.mark.parametrize(
    "location",
    [torch.device("meta"), "meta", {"cpu": "meta"}, lambda storage, _: torch.empty(0, device="meta").untyped_storage()],
)
def test_a_location_for_the_tensors(tmp_path, location):
    io = DtckptCheckpointIO()
    io.save_checkpoint({"a": [(torch.ones(2), 3)]}, tmp_path / "c")
    ((tensor, number),) = io.load_checkpoint(tmp_path / "c", location)["a"]
    assert (tensor.device.type, number) == ("meta", 3)


@pytest.mark.parametrize("location", [None, {"cuda:0": "cpu"}, lambda storage, _: storage, lambda *_: None])
def test_locations_that_leave_the_tensors_on_the_host(tmp_path, location):
    io = DtckptCheckpointIO()
    io.save_checkpoint(CHECKPOINT, tmp_path / "c")
    assert io.load_checkpoint(tmp_path / "c", location)["state_dict"]["w"].device.type == "cpu"


def test_removal(tmp_path):
    io = DtckptCheckpointIO()
    io.save_checkpoint(CHECKPOINT, tmp_path / "a")
    torch.save(CHECKPOINT, tmp_path / "b")
    (tmp_path / "c").mkdir()
    torch.save({}, tmp_path / "c" / "meta.pt")
    (tmp_path / "d").symlink_to("a")
    io.remove_checkpoint(tmp_path / "d")
    assert names(tmp_path) == ["a", "b", "c"]
    for name in ("a", "b", "c", "there is none"):
        io.remove_checkpoint(str(tmp_path / name))
    assert names(tmp_path) == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_checkpoint_of_lightnings_own_is_loaded_and_replaced(tmp_path, is_async):
    path = tmp_path / "last.ckpt"
    torch.save(CHECKPOINT, path)
    io = DtckptCheckpointIO(is_async=is_async)
    assert str(io.load_checkpoint(path)) == str(CHECKPOINT)
    io.save_checkpoint({"epoch": 2}, path)
    io.teardown()
    assert (names(tmp_path), io.load_checkpoint(path)) == (["last.ckpt"], {"epoch": 2})


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    io = DtckptCheckpointIO()
    io.save_checkpoint({"epoch": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt") == {"epoch": 1}
    io.save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")
    assert [io.load_checkpoint(tmp_path / name)["epoch"] for name in ("best.ckpt", "last.ckpt")] == [1, 2]


def test_saves_in_the_background_remove_when_they_are_committed(tmp_path):
    io, weight = DtckptCheckpointIO(is_async=True), torch.zeros(3)
    for step in range(3):
        weight += 1
        io.save_checkpoint({"w": weight}, tmp_path / f"{step}.ckpt")
        if step:
            io.remove_checkpoint(tmp_path / f"{step - 1}.ckpt")
            assert (tmp_path / f"{step - 1}.ckpt").exists()
    io.teardown()
    assert names(tmp_path) == ["2.ckpt"]
    assert io.load_checkpoint(tmp_path / "2.ckpt")["w"].tolist() == [3.0] * 3


@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_is_removed_for_a_save_that_failed(tmp_path, monkeypatch, is_async):
    io = DtckptCheckpointIO(is_async=is_async)
    io.save_checkpoint({"epoch": 1}, tmp_path / "a")

    def fail(*_, **__):
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("dtckpt.checkpoint.saving.save.BegunSave.complete", fail)
        if is_async:
            io.save_checkpoint({"epoch": 2}, tmp_path / "b")
            io.remove_checkpoint(tmp_path / "a")
            with pytest.raises(StorageError, match="disk is full"):
                io.save_checkpoint({"epoch": 3}, tmp_path / "c")
        else:
            with pytest.raises(StorageError, match="disk is full"):
                io.save_checkpoint({"epoch": 2}, tmp_path / "b")
    io.remove_checkpoint(tmp_path / "a")
    assert io.load_checkpoint(tmp_path / "a") == {"epoch": 1}
    # A name that was to be removed, and is saved again before.
    io.save_checkpoint({"epoch": 4}, tmp_path / "a")
    io.save_checkpoint({"epoch": 5}, tmp_path / "b")
    io.teardown()
    assert (names(tmp_path), io.load_checkpoint(tmp_path / "a")) == (["a", "b"], {"epoch": 4})


def test_the_end_of_a_run_raises_the_error_of_its_last_save(tmp_path, monkeypatch):
    io = DtckptCheckpointIO(is_async=True)
    monkeypatch.setattr("dtckpt.checkpoint.saving.save.BegunSave.complete", lambda *_: 1 / 0)
    io.save_checkpoint({"epoch": 1}, tmp_path / "a")
    with pytest.raises(ZeroDivisionError):
        io.teardown()
    io.teardown()


def test_it_is_a_plug_in_of_whichever_package_there_is(monkeypatch):
    """Both packages may be imported after this library."""
    import abc

    class CheckpointIO(abc.ABC):  # noqa: B024
        pass

    monkeypatch.setitem(sys.modules, "lightning_fabric.plugins", SimpleNamespace(CheckpointIO=CheckpointIO))
    assert isinstance(DtckptCheckpointIO(), CheckpointIO)
