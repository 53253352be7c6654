"""The examples of `inspect`, `diff` and `cat`, in their help and in docs/inspect.md."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import dtckpt
from dtckpt.cli import cat, diff, inspect
from dtckpt.cli.exit_codes import ExitCode

HELPS = (inspect.EPILOG, diff.EPILOG, cat.EPILOG)
DOC = Path(__file__).parents[2] / "docs" / "inspect.md"
EXAMPLES = [
    *(match[1] for text in HELPS for match in re.finditer(r"(?m)^  dtckpt (.+?)(?:  .*)?$", text)),
    *(match[1] for match in re.finditer(r"(?m)^\$ dtckpt (.+)$", DOC.read_text())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    for step in (100, 200):
        layers = {str(layer): {"wq": torch.rand(8, 8), "norm": torch.ones(8)} for layer in range(4)}
        dtckpt.save(folder / f"step_{step}", {"model": {"w": torch.rand(8, 8), "layers": layers}, "step": step})
    dtckpt.reshard(folder / "step_100", folder / "step_100_for_8", mesh=dtckpt.abstract_mesh({"x": 8}))
    dtckpt.convert(folder / "step_100", folder / "model.safetensors", select="model/*", rename={"model/*": "*"})
    (folder / "names.json").write_text('{"rules": [{"from": "model/w", "to": "w"}]}')
    return folder


def test_there_are_examples():
    assert len(EXAMPLES) >= 15


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(run, folder, monkeypatch, example):
    monkeypatch.chdir(folder)
    command, *args = shlex.split(example.replace("s3://bucket", f"file://{folder}"))
    result = run(command, *args)
    assert result.err == ""
    differs = command == "diff" and "step_200" in args
    assert result.code == (ExitCode.FAILED if differs else ExitCode.OK)
    assert result.out
