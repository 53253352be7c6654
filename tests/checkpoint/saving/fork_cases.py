"""Programs of the tests of forks: a process saves all the time, and forks children that use checkpoints or not."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import dtckpt
from checkpoint.client_cases import tree_on
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import DtckptError, ForkedProcessError

CHILD_S = 30.0
"""A child that lives longer than this hangs. It reports itself how soon it raised; a whole exit takes a second."""
EXIT_CODE = 7
STEPS = 2
"""Saves of `fork_from_a_client`, each with a child on each client."""


def fork_during_saves(root: str, seed: int, num_children: int) -> None:
    """Fork children at random instants of saves; print a line for each: what it did, its exit code, what it says."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own warning of forks
    chance = random.Random(seed)
    tree = {f"w{number}": torch.rand(1 << 16) for number in range(40)}
    with dtckpt.CheckpointManager(Path(root) / "run", keep=2) as manager:
        handle = manager.save(0, tree)
        handle.result()
        checkpoint = dtckpt.open_checkpoint(manager.path(0))
        manager.save(1, tree)
        is_over = threading.Event()

        def save_all_the_time() -> None:
            nonlocal handle
            step = 1
            while not is_over.is_set():
                step += 1
                handle = manager.save(step, tree)

        uses: dict[str, Callable[[], object]] = {
            "save": lambda: dtckpt.save(f"{root}/child", {"a": torch.ones(3)}),
            "save_async": lambda: dtckpt.save_async(f"{root}/child", {"a": torch.ones(3)}),
            "restore": lambda: dtckpt.restore(manager.path(0)),
            "open_checkpoint": lambda: dtckpt.open_checkpoint(manager.path(0)),
            "read": lambda: checkpoint.read("w3"),
            "verify": checkpoint.verify,
            "result": lambda: handle.result(),  # noqa: PLW0108  (the newest handle)
            "wait": lambda: handle.wait(),  # noqa: PLW0108
            "manager.save": lambda: manager.save(10**6, tree),
            "manager.restore": manager.restore,
            "manager.wait": manager.wait,
            "barrier": lambda: current_coordination().barrier("b", timeout_s=CHILD_S),
            "job_status": dtckpt.job_status,
            "initialize_multi_client": dtckpt.initialize_multi_client,
            # These are a child's right.
            "close": manager.close,
            "shutdown": dtckpt.shutdown_multi_client,
            "sum": lambda: torch.ones(3).sum(),
        }
        saving = threading.Thread(target=save_all_the_time)
        saving.start()
        for number in range(num_children):
            time.sleep(chance.random() * 0.05)
            name = sorted(uses)[(seed * num_children + number) % len(uses)]
            hears, tells = os.pipe()
            child = os.fork()
            if child == 0:
                use(uses[name], tells, exits=number % 4 == 0)
            os.close(tells)
            code = ended(child)
            with open(hears) as said:
                print(name, code, said.read() if code == EXIT_CODE else "", flush=True)
        is_over.set()
        saving.join()


def use(work: Callable[[], object], tells: int, *, exits: bool) -> None:
    """Do something in a child, tell what became of it and how long it took, and end; some by the whole way out."""
    start = time.monotonic()
    try:
        work()
        said = "done"
    except DtckptError as error:
        said = type(error).__name__
    os.write(tells, f"{said} {time.monotonic() - start:.3f}".encode())
    if exits:
        sys.exit(EXIT_CODE)
    os._exit(EXIT_CODE)


def ended(child: int) -> int:
    """Wait for a child, as long as it may take; return its exit code."""
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def fork_from_a_client(root: str) -> None:
    """Fork children of one of several clients, amid saves; check that all end as they should."""
    warnings.simplefilter("ignore", DeprecationWarning)
    dtckpt.init_process_group("gloo")
    mesh = dtckpt.create_distributed_mesh([("x", dtckpt.num_clients())])
    tree = tree_on(mesh, {f"w{number}": ((512, 256), "float32", ["x", "unsharded"]) for number in range(8)}, "w")
    with dtckpt.CheckpointManager(root) as manager:
        for step in range(STEPS):
            handle = manager.save(step, tree)
            child = os.fork()
            if child == 0:
                try:
                    handle.result() if step % 2 else current_coordination().barrier("b", timeout_s=CHILD_S)
                except ForkedProcessError:
                    sys.exit(EXIT_CODE)
                os._exit(1)
            assert ended(child) == EXIT_CODE
    dtckpt.shutdown_multi_client()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_from_a_client(sys.argv[1])
