"""A training program for torchrun. Its values depend neither on how many clients run it nor on what becomes of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dtckpt
from dtckpt.comm import default_process_group

SHAPE = 1003, 8
PRIME = 1_000_003
PACE_S = 0.02
"""A step takes about this long, so that saves are in flight during steps."""


def new_state() -> dict[str, object]:
    """Return the state before the first step, with rows over all clients."""
    mesh = dtckpt.create_distributed_mesh([("data", dtckpt.num_clients())])
    layout = dtckpt.Layout(["data", dtckpt.UNSHARDED], mesh)
    region = layout.region(mesh.local_device_ids()[0], SHAPE)
    values = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)[region.slices()]
    weight, moment = (dtckpt.pack([part], layout) for part in (values.clone(), values.double()))
    return {"weight": weight, "moment": moment, "step": -1}


def advance(state: dict[str, object], step: int) -> None:
    """Do one step: every weight comes to depend on all others, exactly, as integers do not round."""
    (weight,), (moment,) = dtckpt.unpack(state["weight"]), dtckpt.unpack(state["moment"])
    total = weight.sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    weight.mul_(31).add_(total + step).remainder_(PRIME)
    moment.mul_(0.9).add_(weight, alpha=1e-3)
    state["step"] = step


def host_tier(tier: Path) -> dtckpt.LocalTier:
    """Return the local tier of this client, which counts as a separate host."""
    host = f"host{dtckpt.client_id()}"
    return dtckpt.LocalTier(path=tier / host, host=host, every_steps=1, timeout_s=10.0)


def train(folder: Path, steps: int, log: Path, pace_s: float = 0.0, tier: Path | None = None) -> None:
    """Go on from the newest checkpoint up to a step; note each step that is done in a log of all clients.

    With a tier, each step is saved there, and the root gets the first and the last one only; beside the log stands
    what was restored from where.
    """
    state = new_state()
    line = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    local, interval = (None, 3) if tier is None else (host_tier(tier), 10**6)
    with dtckpt.CheckpointManager(folder, keep=2, save_interval_steps=interval, local=local) as manager:
        start = 0
        if manager.latest_step() is not None:
            restored = manager.restore(target=state)
            start = restored.step + 1
            if tier is not None:
                (log.parent / f"restored_{dtckpt.client_id()}_{os.getpid()}").write_text(
                    f"{restored.step} {int(restored.local is not None)}"
                )
        for step in range(start, steps):
            advance(state, step)
            manager.save(step, state, force=step == steps - 1)
            attempt, client = default_process_group.attempt_of_default_group(), dtckpt.client_id()
            os.write(line, f"{attempt} {client} {dtckpt.num_clients()} {os.getpid()} {step} {time.time()}\n".encode())
            time.sleep(pace_s)
    os.close(line)


def main() -> None:
    folder, steps, log, *tier = sys.argv[1:]
    torch.set_num_threads(1)
    dtckpt.init_process_group("gloo")
    train(Path(folder), int(steps), Path(log), PACE_S, *map(Path, tier))
    dtckpt.shutdown_multi_client()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
