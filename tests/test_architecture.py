"""docs/architecture.md names files, classes and functions that exist, and the layers that the linter checks."""

import importlib
import operator
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"`(?:dtckpt/)?((?:server/dtckpt_server/)?[a-z_/]+(?:\.py|/))(?:: ([\w.]+))?`")
"""`file.py`, `folder/` or `file.py: name`, relative to dtckpt/."""


def references():
    return sorted({(match[1], match[2] or "") for match in FILE.finditer(ARCHITECTURE.read_text())})


@pytest.mark.parametrize(("file", "name"), references())
def test_named_files_and_names_exist(file, name):
    folder = ROOT if file.startswith("server/") else ROOT / "dtckpt"
    assert (folder / file).exists()
    if name:
        module = importlib.import_module("dtckpt." + file.removesuffix(".py").replace("/", "."))
        operator.attrgetter(name)(module)


def test_the_picture_shows_the_layers_of_the_linter():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    picture = ARCHITECTURE.read_text().split("```")[1]
    words = [word for line in picture.splitlines() for word in re.findall(r"\b[a-z]+\b", line[:52])]
    assert words == [word for layer in layers for word in re.findall(r"[a-z]+", layer)]
