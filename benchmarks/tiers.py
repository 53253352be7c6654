"""The local tier: the time that saves block, their cost for training, and the time of a restore after a loss.

Run: ``torchrun --standalone --nproc-per-node 4 -m benchmarks.tiers [--mib 512] [--tensors 64] [--rounds 5]``.
Each client counts as a separate host, with a directory in ``/dev/shm`` for a tier. Each holds a quarter of every
tensor.

* blocks: seconds until a save with two copies returns, beside a plain copy of the same bytes into ready memory.
* steps: a training step multiplies matrices for about half a second; steps with a save every tenth, and without.
* restore: one host's tier is removed, and a new manager restores into ready memory, beside a restore of the same bytes
  from files in the page cache. The root is removed before, so nothing can come from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import dtckpt
from benchmarks.results import show

LOST = 1
STEPS, EVERY = 20, 10


def slowest(seconds: float) -> float:
    """Return the seconds of the client that took longest. Collective: over all clients."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def timed(work: Callable[[], object]) -> float:
    """Return how long work takes on the slowest client. Collective: over all clients."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return slowest(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtckpt.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp(dir=arguments.folder), tempfile.mkdtemp(dir="/dev/shm")]
    dist.broadcast_object_list(shared, src=0)
    root, tiers = map(Path, shared)
    rows = max(1, (arguments.mib << 20) // (arguments.tensors * 4 * 1024 * size)) * size
    local = [torch.randn(rows // size, 1024) for _ in range(arguments.tensors)]
    layout = dtckpt.Layout(["x", dtckpt.UNSHARDED], dtckpt.create_distributed_mesh([("x", size)]))
    state = {f"t{number}": dtckpt.pack([part], layout, (rows, 1024)) for number, part in enumerate(local)}
    ready = [torch.zeros_like(part) for part in local]
    tier = dtckpt.LocalTier(path=tiers / str(rank), host=f"host{rank}", every_steps=1, address="127.0.0.1")
    options = dtckpt.SaveOptions(fsync=False)
    matrix = torch.randn(1000, 1000)

    def copy() -> None:
        for target, source in zip(ready, local, strict=True):
            target.copy_(source)

    def change() -> None:
        # As AdamW does. A partner gets changed pieces only, so without a change nothing would be sent.
        for part in local:
            part.add_(1)

    def train(save: Callable[[int], object], first: int) -> None:
        for step in range(first, first + STEPS):
            for _ in range(20):
                matrix @ matrix
            dist.barrier()  # as a step of data parallel training
            if step % EVERY == 0:
                change()
                save(step)

    results: dict[str, list[float]] = {name: [] for name in ("copy", "block", "alone", "saving")}
    with dtckpt.CheckpointManager(root, local=tier, save_interval_steps=10**9, options=options) as manager:
        for step in range(1, 4):
            change()
            manager.save(step, state)
            manager.wait()
        for number in range(arguments.rounds):
            results["copy"].append(timed(copy))
            handles: list[Any] = []
            change()
            results["block"].append(timed(lambda: handles.append(manager.save(10 + number, state))))  # noqa: B023
            manager.wait()
            results["alone"].append(timed(lambda: train(lambda _: None, 0)))
            results["saving"].append(timed(lambda: train(lambda step: manager.save(step, state), 100 * (number + 1))))  # noqa: B023
            manager.wait()
        sender = manager._tier.session.replicator if manager._tier else None
        sent = sender.nbytes_sent if sender else 0
        saves = 3 + arguments.rounds * (1 + STEPS // EVERY)
        dist.barrier()
    part = sum(each.nbytes for each in local)
    peers, files, received = restores(arguments.rounds, root, rank, tier, state)
    if rank == 0:
        print_results(arguments, size, results | {"peers": peers, "files": files}, [sent / saves, received, part])
        shutil.rmtree(root)
        shutil.rmtree(tiers)
    dist.destroy_process_group()


def restores(
    rounds: int, root: Path, rank: int, tier: dtckpt.LocalTier, state: dict[str, dtckpt.DTensor]
) -> tuple[list[float], list[float], int]:
    """Return seconds of restores from the hosts, with one lost, and from files; and the bytes between hosts of one."""
    path = root.parent / f"{root.name}-files"
    dtckpt.save(path, state, options=dtckpt.SaveOptions(fsync=False))
    if rank == 0:
        shutil.rmtree(root)
        root.mkdir()
    target: dict[str, Any] = {name: tensor.clone() for name, tensor in state.items()}
    peers: list[float] = []
    files: list[float] = []
    received = 0
    for number in range(rounds + 1):
        files.append(timed(lambda: dtckpt.restore(path, target)))
        if rank == LOST:
            shutil.rmtree(tier.path)
        with dtckpt.CheckpointManager(root, local=tier) as manager:
            restored: list[dtckpt.RestoredStep] = []
            peers.append(timed(lambda: restored.append(manager.restore(target=target))))  # noqa: B023
            assert restored[0].local is not None
            total = torch.tensor([restored[0].local.received_nbytes])
            dist.all_reduce(total)
            received = int(total)
            dist.barrier()
        for name, tensor in target.items():
            assert torch.equal(dtckpt.unpack(tensor)[0], dtckpt.unpack(state[name])[0]), (number, name)
    if rank == 0:
        shutil.rmtree(path)
    return peers[1:], files[1:], received


def print_results(
    arguments: argparse.Namespace, size: int, seconds: dict[str, list[float]], nbytes: Sequence[float]
) -> None:
    """Print the table.

    Args:
        arguments: Those of the command.
        size: Number of hosts.
        seconds: Of each round, by the name of the measurement.
        nbytes: Bytes that a client sent for a save, that came to the lost host in a restore, and of a part.
    """
    median = {name: statistics.median(values) for name, values in seconds.items()}
    sent, received, part = nbytes

    def ratio(one: str, other: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)):.2f}"

    title = f"{arguments.mib} MiB, {size} hosts, {os.cpu_count()} cores, 2 copies, median of {arguments.rounds}"
    table = Table("what", "", "beside", "ratio", "wanted", title=title)
    for what, one, other, label, wanted in (
        ("a save blocks", "block", "copy", "host copy", "<= 1.2"),
        (f"{STEPS} steps, a save every {EVERY}", "saving", "alone", "without", "<= 1.05"),
        ("restore, a host lost", "peers", "files", "from files", "<= 1.5"),
    ):
        table.add_row(what, f"{median[one]:.3f} s", f"{label} {median[other]:.3f} s", ratio(one, other), wanted)
    mib = float(1 << 20)
    for what, each, wanted in (
        ("bytes sent for a save", sent, "<= 1"),
        ("bytes to the lost host", received, "<= 1.05"),
    ):
        table.add_row(what, f"{each / mib:.0f} MiB", f"a part {part / mib:.0f} MiB", f"{each / part:.2f}", wanted)
    show(table, width=120)


if __name__ == "__main__":
    main()
