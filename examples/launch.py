"""Start and end the processes of the demo: the coordinator, and torchrun with its clients."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

RUN_TIMEOUT_S = 300.0
HEARTBEAT_TIMEOUT_S = "3"
"""Short, so that the demo is; the default is 60."""


class DemoError(Exception):
    """Something that the demo shows does not hold."""


@contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process whose output goes to a file; when the body is left, end it if it has not ended by itself."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | variables)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(is_done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for something that a process brings about.

    Raises:
        DemoError: The process ended without it, or it took too long.
    """
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while True:
        has_ended = process.poll() is not None
        if is_done():
            return
        if has_ended or time.monotonic() > deadline:
            how = f"ended with {process.returncode}" if has_ended else f"was not done after {RUN_TIMEOUT_S} s"
            lines = log.read_text("utf8", "replace").splitlines()
            said = [line for line in lines if line.startswith("[default")] or lines  # by clients, not by torchrun
            raise DemoError("\n".join([f"a process {how}; {log} says:", *said[-20:]]))
        time.sleep(0.05)


@contextmanager
def coordinator(out: Path) -> Iterator[str]:
    """Run the coordinator on a free port; yield its address."""
    port, log = out / "port", out / "coordinator.log"
    serve = [sys.executable, "-m", "dtckpt_server.main", "serve", "--insecure", "--port", "0", "--port-file", str(port)]
    with running(serve, log, DTCKPT_HEARTBEAT_TIMEOUT_S=HEARTBEAT_TIMEOUT_S) as process:
        wait_until(port.exists, process, log)
        yield f"127.0.0.1:{port.read_text().strip()}"


@contextmanager
def torchrun(
    arguments: list[str], *, job: str, coordinator: str, out: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start clients on this machine; yield torchrun's process and the file that takes the output of all."""
    local = ["--standalone", "--local-addr=127.0.0.1", "--tee=3", f"--log-dir={out / 'torchrun'}"]
    log = out / f"{job}.log"
    with running(
        [sys.executable, "-m", "torch.distributed.run", *local, *arguments],
        log,
        DTCKPT_COORDINATOR=coordinator,
        DTCKPT_JOB=job,
        DTCKPT_HEARTBEAT_TIMEOUT_S=HEARTBEAT_TIMEOUT_S,
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    ) as process:
        yield process, log
