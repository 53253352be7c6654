"""docs/architecture.md names files, classes and functions that exist, and the layers that the linter checks."""

import ast
import importlib
import operator
import re
import tomllib
from collections import defaultdict
from functools import cache
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


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def test_one_module_changes_files():
    found = {}
    for path in sorted((ROOT / "dtckpt").rglob("*.py")):
        calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        if lines := [call.lineno for call in calls if changes_files(call)]:
            found[str(path.relative_to(ROOT / "dtckpt"))] = lines
    assert found.pop(DOOR)
    assert found.keys() == OTHER_WRITERS.keys(), found


# --- circles, names, imports --------------------------------------------------------------------------------------

MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root, package in ((ROOT, "dtckpt"), (ROOT / "server", "dtckpt_server"))
    for path in sorted((root / package).rglob("*.py"))
    if "_proto" not in path.parts
}
"""Every module of the library and the server, by its name."""
MAX_CIRCLE = 3
MAX_SHARE_OF_IMPORTS = 0.1155
"""It goes down to 0.1."""


def imported(tree):
    """Yield the modules that a module imports, also inside functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = names & MODULES.keys()
            yield from submodules
            if submodules != names and node.module in MODULES:
                yield node.module


def circles(graph):
    """Return the strongly connected components of a graph that have several nodes (R. Tarjan, 1972)."""
    order, lowest, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            position = stack.index(node)
            component = stack[position:]
            del stack[position:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_circles_are_found():
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["a", "f"]}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["d", "e"]]


def test_no_import_circle_has_many_modules():
    graph = {module: sorted(set(imported(tree_of(path)))) for module, path in MODULES.items()}
    assert [circle for circle in circles(graph) if len(circle) > MAX_CIRCLE] == []


SAME_NAMES = {
    "Failure": "what a history of calls, and what the server, knows of a client that failed",
    "HeldError": "the server decides it, the client raises it",
    "UnknownError": "the server decides it, the client raises it",
}
"""Names that two classes may share, each with the reason."""


def test_no_two_classes_share_a_name():
    modules_of = defaultdict(list)
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                modules_of[node.name].append(module)
    shared = {name: modules for name, modules in modules_of.items() if len(modules) > 1}
    assert shared.keys() - SAME_NAMES.keys() == set(), {
        name: shared[name] for name in shared.keys() - SAME_NAMES.keys()
    }
    assert SAME_NAMES.keys() - shared.keys() == set(), "these names are no longer shared: take them off the list"


def lines_of_code(path):
    """Return how many lines a module has without blanks, comments and docstrings, and how many of them import."""
    docstrings, imports = set(), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(map(str.strip, path.read_text().splitlines()), 1)
    code = {number for number, line in lines if line and not line.startswith("#")}
    return len(code - docstrings), len(imports)


def test_few_lines_are_imports():
    counts = [lines_of_code(path) for path in MODULES.values()]
    share = sum(imports for _, imports in counts) / sum(code for code, _ in counts)
    assert share <= MAX_SHARE_OF_IMPORTS, f"{share:.4f}"
