"""CONTRIBUTING.md and its pages name files, targets and layers that exist; their examples fit the tree and compile.

The examples are applied in memory only, and not run. If a line changes that an example's diff shows, write the diff
anew: make the example's change by hand, and paste ``git diff -U1``.
"""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = [path.read_text() for path in sorted((ROOT / "docs" / "contributing").glob("*.md"))]
TEXT = "\n".join([(ROOT / "CONTRIBUTING.md").read_text(), *EXAMPLES])
MAX_COLUMNS = 125
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NEW_FILE = re.compile(r"^New file `([^`]+)`.*?^```python\n(.*?)^```$", re.M | re.S)
PATH = re.compile(r"(?<![\w./-])(?:dtckpt|server|tests|docs|protos|benchmarks|examples|deploy)/[\w./-]*\w")
FOLDERS = ("dtckpt", "server", "tests", "docs")
NEW = dict(NEW_FILE.findall(TEXT))
"""The files that the examples make, by path."""


def hunks(diff):
    """Yield the path, the old and the new lines of every hunk."""
    path = None
    for part in re.split(r"^(?=--- |@@ )", diff, flags=re.M):
        body = part.partition("\n")[2]
        if part.startswith("--- "):
            path = re.fullmatch(r"\+\+\+ b/(.*)\n", body)[1]
        elif part.startswith("@@ "):
            lines = [line or " " for line in body.splitlines()]
            yield path, *("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))


HUNKS = [hunk for kind, body in BLOCK.findall(TEXT) if kind == "diff" for hunk in hunks(body)]


def patched():
    """Return the text of every file that the examples make or change, by path."""
    texts = dict(NEW)
    for path, old, new in HUNKS:
        text = "\n" + (texts.get(path) or (ROOT / path).read_text())
        assert text.count(f"\n{old}") == 1, f"{path} is no longer as docs/contributing has it:\n{old}"
        texts[path] = text.replace(f"\n{old}", f"\n{new}")[1:]
    return texts


def test_every_example_has_a_change_a_test_and_a_command():
    assert len(EXAMPLES) == 5
    for example in EXAMPLES:
        kinds = [kind for kind, _ in BLOCK.findall(example)]
        assert "diff" in kinds
        assert "bash" in kinds
        assert re.search(r"^(?:\+\+\+ b/|New file `)tests/.*test_", example, re.M)
        assert "\nExpected: " in example


def test_named_files_exist():
    for path in set(PATH.findall(TEXT)) - set(NEW):
        assert (ROOT / path).exists(), path
    for path in NEW:
        assert not (ROOT / path).exists(), path
    for name in set(re.findall(r"`([\w/]+\.(?:py|md))`", TEXT)):
        assert name in NEW or (ROOT / name).exists() or any(any((ROOT / folder).rglob(name)) for folder in FOLDERS), (
            name
        )
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXT):
        assert f"def {name}(" in (ROOT / path).read_text()


def test_the_map_shows_every_folder():
    above, shown = [], set()
    for line in next(body for kind, body in BLOCK.findall(TEXT) if not kind).splitlines():
        names, _ = re.split(r"  +", line.strip(), maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        for name in names.split():
            path = Path(*above[:depth], name)
            assert (ROOT / path).exists(), path
            shown.add(path)
        above[depth:] = [path.name]
    packages = {init.parent.relative_to(ROOT) for init in (ROOT / "dtckpt").rglob("__init__.py")}
    assert packages <= shown


def test_make_has_the_targets():
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:`|=all |=\d+ |^)make ([\w-]+)", TEXT, re.M)) <= set(targets)


def test_the_layers_are_those_of_the_linter():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    said = re.search(r"^1\. Imports point downwards:(.*?)^2\. ", TEXT, re.M | re.S)[1]
    assert re.findall(r"`(\w+)`", said) == [word for layer in layers for word in re.findall(r"\w+", layer)]
    assert len(re.findall(r"^\d\. ", TEXT.split("**Layers.**")[1].split("\n## ")[0], re.M)) == len(contracts)


def module_file(module):
    """Return the path of a module of ours, as the examples write it."""
    folder = {"dtckpt_server": "server/", "support": "tests/"}.get(module.partition(".")[0], "")
    return folder + module.replace(".", "/") + ".py"


def names_in(source):
    """Return the names that a module defines or imports at its top level."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            found |= {one.asname or one.name for one in ast.walk(node) if isinstance(one, ast.alias)}
    return found


def has_name(module, name, texts):
    if module_file(f"{module}.{name}") in texts:
        return True
    if module_file(module) in texts:
        return name in names_in(texts[module_file(module)])
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", sorted({path for path, _, _ in HUNKS} | set(NEW)))
def test_files_of_the_examples(path):
    texts = patched()
    if not path.endswith(".py"):
        return
    tree = ast.parse(texts[path], path)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.partition(".")[0] not in {"dtckpt", "dtckpt_server", "support"}:
                continue
            for alias in node.names:
                assert has_name(node.module, alias.name, texts), f"{path}: {node.module} has no {alias.name}"


def test_lines_are_short():
    assert max(map(len, TEXT.splitlines())) <= MAX_COLUMNS
