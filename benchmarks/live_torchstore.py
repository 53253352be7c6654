"""torchstore through shared memory, for `benchmarks.live`: two writers split by rows, two tensor parallel readers.

Run with torchstore and torchmonarch in ``PYTHONPATH``: ``python live_torchstore.py MIB LAYERS ROUNDS``. Prints the
median seconds of a put and a get. It imports nothing of dtckpt.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import statistics
import sys
import time

import torch
import torchstore
from monarch.actor import Actor, current_rank, endpoint, this_host

MIB, LAYERS, ROUNDS = map(int, sys.argv[1:4])
SIDE = max(64, math.isqrt((MIB << 20) // (2 * LAYERS)) // 64 * 64)
WARM_ROUNDS = 2


class Worker(Actor):
    def __init__(self, reads: bool, port: int) -> None:
        self.rank, self.reads = current_rank().rank, reads
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(self.rank), WORLD_SIZE="2")
        os.environ["LOCAL_RANK"] = str(self.rank)
        torch.set_num_threads(1)

    @endpoint
    async def begin(self) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        dist.init_process_group("gloo", world_size=2, rank=self.rank)
        mesh = init_device_mesh("cpu", (2,))
        self.state = {}
        for number in range(LAYERS):
            dim = number % 2 if self.reads else 0
            part = torch.full((SIDE // 2, SIDE) if dim == 0 else (SIDE, SIDE // 2), 0.0 if self.reads else number + 1.0)
            local = part.to(torch.bfloat16)
            self.state[f"w{number}"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    @endpoint
    async def run(self) -> float:
        start = time.perf_counter()
        if self.reads:
            await torchstore.get_state_dict("v", user_state_dict=self.state)
        else:
            await torchstore.put_state_dict(self.state, "v")
        return time.perf_counter() - start

    @endpoint
    async def is_right(self) -> bool:
        return all((tensor.to_local() == n + 1.0).all() for n, tensor in enumerate(self.state.values()))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def main() -> None:
    writers, readers = (this_host().spawn_procs(per_host={"gpus": 2}) for _ in range(2))
    await torchstore.initialize(num_storage_volumes=2, strategy=torchstore.LocalRankStrategy(), mesh=writers)
    put, get = (procs.spawn(name, Worker, reads, free_port()) for procs, name, reads in
                ((writers, "writers", False), (readers, "readers", True)))  # fmt: skip
    await asyncio.gather(put.begin.call(), get.begin.call())
    seconds = [
        sum([max(found for _, found in await each.run.call()) for each in (put, get)])
        for _ in range(ROUNDS + WARM_ROUNDS)
    ]
    assert all(right for _, right in await get.is_right.call()), "torchstore has other elements"
    print("seconds", statistics.median(seconds[WARM_ROUNDS:]), flush=True)
    await torchstore.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
