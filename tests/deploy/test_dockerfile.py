"""The images, as far as that can be told without building them."""

import contextlib
import fnmatch
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from dtckpt_server import main as server

from dtckpt.cli.commands import cli

from .dockerfile import read_stages

ROOT = Path(__file__).parents[2]
STAGES = read_stages(ROOT / "Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = ("dtckpt", "coordinator")

READ_ONLY = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -o remount,bind,ro / && exec "$@"',
    "sh",
)
"""Runs a command on a root that no process may write to."""


def names_of(requirements):
    """Return the normal form of the names in requirements, such as ``types-protobuf`` of ``types_Protobuf>=7``."""
    names = {re.match(r"[\w.-]+", line).group() for line in requirements if not line.startswith("#")}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def closure(names):
    """Return distributions and all that they depend on, by the names they are installed under."""
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            needs = [each for each in metadata.requires(name) or () if "extra ==" not in each]
            todo += names_of(needs)
    return found


def coordinator_packages():
    return names_of(tomllib.loads((ROOT / "server/pyproject.toml").read_text())["project"]["dependencies"])


@contextlib.contextmanager
def serving(around, environment, *arguments):
    command = [*around, sys.executable, "-S", "-m", "dtckpt_server.main", "serve", "--insecure", "--port=0", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_images_begin_at_an_exact_tag_and_share_all_but_their_packages():
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", STAGES["base"].base)
    assert all(stage.base in STAGES for name, stage in STAGES.items() if name != "base")
    assert list(STAGES)[-1] == "coordinator"  # what a build without --target gives
    for name in IMAGES:
        copied = STAGES[name].all("COPY")
        assert STAGES[name].base == "base"
        assert copied == [f"--from=build-{name} /opt/dtckpt /opt/dtckpt"]


@pytest.mark.parametrize("name", IMAGES)
def test_images_run_as_a_numeric_user(name):
    user = STAGES[name].last("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("name", IMAGES)
def test_entry_points_are_commands_of_the_package(name):
    entry = STAGES[name].last_list("ENTRYPOINT")  # without a shell, so that SIGTERM arrives
    assert entry[0] in PROJECT["scripts"]
    command = {"dtckpt": cli, "dtckpt-coordinator": server.main}[entry[0]]
    for sub in entry[1:]:
        command = command.commands[sub]
    arguments = STAGES[name].last_list("CMD")
    if arguments != ["--help"]:
        command.make_context(name, arguments)  # raises for what the command does not take


def test_the_coordinator_listens_where_others_look():
    stage = STAGES["coordinator"]
    serve = server.main.commands["serve"]
    params = serve.make_context("serve", stage.last_list("CMD")).params
    assert params["host"] == "0.0.0.0"  # the kubelet probes the pod's address
    assert stage.last("EXPOSE").split()[0] == str(params["port"])


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "**"
    for line in STAGES["build"].all("COPY"):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert any(fnmatch.fnmatch(source, rule[1:]) for rule in rules if rule.startswith("!"))


@pytest.fixture
def image(tmp_path):
    """Return an environment in which Python finds the packages of the coordinator's image, and nothing else."""
    for name in closure(coordinator_packages()):
        for file in metadata.files(name):
            top = file.parts[0]
            if top != ".." and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(metadata.distribution(name).locate_file(top))
    return {
        "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'server'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": os.environ["PATH"],
    }


def test_the_coordinator_image_holds_no_torch(image):
    assert coordinator_packages() <= names_of(PROJECT["dependencies"])
    assert closure(coordinator_packages()).isdisjoint({"torch", "tensorstore", "numpy"})
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import torch"], env=image, check=False, capture_output=True, text=True
    )
    assert "No module named 'torch'" in done.stderr


def test_the_coordinator_serves_with_what_is_in_its_image(image):
    with serving([], image) as process:
        assert process.stdout.readline().startswith("listening on ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143


@pytest.mark.skipif(
    subprocess.run([*READ_ONLY, "true"], check=False, capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)
def test_the_coordinator_serves_on_a_read_only_root(image):
    with serving([*READ_ONLY], image, "--port-file", "/dtckpt-port") as process:
        assert process.wait(timeout=30) != 0  # the root is read-only indeed
        assert "Read-only file system" in process.stderr.read()
    with serving([*READ_ONLY], image) as process:
        assert process.stdout.readline().startswith("listening on ")


def test_all_versions_in_the_coordinator_image_are_given():
    given = names_of((ROOT / "constraints.txt").read_text().splitlines())
    assert closure(coordinator_packages()) <= given
