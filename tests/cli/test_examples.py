"""Every example of every ``--help`` and of docs/cli.md, run as a process in a pipe and on a terminal."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from support.coordinators import running_server
from support.states import packed

import dtckpt
from dtckpt.checkpoint.tiers.status import STATUS_NAME
from dtckpt.cli.commands import cli
from dtckpt.coordination.api import Member
from dtckpt.coordination.grpc_client import GrpcCoordination

from .conftest import run_on_terminal, run_process

DOC = Path(__file__).parents[2] / "docs" / "cli.md"
EXAMPLES = sorted(
    {
        *(
            match[1].strip()
            for command in cli.commands.values()
            for match in re.finditer(r"(?m)^  dtckpt (.+?)(?:  .*)?$", (command.epilog or "").partition("Examples:")[2])
        ),
        *(match[1] for match in re.finditer(r"(?m)^\$ dtckpt (.+)$", DOC.read_text())),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    mesh = dtckpt.abstract_mesh({"data": 2, "model": 2})
    for step in (100, 200):
        weight = packed(torch.rand(8, 8), dtckpt.Layout(["data", "model"], mesh))
        dtckpt.save(folder / f"step_{step}", {"model": {"w": weight}, "step": step})
    local = dtckpt.LocalTier(path=folder / "tier", every_steps=50, copies=1, host="host3")
    with dtckpt.CheckpointManager(folder / "run", is_async=False, local=local) as manager:
        for step in range(0, 500, 50):
            manager.save(step, {"w": torch.ones(4)}, metrics={"loss": step})
    dtckpt.reshard(folder / "step_100", folder / "step_100_for_8", mesh=dtckpt.abstract_mesh({"x": 8}))
    dtckpt.convert(folder / "step_100", folder / "model.safetensors", select="model/*", rename={"model/*": "*"})
    (folder / "Llama-3-8B").mkdir()
    dtckpt.convert(folder / "step_100", folder / "Llama-3-8B", to="safetensors", overwrite=True, select="model/*")
    key = Ed25519PrivateKey.generate()
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for name in ("key.pub", "release.pub"):
        (folder / name).write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    for step in ("step_100", "run/step_00000100"):
        dtckpt.sign(folder / step, folder / "key.pem")
    # What stands for storage elsewhere.
    for name in ("archive", "scratch", "metrics"):
        (folder / name).mkdir()
    for name in ("run", "step_100"):
        dtckpt.copy(folder / name, folder / "bucket" / name)
    shutil.copy(folder / "run" / STATUS_NAME, folder / "bucket" / "run")
    (folder / "runs" / "dcp").mkdir(parents=True)
    dtckpt.convert(folder / "step_100", folder / "runs" / "dcp" / "step_100", to="dcp")
    return folder


def test_every_command_has_examples():
    commands = {example.split()[0] for example in EXAMPLES}
    assert commands == cli.commands.keys()


@pytest.fixture
def coordinator(monkeypatch):
    """A coordinator with a job, at which the environment points."""
    with running_server(heartbeat_timeout_s=60.0) as server:
        address = f"127.0.0.1:{server.port}"
        monkeypatch.setenv("DTCKPT_COORDINATOR", address)
        client = GrpcCoordination(address, Member("run", 0, 1, 1))
        client.register()
        yield address
        client.leave()


TRIED_ELSEWHERE = ("--watch", "--map", "live://")
"""In the tests of `status`, of maps, which are for models of a known shape, and of live versions."""


@pytest.mark.share(4)
@pytest.mark.parametrize("run", [run_process, run_on_terminal], ids=["pipe", "terminal"])
@pytest.mark.parametrize("example", [each for each in EXAMPLES if not any(text in each for text in TRIED_ELSEWHERE)])
def test_example(folder, example, run, coordinator):
    here = {
        "host3,host7": "host3", "s3://bucket": f"file://{folder}/bucket", "localhost:50051": coordinator,
        "/archive": f"{folder}/archive", "/scratch": f"{folder}/scratch", "/var/lib/node_exporter": f"{folder}/metrics",
    }  # fmt: skip
    for text, own in here.items():
        example = example.replace(text, own)
    command, *args = shlex.split(example)
    if command == "convert":  # another example, or this one in another run, may have written there
        args += ["--overwrite", "--dry-run"]
    elif command == "reshard" and "--dry-run" not in args:
        args += ["--overwrite"]
    result = run(command, *args, cwd=folder)
    # A slow machine is told of the progress.
    assert not re.sub(r"(?m)^dtckpt: resharding: .*\n", "", result.err)
    assert result.code == (1 if command == "diff" and "step_200" in args else 0), result
    assert result.out
    assert "Traceback" not in result.out
