"""Signals that announce the end of a process, to it and to processes that it has forked."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtckpt import CheckpointManager
from dtckpt.checkpoint.managing import signal_watch

from . import loader_cases

WAIT_S = 60


@pytest.fixture
def heard():
    """The signals that the handler of before the watch has got."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("before"))
    yield heard
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("failure", [None, ZeroDivisionError])
def test_a_signal_that_nobody_can_act_on_any_more_does_what_it_did_before(tmp_path, failure, heard, caplog):
    with (
        contextlib.nullcontext() if failure is None else pytest.raises(failure),
        CheckpointManager(tmp_path).preemption(signal.SIGUSR1),
    ):
        signal.raise_signal(signal.SIGUSR1)
        assert heard == []
        if failure is not None:
            raise failure
    assert heard == ([] if failure is None else ["before"])
    assert ("SIGUSR1 came, but the training loop failed" in caplog.text) == (failure is not None)


def test_the_end_of_a_watch_goes_on_if_the_handler_of_another_signal_raises(heard, caplog):
    """As PyTorch's handler of SIGCHLD does if a worker of a DataLoader has died."""

    def fail(*_):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        raise RuntimeError("a worker died")

    def is_answered():
        signal.raise_signal(signal.SIGUSR2)
        return False

    before = signal.getsignal(signal.SIGUSR2)

    def train():
        with signal_watch.SignalWatch(is_answered).watch(signal.SIGUSR1):
            signal.signal(signal.SIGUSR2, fail)
            signal.raise_signal(signal.SIGUSR1)
            raise ConnectionResetError

    try:
        with pytest.raises(ConnectionResetError):
            train()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == ["before"]
    assert "SIGUSR1 came, but the training loop failed" in caplog.text


def test_a_forked_process_does_not_watch_for_signals(tmp_path, heard):
    with CheckpointManager(tmp_path).preemption(signal.SIGUSR1):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(len(heard))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert heard == []


@pytest.mark.share(1)
@pytest.mark.processes
@pytest.mark.parametrize("start", ["fork", "spawn ignored", "spawn failed"])
def test_workers_of_a_loader_that_get_the_signal_too(tmp_path, start):
    """As a launcher ends a client: with its process group."""
    method, _, case = start.partition(" ")
    program = [sys.executable, str(Path(loader_cases.__file__)), str(tmp_path / "root"), method, case]
    errors = tmp_path / "errors.txt"
    with (
        errors.open("wb") as file,
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True) as job,
    ):
        try:
            assert job.stdout.readline() == "running\n", errors.read_text()
            os.killpg(job.pid, signal.SIGTERM)
            output, _ = job.communicate(timeout=WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    if case == "failed":
        assert job.returncode == -signal.SIGTERM
        assert "SIGTERM came, but the training loop failed" in errors.read_text()
        # PyTorch raises the last two if a worker dies while it hands over a batch.
        reasons = r"The failure: (RuntimeError\('DataLoader worker|ConnectionResetError|EOFError)"
        assert re.search(reasons, errors.read_text())
    else:
        assert (output, job.returncode) == ("True\n", 0), errors.read_text()


@pytest.mark.parametrize(("state", "status"), [("watching", -signal.SIGUSR1), ("noted", 7), ("over", 0)])
def test_a_worker_leaves_a_signal_that_its_parent_has_noted(tmp_path, monkeypatch, heard, state, status):
    monkeypatch.setattr(signal_watch, "PARENT_S", 0.0)
    with CheckpointManager(tmp_path).preemption(signal.SIGUSR1):
        ready, begin = os.pipe()
        child = os.fork()
        if child == 0:
            signal_watch.loader_signals._set_worker_signal_handlers()
            os.read(ready, 1)
            signal.raise_signal(signal.SIGUSR1)
            os._exit(7)
        if state == "noted":
            signal.raise_signal(signal.SIGUSR1)
        if state != "over":
            os.write(begin, b"1")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    if state == "over":
        os.write(begin, b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert heard == []
