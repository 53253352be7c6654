"""Files beside distributed checkpoints of PyTorch: dtckpt reads Lightning's and Megatron's, and names the rest."""

import argparse
import io
import json
import os
import shutil
import signal
from collections import OrderedDict

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dtckpt
from dtckpt import errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

LIGHTNING = {
    "epoch": 3,
    "global_step": 40,
    "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
    "lr_schedulers": [{"last_epoch": 3}],
    "by_number": {0: torch.ones(2), 1: "b"},
}


@pytest.fixture
def folder(tmp_path):
    state = {"model": {"w": torch.arange(6.0)}, "optimizer_0": {"state": {"w": {"exp_avg": torch.ones(6)}}}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def same(one, other):
    return repr(one) == repr(other)


def test_what_lightning_writes(folder, tmp_path):
    """The tree equals the tree of Lightning's loader."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    torch.save(OrderedDict(LIGHTNING), folder / "meta.pt")
    expected = _load_distributed_checkpoint(folder)
    restored = dtckpt.restore(folder)
    assert restored.keys() == expected.keys()
    assert same({key: restored[key] for key in LIGHTNING}, LIGHTNING)
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == ()
        assert checkpoint.verify().unread == ()
    report = dtckpt.convert(folder, tmp_path / "new.pt")
    assert {"meta.pt", ".metadata"} <= {*report.account.files}
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    assert same({key: loaded[key] for key in LIGHTNING}, LIGHTNING)
    assert torch.equal(loaded["model"]["w"], torch.arange(6.0))
    dtckpt.reshard(folder, tmp_path / "s", mesh=dtckpt.abstract_mesh({"x": 2}))
    assert dtckpt.restore(tmp_path / "s")["global_step"] == 40


def test_what_megatron_writes(folder):
    arguments = argparse.Namespace(lr=1, exit_signal=signal.SIGTERM)
    common = {"iteration": 5, "optimizer_0": {"param_groups": [{"lr": 0.1}]}, "args": arguments}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == ()
        assert checkpoint.values == {"iteration": 5, "optimizer_0/param_groups/0/lr": 0.1, "args/lr": 1}
        # Beside the tensors of the same optimizer.
        assert "optimizer_0/state/w/exp_avg" in checkpoint.tensors
        assert list(checkpoint.refused) == ["args/exit_signal"]


def test_by_the_path_of_the_metadata(folder):
    torch.save(LIGHTNING, folder / "meta.pt")
    assert dtckpt.restore(folder / ".metadata")["epoch"] == 3


def test_where_directories_are_not_listed(folder):
    torch.save({"epoch": 3}, folder / "meta.pt")
    for file in folder.iterdir():
        with fsspec.open(f"memory://companions/{file.name}", "wb") as copy:
            copy.write(file.read_bytes())
    assert dtckpt.restore("memory://companions")["epoch"] == 3


def test_any_other_file_of_torch_save_is_an_item(folder):
    torch.save({"rng": torch.ones(3)}, folder / "rng_0.pt")
    torch.save([1, 2], folder / "meta.pt")
    restored = dtckpt.restore(folder)
    assert torch.equal(restored["rng_0.pt"]["rng"], torch.ones(3))
    assert restored["meta.pt"] == [1, 2]


def test_other_files_are_named(folder, tmp_path):
    (folder / "notes.txt").write_text("hello")
    (folder / "metadata.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    os.mkfifo(folder / "fifo")
    shutil.copy(next(folder.glob("*.distcp")), folder / "__7_0.distcp")
    torch.save({"w": 1}, folder / "old.pt", _use_new_zipfile_serialization=False)
    unread = ("__7_0.distcp", "fifo", "metadata.json", "notes.txt", "old.pt", "tokenizer")
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert checkpoint.unread == unread
        assert checkpoint.verify().unread == unread
    reports = []
    dtckpt.restore(folder, options=dtckpt.RestoreOptions(report=reports.append))
    assert reports[0].unread == unread
    for write in (dtckpt.convert, lambda *args: dtckpt.reshard(*args, mesh=dtckpt.abstract_mesh({"x": 2}))):
        with pytest.raises(errors.CheckpointError, match=r"would be left behind: __7_0.distcp, fifo, metadata.json"):
            write(folder, tmp_path / "new")
        assert not (tmp_path / "new").exists()
    report = dtckpt.convert(folder, tmp_path / "new", ignore_rest=True)
    assert report.account.left_files == unread
    assert torch.equal(dtckpt.restore(tmp_path / "new")["model"]["w"], torch.arange(6.0))
    # They ask for one part only.
    assert dtckpt.convert(folder, tmp_path / "part", select="model/*").account.left_files == unread


def test_two_things_of_one_name(folder):
    torch.save({"model": {"w": 7, "b": 1}, "optimizer_0": 3}, folder / "meta.pt")
    with dtckpt.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.refused) == {"model/w", "optimizer_0"}
        assert checkpoint.values == {"model/b": 1}
        assert torch.equal(checkpoint.read("model/w"), torch.arange(6.0))
    with pytest.raises(errors.TreeError, match=r"'model/w' is in meta.pt, and in the checkpoint beside it"):
        dtckpt.restore(folder)
    torch.save({"model": {"w": torch.zeros(6)}}, folder / "meta.pt")
    with pytest.raises(errors.TreeError, match=r"meta.pt has a tensor 'model/w'"):
        dtckpt.restore(folder)


def test_a_damaged_file_is_an_error_for_those_who_want_it(folder):
    torch.save(LIGHTNING, folder / "meta.pt")
    data = (folder / "meta.pt").read_bytes()
    (folder / "meta.pt").write_bytes(data[:-30])
    with pytest.raises(errors.CheckpointCorruptError, match=r"meta\.pt"):
        dtckpt.restore(folder)
    target = {"w": torch.zeros(6)}
    options = dtckpt.RestoreOptions(rename={"model/w": "w"}, allow_unexpected=True)
    assert torch.equal(dtckpt.restore(folder, target, options=options)["w"], torch.arange(6.0))


def test_beside_what_each_process_saved(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    torch.save({"epoch": 3}, tmp_path / "meta.pt")
    (tmp_path / "notes.txt").write_text("hello")
    with dtckpt.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.values == {"epoch": 3}
        assert checkpoint.unread == ("notes.txt",)


def test_a_stream_of_bytes_whose_attributes_were_looked_for(tmp_path):
    stream = io.BytesIO(b"state")
    assert vars(stream) == {}  # from now on its state has a dict, not None
    torch.save({"a": stream}, tmp_path / "a.pt")
    assert dtckpt.restore(tmp_path / "a.pt")["a"].getvalue() == b"state"


def test_streams_of_bytes_stay_streams(tmp_path):
    """Megatron's objects: DCP gives a `BytesIO`, and so do a restore and the output of a conversion."""
    stream = io.BytesIO(b"\0state\xff")
    stream.seek(3)
    inner = io.BytesIO()
    torch.save({"scale": torch.ones(1)}, inner)
    dcp.save({"w": torch.ones(2), "extra": {"a": stream, "b": inner}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dtckpt.convert(tmp_path / "dcp", tmp_path / "ours")
    dtckpt.convert(tmp_path / "ours", tmp_path / "back", to="dcp")
    for path in ("dcp", "ours", "back"):
        restored = dtckpt.restore(tmp_path / path)["extra"]
        assert (restored["a"].getvalue(), restored["a"].tell()) == (stream.getvalue(), 3)
        assert restored["b"].getvalue() == inner.getvalue()
    target = {"extra": {"a": None, "b": None}}
    dcp.load(target, checkpoint_id=tmp_path / "back", no_dist=True)
    assert target["extra"]["a"].getvalue() == stream.getvalue()
    with pytest.raises(errors.TreeError, match=r"cannot write the BytesIO at 'extra/a': PyTorch would not read it"):
        dtckpt.convert(tmp_path / "dcp", tmp_path / "new.pt")
