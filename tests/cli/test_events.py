"""docs/events.md names every JSON event of every command, with its keys."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from safetensors.torch import save_file
from support.coordinators import running_server
from support.states import packed, tensor_of

import dtckpt
from dtckpt import Layout, abstract_mesh
from dtckpt.cli import commands, convert

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
ROW = re.compile(r"^\| `?(\w+)`? \| `(\w+)` \| (.+) \|$", re.M)
DOCUMENTED = {(command, event): keys for command, event, keys in ROW.findall(PAGE.read_text())}


def keys_of(command, event):
    """Return the keys that the page promises, and whether there may be more."""
    promised, comma, _ = DOCUMENTED[command, event].partition(", and")
    return {"event", *re.findall(r"`(\w+)`", promised)}, bool(comma)


@pytest.fixture
def root(tmp_path):
    mesh = abstract_mesh({"x": 2})
    whole = packed(tensor_of("w", (4, 2), "float32"), Layout(["x", "unsharded"], mesh))
    with dtckpt.CheckpointManager(tmp_path / "run", keep=3) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": whole, "at": step})
    dtckpt.save(tmp_path / "damaged", {"w": torch.ones(4)}, options=dtckpt.SaveOptions(kvstore="zarr"))
    (chunk,) = [file for file in (tmp_path / "damaged").rglob("c/*") if file.is_file()]
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    local = dtckpt.LocalTier(path=tmp_path / "tier", every_steps=1)
    with dtckpt.CheckpointManager(tmp_path / "tiered", local=local) as manager:
        manager.save(1, {"w": whole})
    (tmp_path / "run" / ".step_4.dtckpt-new-0123456789abcdef").mkdir()
    return tmp_path


def damaged_root(root):
    """Copy the damaged checkpoint into a root; return the root."""
    shutil.copytree(root / "damaged", root / "damaged_run" / "step_00000001")
    return root / "damaged_run"


def key_in(folder):
    """Write a private key; return its path."""
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(key)
    return folder / "key.pem"


def lines(root):
    """Yield arguments that together make every event but the events of `status`."""
    step, other = root / "run" / "step_00000001", root / "run" / "step_00000002"
    yield "inspect", "--chunks", step
    yield "verify", step
    yield "verify", root / "damaged"
    yield "diff", step, other
    yield "cat", step, "w"
    yield "cat", "--stats", step, "w"
    yield "cat", step, "at"
    yield "ls", root / "run"
    yield "tiers", root / "tiered"
    yield "gc", root / "run", "--keep", "1", "--min-age", "0"
    yield "plot", step, "w", "-o", root / "w.svg"
    yield "plot", step, "--mesh", "x=1", "-o", root / "t.svg"
    yield "reshard", step, root / "new", "--mesh", "x=2"
    yield "reshard", step, root / "newer", "--mesh", "x=2", "--workers", "1"
    yield "convert", root / "model.safetensors", root / "converted"
    yield "simulate", "llama-3-8b", "--mesh", "dp=2,tp=2", "--to-mesh", "x=2"
    yield "copy", root / "run", root / "copies"
    yield "scrub", root / "run"
    yield "scrub", damaged_root(root)
    yield "sign", step, "--key", key_in(root)
    yield "cat", root / "nothing", "w"


def test_events_have_the_keys_of_the_page(run, root, monkeypatch):
    monkeypatch.setattr(convert, "PROGRESS_S", 0.0)
    seen = set()
    with running_server(heartbeat_timeout_s=60.0) as server:
        asked = [*lines(root), ("status", "--coordinator", f"127.0.0.1:{server.port}")]
        for command, *args in asked:
            for event in run(command, "--json", *args).events:
                name = ("all" if event["event"] == "error" else command), event["event"]
                promised, may_have_more = keys_of(*name)
                assert event.keys() == promised or (may_have_more and event.keys() > promised), name
                seen.add(name)
    # The tests of `status` and of `live` have these.
    assert seen == DOCUMENTED.keys() - {("status", "unreachable"), ("live", "live"), ("live", "unreachable")}


def test_every_command_with_json_is_on_the_page():
    options = {name: {each.name for each in command.params} for name, command in commands.cli.commands.items()}
    with_json = {name for name, names in options.items() if "as_json" in names}
    assert with_json == {command for command, _ in DOCUMENTED} - {"all"}
