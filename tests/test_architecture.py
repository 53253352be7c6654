"""docs/architecture.md names files, classes and functions that exist, and the layers that the linter checks."""

import ast
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


DOOR = "storage/local_folder.py"
"""The only module that changes files below a directory of checkpoints."""
OTHER_WRITERS = {
    "cli/picture_files.py": "a picture, at the path that the user asks for",
    "dtensor/debug/comm_mode.py": "a table, at the path that the user asks for",
}
CHANGES_OF_OS = {"replace", "rename", "renames", "unlink", "remove", "removedirs", "rmdir", "mkdir", "makedirs", "link"}
CHANGES_OF_PATHS = {"unlink", "rmdir", "mkdir", "write_bytes", "write_text", "touch", "symlink_to", "hardlink_to"}


def changes_files(call):
    """Whether a call changes files: by `os`, `shutil`, a method of `pathlib.Path`, or an open to write."""
    function, arguments = call.func, call.args
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    text = ast.unparse(call)
    if owner == "os":
        is_changing_open = name == "open" and re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)", text)
        return name in CHANGES_OF_OS or (is_changing_open and "os.devnull" not in text)
    if owner == "shutil":
        return name not in ("disk_usage", "get_terminal_size", "which")
    if name == "open" and (not owner or len(arguments) == 1):
        mode = next((each.value for each in arguments[-1:] if isinstance(each, ast.Constant)), "r")
        is_descriptor = "new_file(" in text or ast.unparse(arguments[0]) == "descriptor"
        return not is_descriptor and bool(re.search("[wxa+]", str(mode)))
    # The methods of strings take more arguments.
    return name in CHANGES_OF_PATHS or (
        name in ("rename", "replace") and owner not in ("", "dataclasses") and len(arguments) == 1
    )


def test_one_module_changes_files():
    found = {}
    for path in sorted((ROOT / "dtckpt").rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if lines := [call.lineno for call in calls if changes_files(call)]:
            found[str(path.relative_to(ROOT / "dtckpt"))] = lines
    assert found.pop(DOOR)
    assert found.keys() == OTHER_WRITERS.keys(), found
