import os
import pty
import shutil
import subprocess

import pytest
import torch

import dtckpt

from .test_process import COMMAND


@pytest.fixture
def damaged(tmp_path):
    tree = {"w": torch.rand(64, 64), "v": torch.rand(300)}
    dtckpt.save(tmp_path / "s", tree, options=dtckpt.SaveOptions(kvstore="zarr"))
    file = tmp_path / "s" / "w" / "c" / "0" / "0"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    return tmp_path / "s"


def test_sound(run, source, tensors):
    result = run("verify", source)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{source} is sound: 9 tensors, 17 chunks, ")
    (event,) = run("verify", source, "--json", "--threads", "1").events
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    expected = {"tensors": 9, "contents": 8, "chunks": 17, "bytes": nbytes, "damages": 0, "is_sound": True}
    assert event.items() >= {"event": "verified", "path": str(source), **expected}.items()


def test_damaged(run, damaged):
    result = run("verify", damaged)
    assert (result.code, result.err) == (1, "")
    first, last = result.out.splitlines()
    assert first.startswith("damaged: w [0:64, 0:64]: chunk ")
    assert last.startswith(f"{damaged} is DAMAGED in 1 place: 2 tensors, 2 chunks, ")
    result = run("verify", damaged, "--json")
    damage, verified = result.events
    assert result.code == 1
    assert (damage["event"], damage["tensor"], damage["region"]) == ("damage", "w", "[0:64, 0:64]")
    assert (verified["event"], verified["is_sound"], verified["damages"], verified["contents"]) == (
        "verified",
        False,
        1,
        1,
    )


def test_missing_chunks(run, tmp_path):
    dtckpt.save(tmp_path / "s", {"a": torch.rand(64)}, options=dtckpt.SaveOptions(kvstore="zarr"))
    shutil.rmtree(tmp_path / "s" / "a" / "c")
    result = run("verify", tmp_path / "s")
    assert result.code == 1
    assert result.out.startswith("damaged: a [0:64]: cannot find chunk (0,)")


def test_not_found(run, tmp_path):
    run("verify", tmp_path / "none").fails(3, "no checkpoint at")
    run("verify", tmp_path, "--threads", "0").fails(2, "--threads")


def test_a_bar_on_a_terminal(source):
    main_end, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(
        [*COMMAND, "verify", str(source)], stdout=terminal, stderr=terminal, env=environment
    ) as process:
        assert process.wait(60) == 0
    os.close(terminal)
    shown = os.read(main_end, 1 << 16).decode()
    os.close(main_end)
    assert "━" in shown
    assert "is sound" in shown
