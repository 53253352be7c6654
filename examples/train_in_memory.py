"""FSDP2 with checkpoints in the memory of the hosts. Here each process counts as a separate host, and one can be lost:

torchrun --nproc-per-node 4 --max-restarts 1 -m examples.train_in_memory --checkpoints ckpt --lose 1 --at 13

Host 1 then loses its memory and its process in step 13. torchrun starts all processes anew, and they go on from step
10: three hosts read it in their own memory, and host 1 gets its share from the host that holds the copy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dtckpt
from examples.tiny_training import ShardedLoader, TinyModel, argument_parser, mean_over_clients

EVERY = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Run one process; process 0 notes losses and restores in the file ``<checkpoints>.jsonl``."""
    parser = argument_parser(__doc__)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm/dtckpt-example"), help="directory in memory")
    parser.add_argument("--lose", type=int, default=-1, help="the host that is lost, once")
    parser.add_argument("--at", type=int, default=0, help="the step in which it is lost")
    args = parser.parse_args(argv)
    dtckpt.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    memory = args.memory / f"host{rank}"

    def note(**facts: object) -> None:
        if rank == 0:
            with open(f"{args.checkpoints}.jsonl", "a") as file:
                print(json.dumps({"attempt": attempt, **facts}), file=file)

    torch.manual_seed(0)
    model = TinyModel(args.dropout)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ShardedLoader(rank, dist.get_world_size())
    torch.manual_seed(rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "loader": dtckpt.PerClient(loader, on_resize="modulo"),
        "rng": dtckpt.PerClient(dtckpt.RngState(), on_resize="keep"),
    }
    local = dtckpt.LocalTier(path=memory, host=f"host{rank}", every_steps=EVERY, copies=2)
    # The first step goes to ``--checkpoints`` too, and no other one here.
    with dtckpt.CheckpointManager(args.checkpoints, local=local, save_interval_steps=1000) as manager:
        start = 1
        if manager.latest_step() is not None:
            begin = time.monotonic()
            restored = manager.restore(target=state)
            start = restored.step + 1
            received = torch.tensor([restored.local.received_nbytes if restored.local else 0])
            dist.all_reduce(received)
            note(
                restored=restored.step,
                from_root=restored.local is None,
                seconds=time.monotonic() - begin,
                received_nbytes=int(received),
            )
        for step, (rows, targets) in zip(range(start, args.steps + 1), loader.batches(), strict=False):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = mean_over_clients(loss)
            note(step=step, loss=mean)
            manager.save(step, state)
            if step == args.at and attempt == 0:
                manager.wait()
                dist.barrier()
                if rank == args.lose:
                    shutil.rmtree(memory)
                    os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
