"""Cases of clients that call `initialize_multi_client` alone, most without a store in the environment."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dtckpt
from dtckpt.comm.default_process_group import attempt_of_default_group
from dtckpt.coordination import multi_client_group


def _forget_store(attempt: int, jobs: str = "", job: str = "") -> None:
    """Leave only what a program for TensorFlow has in its environment."""
    for name in [name for name in os.environ if name.startswith(("MASTER_", "TORCHELASTIC_"))]:
        del os.environ[name]
    client, clients = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ |= {"DTENSOR_CLIENT_ID": client, "DTCKPT_ATTEMPT": str(attempt)}
    os.environ |= {"DTENSOR_JOBS": jobs} if jobs else {"DTENSOR_NUM_CLIENTS": clients}
    os.environ |= {"DTCKPT_JOB": job} if job else {}


def exchange() -> list[Any]:
    """Return what clients get from each other by pack, relayout and a sum."""
    mesh = dtckpt.create_distributed_mesh({"x": 2})
    own = torch.arange(2.0 - dtckpt.client_id()) + 10 * dtckpt.client_id()
    packed = dtckpt.pack([own], dtckpt.Layout(["x"], mesh))
    whole = dtckpt.relayout(packed, dtckpt.Layout(["unsharded"], mesh))
    return [tuple(packed.shape), whole.components[0].tolist(), packed.full_tensor().tolist(), packed.sum().item()]


EXCHANGED = [(3,), [0.0, 1.0, 10.0], [0.0, 1.0, 10.0], 11.0]


def initialize_alone(attempt: int = 0, jobs: str = "", job: str = "", *, dies: bool = False) -> tuple[Any, ...]:
    """Initialize, and leave; see that the group is gone then."""
    _forget_store(attempt, jobs, job)
    dtckpt.initialize_multi_client()
    results = [exchange()]
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    facts = dist.get_backend(), attempt_of_default_group()
    current = dtckpt.coordination.connect.current_coordination()
    current.barrier("all have seen it", timeout_s=30)
    dtckpt.shutdown_multi_client()
    assert not dist.is_initialized()
    return (*results, *facts)


def initialize_at_a_store() -> list[Any]:
    """Initialize under torchrun's variables."""
    dtckpt.initialize_multi_client()
    return exchange()


def initialize_with_a_group() -> bool:
    """Initialize where there is a group, which stays when the client leaves."""
    group = dist.group.WORLD
    dtckpt.initialize_multi_client()
    exchange()
    dtckpt.shutdown_multi_client()
    return dist.group.WORLD is group


def initialize_unreachable() -> bool:
    """Client 0 tells an address of which client 1 knows nothing."""

    _forget_store(0)
    multi_client_group._machine = lambda: ""
    multi_client_group._own_host = lambda *_: "nowhere.invalid"
    multi_client_group.REACH_TIMEOUT = timedelta(seconds=1)
    dtckpt.initialize_multi_client()
    return False


def move_on_a_foreign_mesh() -> tuple[Any, ...]:
    """Move a tensor of ten elements between a mesh whose ids are in no order and one whose ids ascend."""
    mine = [f"/job:worker/replica:0/task:{dtckpt.client_id()}/device:CPU:{i}" for i in range(2)]
    first = 2 * dtckpt.client_id()
    mesh = dtckpt.Mesh.from_string(f"|x=4|3,0,2,1|{first},{first + 1}|{','.join(mine)}")
    whole = torch.arange(10.0)
    parts = [whole[mesh.coordinate(device)[0] * 3 :][:3] for device in mesh.local_device_ids()]
    packed = dtckpt.pack(parts, dtckpt.Layout(["x"], mesh))
    grid = dtckpt.Mesh.from_string(f"|x=2,y=2|3,0,2,1|{first},{first + 1}|{','.join(mine)}")
    copies = packed.redistribute(grid, [dtckpt.Replicate(), dtckpt.Shard(0)])
    ascending = dtckpt.create_distributed_mesh({"y": 2}, local_devices=["CPU:0"])
    moved = copies.redistribute(ascending, [dtckpt.Shard(0)]).redistribute(grid, [dtckpt.Shard(0), dtckpt.Replicate()])
    return packed.full_tensor().tolist(), moved.full_tensor().tolist()
