"""Bytes that a device receives in a change of layout, for all pairs of layouts: dtckpt, the least possible, PyTorch.

Nothing is sent: ours follow from the plan, PyTorch's from the collectives that it starts in a simulated process group
(for S -> S' on CPU that is an all-gather; where ours takes one exchange it is at the least possible, whatever PyTorch
does).
Collectives count as on a ring: all-gather and reduce-scatter over n members bring each (n - 1) / n of the larger
tensor, an all-reduce twice that.

Run: ``python -m benchmarks.received_bytes``.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import dtckpt
from benchmarks.results import show
from dtckpt.dtensor.debug import explain

CLIENTS = 8
MESHES = ((8,), (2, 4), (2, 2, 2))
SHAPE = (64, 32)
OURS = {"S0": dtckpt.Shard(0), "S1": dtckpt.Shard(1), "R": dtckpt.Replicate(), "P": dtckpt.Partial()}
THEIRS = {"S0": theirs.Shard(0), "S1": theirs.Shard(1), "R": theirs.Replicate(), "P": theirs.Partial()}


class Received(TorchDispatchMode):
    """Adds up the bytes that this client receives."""

    nbytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "wait_tensor" in name or "wrap_tensor" in name or "c10d" not in name:
            return result
        size = dist.get_world_size() if not isinstance(args[-1], str) else _group_size(args[-1])
        if "all_gather" in name or "all_to_all" in name:
            self.nbytes += result.nbytes * (size - 1) / size
        elif "reduce_scatter" in name:
            self.nbytes += args[0].nbytes * (size - 1) / size
        elif "all_reduce" in name:
            self.nbytes += 2 * args[0].nbytes * (size - 1) / size
        else:
            raise ValueError(f"a collective that is not counted: {name}")
        return result


def _group_size(name: str) -> int:
    group: Any = name  # a type of PyTorch's own
    return dist.distributed_c10d._resolve_process_group(group).size()


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=CLIENTS, store=FakeStore())
    table = Table(title=f"bytes received over all pairs of layouts of {SHAPE}, {CLIENTS} clients, of float32")
    columns = ("mesh", "pairs", "not Partial", "of these least possible", "more than PyTorch", "dtckpt", "PyTorch")
    for column in columns:
        table.add_column(column)
    for axes in MESHES:
        table.add_row("x".join(map(str, axes)), *map(str, _compare(axes)))
    show(table, width=120)
    dist.destroy_process_group()


def _compare(axes: tuple[int, ...]) -> list[int]:
    mesh = _mesh(axes)
    device_mesh = init_device_mesh("cpu", axes)
    pairs = moves = least = more = ours_sum = theirs_sum = 0
    layouts = list(itertools.product(OURS, repeat=len(axes)))
    for source, target in itertools.product(layouts, repeat=2):
        if any(new == "P" != old for old, new in zip(source, target, strict=True)):
            continue  # making terms moves nothing
        before, after = (
            dtckpt.Layout.from_placements(mesh, [OURS[item] for item in layout], 2) for layout in (source, target)
        )
        found = explain(before, after, SHAPE, torch.float32)
        ours = found.devices[0].received
        worst = max(device.received for device in found.devices)
        peer = _theirs(device_mesh, source, target, before.region(0, SHAPE).shape)
        pairs += 1
        is_move = "P" not in source
        moves += is_move
        least += is_move and all(device.received == device.lower_bound for device in found.devices)
        more += worst > peer
        ours_sum, theirs_sum = ours_sum + ours, theirs_sum + int(peer)
    return [pairs, moves, least, more, ours_sum, theirs_sum]


def _theirs(device_mesh: Any, source: Sequence[str], target: Sequence[str], shape: tuple[int, ...]) -> float:
    tensor = theirs.DTensor.from_local(
        torch.zeros(shape), device_mesh, [THEIRS[item] for item in source], run_check=False
    )
    with Received() as received:
        tensor.redistribute(placements=[THEIRS[item] for item in target])
    return received.nbytes


def _mesh(axes: tuple[int, ...]) -> dtckpt.Mesh:
    """Return a mesh of one device per client, seen from the first."""
    names = [f"/job:worker/replica:0/task:{client}/device:CPU:0" for client in range(math.prod(axes))]
    ids = np.arange(len(names)).reshape(axes)
    return dtckpt.Mesh([f"a{axis}" for axis in range(len(axes))], ids, [0], names[:1], "", names)


if __name__ == "__main__":
    main()
