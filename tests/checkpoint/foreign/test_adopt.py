"""The commands of docs/adopt.md run on checkpoints that the other libraries wrote, and keep all elements."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import dtckpt
from dtckpt.cli.main import main

from .sample_files import SAMPLES, read_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

PAGE = Path(__file__).parents[3] / "docs" / "adopt.md"
TREE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
SOURCES = {
    "Hugging Face's `Trainer`": "huggingface/trainer",
    "accelerate's `save_state`": "huggingface/accelerate",
    "PEFT adapters": "huggingface/adapter",
    "DeepSpeed": "deepspeed/z2_bf16_2",
    "Megatron-Core, NeMo": "megatron_versions/v0.13.1",
    "FSDP1": "fsdp/fsdp1_flat_2",
    "DCP": lambda path: dcp.save(TREE, checkpoint_id=path),
    "`torch.save`": lambda path: torch.save(TREE, path),
    "safetensors": lambda path: safetensors.torch.save_file(TREE, path),
    "Orbax": "orbax/v0_manager/3",
    "TensorFlow": "tensorflow/object",
}
"""By row, the sample, or the function that writes a checkpoint to a path."""


def rows():
    """Return the commands of the page by the first cell of their rows."""
    table = PAGE.read_text().partition("\n## Checkpoints that you have\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (.*?) \| `(dtckpt .*?)` \|", table, re.M))


def test_each_row_has_a_command():
    assert rows().keys() == SOURCES.keys()


@pytest.mark.share(5)
@pytest.mark.parametrize("row", SOURCES)
def test_commands_run(row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = shlex.split(rows()[row])[1:]
    source, target = map(Path, command[1:3])
    given = SOURCES[row]
    source.parent.mkdir(parents=True, exist_ok=True)
    if callable(given):
        given(source)
    elif row == "TensorFlow":
        shutil.copytree(SAMPLES / given, source.parent, dirs_exist_ok=True)
    else:
        shutil.copytree(SAMPLES / given, source)
    if row.startswith("Megatron"):
        (source / "latest_checkpointed_iteration.txt").write_text("7")
    assert main(command) == 0, capsys.readouterr()
    wanted = read_all(source)
    assert wanted
    assert read_all(target) == wanted
    with dtckpt.open_checkpoint(target) as checkpoint:
        assert checkpoint.format == "dtckpt"
