"""Training that goes on with fewer and with more processes, without a restart of the processes that stay.

    python -m examples.resize

Four processes train a model under FSDP2. One leaves in good order, a new one comes, and one is killed:

    4 clients   steps 1 to 3
    3           a step is saved, and client 1 leaves               no step is lost
    4           a new process comes: it reads from the others      no step is lost
    3           a process is killed: part of the state is gone     all go back to the newest step in memory

Here this process tells the others who goes on. In a real job that is the part of its supervisor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dtckpt

ANSWER_S = 300.0
EVERY_STEPS = 2
"""Steps from one save in memory to the next."""


def make_state() -> dict[str, Any]:
    """Return a model that is sharded over the present clients, its optimizer, and a count of steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "step": 0}


def train_step(state: dict[str, Any]) -> float:
    """Train one step on the whole batch, which all clients see: so the loss does not depend on their number."""
    rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(state["step"]))
    loss = (state["model"](rows) - rows[:, :4].sin()).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["step"] += 1
    return float(loss.detach())


def run_client(pipe: Connection, checkpoints: Path, number: int) -> None:
    """Train in one world after the other, as the messages of the pipe say."""
    host = f"host{number}"
    local = dtckpt.LocalTier(path=checkpoints / "memory" / host, every_steps=EVERY_STEPS, host=host)
    with dtckpt.CheckpointManager(checkpoints / "run", local=local, save_interval_steps=1000) as manager:
        state: dict[str, Any] | None = None
        while (message := pipe.recv()) is not None:
            world, is_first, last, is_saved = message
            # The process group is made anew, and the tensors for the state on its mesh. The rest is `resize`.
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.update(world)
            dtckpt.init_process_group("gloo")
            target, lost, reason = make_state(), 0, ""
            if not is_first:
                step = None if state is None else state["step"]
                resized = manager.resize(state, step=step, target=target)
                lost, reason = resized.steps_lost, resized.reason
            state, losses = target, {}
            while state["step"] < last:
                loss = train_step(state)
                losses[state["step"]] = loss
                manager.save(state["step"], state, force=is_saved and state["step"] == last)
            manager.wait()
            dist.barrier()
            pipe.send((lost, reason, losses))


class Supervisor:
    """Starts and ends processes, and tells them who goes on."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._processes: dict[int, tuple[Any, Connection]] = {}
        self._num_worlds = 0

    def start(self, number: int) -> None:
        """Start a process."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=run_client, args=(theirs, self._checkpoints, number), daemon=True)
        process.start()
        theirs.close()
        self._processes[number] = process, pipe

    def run(self, numbers: Sequence[int], *, last: int, is_saved: bool = False) -> tuple[int, str, Mapping[int, float]]:
        """Let processes train to a step, as clients 0, 1, ...; return the steps lost, the reason, and the losses."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(numbers))}
        for rank, number in enumerate(numbers):
            self._processes[number][1].send(({**world, "RANK": str(rank)}, not self._num_worlds, last, is_saved))
        self._num_worlds += 1
        answers = []
        for number in numbers:
            if not self._processes[number][1].poll(ANSWER_S):
                raise TimeoutError(f"process {number} did not answer")
            answers.append(self._processes[number][1].recv())
        return answers[0]

    def end(self, number: int, *, is_killed: bool = False) -> None:
        """End a process, in good order or not."""
        process, pipe = self._processes.pop(number)
        if is_killed:
            process.kill()
        else:
            pipe.send(None)
        process.join(ANSWER_S)
        pipe.close()


def main(argv: Sequence[str] | None = None) -> list[tuple[int, int, Mapping[int, float]]]:
    """Run the example; return the number of clients, the steps lost and the losses of each world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="folder of the checkpoints; default: a new one")
    checkpoints = parser.parse_args(argv).checkpoints or Path(tempfile.mkdtemp(prefix="resize-"))
    job, told = Supervisor(checkpoints), []

    def train(numbers: Sequence[int], *, last: int, is_saved: bool = False) -> None:
        lost, reason, losses = job.run(numbers, last=last, is_saved=is_saved)
        told.append((len(numbers), lost, losses))
        print(f"{len(numbers)} clients, steps lost: {lost}{f' ({reason})' if reason else ''}")
        for step, loss in losses.items():
            print(f"  step {step}: loss {loss:.6f}")

    for number in range(5):
        job.start(number)
    train([0, 1, 2, 3], last=3, is_saved=True)
    job.end(1)
    train([0, 2, 3], last=5)
    train([0, 2, 3, 4], last=7)
    job.end(2, is_killed=True)
    train([3, 0, 4], last=9)
    for number in (0, 3, 4):
        job.end(number)
    return told


if __name__ == "__main__":
    main()
