"""What the package exports, and what importing it costs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dtckpt

MAX_IMPORT_S = 0.15
TRIES = 5


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_names_exist_once():
    assert len(set(dtckpt.__all__)) == len(dtckpt.__all__)
    for name in dtckpt.__all__:
        assert getattr(dtckpt, name) is not None
    assert dir(dtckpt) == sorted(dtckpt.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        dtckpt.nothing  # noqa: B018


def test_lazy_names_come_from_where_type_checkers_look():
    tree = ast.parse(Path(dtckpt.__file__).read_text())
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("dtckpt."):
            seen[node.module.removeprefix("dtckpt.")] = tuple(alias.name for alias in node.names)
    assert {module: tuple(names) for module, names in dtckpt._MODULES.items()} == seen
    submodules = {name for name in dtckpt.__all__ if isinstance(getattr(dtckpt, name), ModuleType)}
    assert sorted(name for names in seen.values() for name in names) == sorted({*dtckpt.__all__} - submodules)
    for module, names in seen.items():
        home = importlib.import_module(f"dtckpt.{module}")
        for name in names:
            assert getattr(dtckpt, name) is getattr(home, name)


def test_importing_loads_no_library():
    heavy = "torch", "numpy", "tensorstore", "zarr", "grpc", "google.protobuf", "fsspec", "click", "rich"
    loaded = run(f"import sys, dtckpt; print([name for name in {heavy!r} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_importing_costs_next_to_nothing():
    script = "import torch, time; start = time.perf_counter(); import dtckpt; print(time.perf_counter() - start)"
    assert any(float(run(script)) < MAX_IMPORT_S for _ in range(TRIES))


@pytest.mark.share(3, of="processes that start PyTorch")
def test_the_core_never_loads_torchs_dtensor():
    script = (
        "import sys, tempfile, torch, dtckpt\n"
        "mesh = dtckpt.abstract_mesh({'x': 2})\n"
        "layout = dtckpt.Layout(['x'], mesh)\n"
        "path = tempfile.mkdtemp() + '/s'\n"
        "before = 'torch.distributed.tensor' in sys.modules\n"
        "dtckpt.save(path, {'w': dtckpt.pack([torch.ones(2)] * 2, layout)})\n"
        "dtckpt.restore(path, mesh=mesh)\n"
        "print(before, 'torch.distributed.tensor' in sys.modules)\n"
    )
    before, after = run(script).split()
    assert before == after
