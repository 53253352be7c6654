"""The wheels, installed where there is no source tree: all modules are in them, and the commands start."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"dtckpt": ROOT, "dtckpt_coordinator": ROOT / "server"}
COMMANDS = {"dtckpt": ("dtckpt", "dtckpt_server.main"), "dtckpt_coordinator": ("dtckpt_server.main",)}


@pytest.fixture(scope="module", params=FOLDERS)
def wheel(request, tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    subprocess.run(build, cwd=FOLDERS[request.param], check=True, capture_output=True, timeout=120)
    (path,) = target.glob(f"{request.param}-*.whl")
    return request.param, path


def test_a_wheel_has_all_modules(wheel):
    _, path = wheel
    names = set(zipfile.ZipFile(path).namelist())
    folders = ROOT / "dtckpt", ROOT / "server/dtckpt_server"
    modules = {str(module.relative_to(folder.parent)) for folder in folders for module in folder.rglob("*.py")}
    assert modules | {"dtckpt/py.typed"} <= names
    assert {name for name in names if name.endswith(".py")} == modules


def test_an_installed_wheel_starts(wheel, tmp_path):
    name, path = wheel
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path), str(path)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for module in COMMANDS[name]:
        command = [sys.executable, "-m", module, "--help"]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.startswith("Usage: ")


def test_the_coordinator_asks_for_nothing_newer_than_the_library_does():
    projects = {name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in FOLDERS.items()}
    needed = {name: set(project["project"]["dependencies"]) for name, project in projects.items()}
    assert needed["dtckpt_coordinator"] <= needed["dtckpt"]
