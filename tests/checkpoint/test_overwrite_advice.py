"""A refusal to replace an existing target names the argument that allows it, as the caller spells it."""

import dataclasses
import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dtckpt
from dtckpt.cli.main import main
from dtckpt.errors import CheckpointExistsError
from dtckpt.interop.dcp.storage_writer import DtckptStorageWriter

STATE = {"w": torch.ones(4)}


def _export(source, target):
    with dtckpt.CheckpointManager(source.parent / "run", is_async=False) as manager:
        manager.save(1, STATE, force=True)
        manager.export(target)


def _save_by_dcp(source, target):
    options = dtckpt.SaveOptions()
    dcp.save({"w": torch.ones(4)}, storage_writer=DtckptStorageWriter(target, options=options), no_dist=True)


CALLS = {
    "save": (lambda source, target: dtckpt.save(target, STATE), "SaveOptions"),
    "save_async": (lambda source, target: dtckpt.save_async(target, STATE).result(), "SaveOptions"),
    "reshard": (
        lambda source, target: dtckpt.reshard(source, target, mesh=dtckpt.abstract_mesh({"x": 2})),
        "SaveOptions",
    ),
    "dcp": (_save_by_dcp, "SaveOptions"),
    "convert": (lambda source, target: dtckpt.convert(source, target, to="dtckpt"), dtckpt.convert),
    "convert to files": (lambda source, target: dtckpt.convert(source, target, to="safetensors"), dtckpt.convert),
    "export": (_export, "ExportOptions"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("call", CALLS)
def test_each_call_names_its_own_argument(tmp_path, call):
    source, target = tmp_path / "source", tmp_path / "target"
    dtckpt.save(source, STATE)
    run, owner = CALLS[call]
    if call in ("convert to files", "export"):
        dtckpt.convert(source, target, to="safetensors")
    else:
        dtckpt.save(target, STATE)
    with pytest.raises((CheckpointExistsError, CheckpointException)) as caught:  # PyTorch's, around ours
        run(source, target)
    if callable(owner):
        assert "overwrite" in inspect.signature(owner).parameters
        assert "; pass overwrite=True to replace it" in str(caught.value)
    else:
        assert "overwrite" in {field.name for field in dataclasses.fields(getattr(dtckpt, owner))}
        assert f"; pass {owner}(overwrite=True) to replace it" in str(caught.value)


@pytest.mark.parametrize("command", [["reshard", "--mesh", "x=2"], ["convert", "--to", "dtckpt"]], ids=" ".join)
def test_commands_name_their_option(tmp_path, capsys, command):
    source, target = tmp_path / "source", tmp_path / "target"
    dtckpt.save(source, STATE)
    dtckpt.save(target, STATE)
    assert main([command[0], str(source), str(target), *command[1:]]) == 4
    assert "; pass --overwrite to replace it" in capsys.readouterr().err


def test_a_misspelt_first_key_is_found(tmp_path):
    layers = {f"layers.{number}": {"attention": {"weight": torch.ones(2)}} for number in range(20)}
    dtckpt.save(tmp_path / "step", {"model": layers, "optimizer": {"lr": 0.1}, "step": 3})
    with pytest.raises(dtckpt.errors.TensorNotFoundError, match=r"'model' is nearest to 'modle"):
        dtckpt.restore(tmp_path / "step", {"modle": layers, "optimizer": {"lr": 0.0}, "step": 0})
