"""The cost of conversions between plain tensors and DTensors, beside PyTorch's, for equal arguments again and again.

Run: ``torchrun --nproc-per-node 2 -m benchmarks.local_conversions``. Tensors of 8x8 on a line of clients, one device
each. The two take turns; times are the best of some rounds, on client 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.distributed.tensor.experimental as their_experimental
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.results import show
from dtckpt import dtensor as ours
from dtckpt.dtensor import experimental as our_experimental

ROUNDS, CALLS, WARM_UP = 7, 200, 20


def calls_of(api: ModuleType, experimental: ModuleType, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, by name."""
    rows, whole = [api.Shard(0)], [api.Replicate()]
    plain, leaf = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)

    def from_local(local: torch.Tensor, placements: Any) -> Any:
        return api.DTensor.from_local(local, mesh, placements, run_check=False)

    tensor, with_gradient = from_local(plain, rows), from_local(leaf, rows)
    added = experimental.local_map(torch.add, out_placements=rows, in_placements=(rows, rows))
    return {
        "from_local, sharded": lambda: from_local(plain, rows),
        "from_local, replicated": lambda: from_local(plain, whole),
        "from_local, with gradient": lambda: from_local(leaf, rows),
        "to_local": tensor.to_local,
        "to_local, with gradient": with_gradient.to_local,
        "local_map": lambda: added(tensor, tensor),
        "local_map, with gradient": lambda: added(with_gradient, with_gradient),
        "distribute_tensor, sharded": lambda: api.distribute_tensor(plain, mesh, rows),
        "distribute_tensor, replicated": lambda: api.distribute_tensor(plain, mesh, whole),
        "redistribute to the same": lambda: tensor.redistribute(mesh, rows),
    }


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of one call, the mean of a round."""
    for _ in range(WARM_UP):
        call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    clients = dist.get_world_size()
    our_calls = calls_of(ours, our_experimental, ours.init_device_mesh("cpu", (clients,), mesh_dim_names=("x",)))
    their_mesh = init_device_mesh("cpu", (clients,), mesh_dim_names=("x",))
    their_calls = calls_of(theirs, their_experimental, their_mesh)
    table = Table("call", "dtckpt", "PyTorch", "ratio")
    for name in our_calls:
        times = [(seconds_of(our_calls[name]), seconds_of(their_calls[name])) for _ in range(ROUNDS)]
        one, other = map(min, zip(*times, strict=True))
        table.add_row(name, f"{one * 1e6:.1f} us", f"{other * 1e6:.1f} us", f"{one / other:.2f}")
    if dist.get_rank() == 0:
        show(table, width=100)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
