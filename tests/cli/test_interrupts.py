"""Ctrl-C at any instant of any command: exit code 130, one line at most, no unfinished output.

The instants begin when the process handles signals; before that, Python starts, and ends in its own way.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt import UNSHARDED, Layout, abstract_mesh
from dtckpt.cli import ls

COMMAND = [sys.executable, "-W", "error", "-m", "dtckpt"]
NUM_INSTANTS = 40
TOGETHER = 4
"""Instants of one case, far from each other: how long a command takes is measured once for all of them."""
COMMANDS = {
    "convert": ["convert", "run/step_00000010", "new", "--to", "dcp"],
    "convert to safetensors": ["convert", "run/step_00000010", "new", "--to", "safetensors"],
    "convert torch": ["convert", "model.pt", "new"],
    "reshard": ["reshard", "run/step_00000010", "new", "--mesh", "x=4", "--quiet"],
    "copy": ["copy", "run", "new", "--quiet"],
    "scrub": ["scrub", "run", "--json"],
    "verify": ["verify", "run/step_00000010"],
    "diff": ["diff", "run/step_00000010", "run/step_00000020"],
    "cat": ["cat", "run/step_00000010", "w", "--stats"],
    "inspect": ["inspect", "run/step_00000010", "--tree"],
    "ls": ["ls", "run", "--json"],
    "gc": ["gc", "run", "--keep", "1"],
    "plot": ["plot", "run/step_00000010", "w", "-o", "new.svg"],
    "simulate": ["simulate", "llama-3-8b", "--mesh", "x=8"],
    "help": ["help"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupts")
    whole = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)
    state = {"w": packed(whole, Layout(["x", UNSHARDED], abstract_mesh({"x": 8}))), "b": torch.ones(3)}
    with dtckpt.CheckpointManager(folder / "run", is_async=False) as manager:
        for step in (10, 20):
            manager.save(step, state, metrics={"loss": step})
    torch.save({"w": whole, "b": torch.ones(3)}, folder / "model.pt")
    return folder


@pytest.fixture(scope="module")
def durations():
    """Seconds that each command takes from the first instant on, as far as it was measured."""
    return {}


def _start(arguments, folder):
    """Start a command; return its process when it handles signals, and the time."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    status = Path(f"/proc/{process.pid}/status")
    while not _catches(status, signal.SIGTERM):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.0005)
    return process, time.monotonic()


def _catches(status, number):
    with suppress(FileNotFoundError):
        line = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        return int(line.split()[1], 16) >> (number - 1) & 1
    return False


def _remove_new(folder):
    for new in folder.glob("new*"):
        if new.is_dir():
            shutil.rmtree(new)
        else:
            new.unlink()


AMID_AN_IMPORT = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except BaseException as error:  # as C++ does, which aborts, and NumPy
    raise ImportError("cannot be imported") from error
"""


class _Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def _drop(tmp_path):
    _Dropped()


def _translate(tmp_path):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        raise RuntimeError("failed") from error


def _import(tmp_path):
    (tmp_path / "interrupted_module.py").write_text(AMID_AN_IMPORT)
    importlib.import_module("interrupted_module")


@pytest.mark.parametrize("what", [_drop, _translate, _import])
def test_an_interrupt_that_is_dropped_or_translated_ends_the_command(run, monkeypatch, tmp_path, what):
    hooks = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    is_ended = []

    def command(**options):
        try:
            what(tmp_path)
            time.sleep(10)
        finally:
            is_ended.append(True)

    monkeypatch.setattr(ls.command, "callback", command)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("ls", tmp_path)
    assert (result.code, result.err, is_ended) == (130, "", [True])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == hooks


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.share(1, of="instants of commands")
@pytest.mark.parametrize("first", range(NUM_INSTANTS // TOGETHER))
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_at_any_instant(folder, durations, command, first):
    _remove_new(folder)
    if command not in durations:
        process, start = _start(COMMANDS[command], folder)
        assert (process.communicate(timeout=120)[1], process.returncode) == ("", 0)
        durations[command] = time.monotonic() - start
    for instant in range(first, NUM_INSTANTS, NUM_INSTANTS // TOGETHER):
        interrupt(folder, command, instant, durations[command])


def interrupt(folder, command, instant, duration):
    """Interrupt a command at one of its instants, and check its output and the files that it leaves."""
    _remove_new(folder)
    before = sorted(os.listdir(folder))
    process, start = _start(COMMANDS[command], folder)
    time.sleep(max(0.0, start + duration * (instant + 0.5) / NUM_INSTANTS - time.monotonic()))
    process.send_signal(signal.SIGINT)
    if instant % 2:
        time.sleep(0.002 * (instant % 7))
        process.send_signal(signal.SIGINT)  # during the cleaning-up, or at the end
    errors = process.communicate(timeout=180)[1]
    left = sorted(os.listdir(folder))
    if process.returncode == 0:  # it was done
        assert errors == ""
        assert set(left) - set(before) <= {"new", "new.svg"}
        return
    assert process.returncode == 130, errors
    assert errors.count("\n") == (command.split()[0] in ("convert", "reshard")), errors
    assert errors == "" or errors.startswith("dtckpt: interrupted, and nothing is committed; to go on: dtckpt "), errors
    assert left == before
