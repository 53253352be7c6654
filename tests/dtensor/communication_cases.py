"""One training step, by our DTensors and by PyTorch's, whose communications are counted; runs in client processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, linear, mse_loss

Counts = dict[str, int]
"""Number of exchanges or collectives, by phase of the step; phases without any are left out."""


def counts(api_name: str, program: str) -> Counts:
    """Return the communications of the second of two equal steps."""
    api = _ours() if api_name == "dtckpt" else _pytorchs()
    torch.manual_seed(0)
    mesh = api.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    step = PROGRAMS[program](api, mesh)
    step(lambda _, work: work())
    found: Counts = {}

    def counted(phase: str, work: Callable[[], Any]) -> Any:
        with api.CommDebugMode() as mode:
            value = work()
        if total := sum(mode.get_comm_counts().values()):
            found[phase] = total
        return value

    step(counted)
    return found


def tensor_parallel(api: Any, mesh: Any, optimizer: Any = torch.optim.AdamW, **options: Any) -> Callable[[Any], None]:
    """An MLP whose first layer is split by rows and whose second layer is split by columns."""
    weights = [
        torch.nn.Parameter(api.distribute_tensor(torch.rand(shape), mesh, [placement]))
        for shape, placement in (((16, 8), api.Shard(0)), ((8, 16), api.Shard(1)), ((8,), api.Replicate()))
    ]
    optimizer = optimizer(weights, lr=0.1, **options)
    x, y, scale = torch.rand(4, 8), torch.rand(4, 8), torch.ones(8)

    def step(run: Callable[[str, Callable[[], Any]], Any]) -> None:
        inputs = run("from_local", lambda: api.DTensor.from_local(x, mesh, [api.Replicate()], run_check=False))
        wanted = run("from_local", lambda: api.DTensor.from_local(y, mesh, [api.Replicate()], run_check=False))
        up, down, bias = weights
        with api.implicit_replication():
            result = run("forward", lambda: (linear(linear(inputs, up).relu(), down) + bias) * scale)
            loss = run("loss", lambda: mse_loss(result, wanted))
            run("backward and gradients", lambda: (loss.backward(), [weight.grad for weight in weights]))
        run("clip", lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0))
        run("optimizer", optimizer.step)
        run("optimizer", optimizer.zero_grad)
        run("loss as a number", lambda: loss.full_tensor().item())

    return step


def data_parallel(api: Any, mesh: Any) -> Callable[[Any], None]:
    """A classifier whose weight is replicated and whose batch is split."""
    weight = torch.nn.Parameter(api.distribute_tensor(torch.rand(8, 8), mesh, [api.Replicate()]))
    optimizer = torch.optim.AdamW([weight])
    x, y = torch.rand(4, 8), torch.arange(4)

    def step(run: Callable[[str, Callable[[], Any]], Any]) -> None:
        inputs = run("from_local", lambda: api.DTensor.from_local(x, mesh, [api.Shard(0)], run_check=False))
        wanted = run("from_local", lambda: api.DTensor.from_local(y, mesh, [api.Shard(0)], run_check=False))
        loss = run("loss", lambda: cross_entropy(linear(inputs, weight), wanted))
        run("backward and gradients", lambda: (loss.backward(), weight.grad))
        run("optimizer", optimizer.step)
        run("optimizer", optimizer.zero_grad)

    return step


def local_functions(api: Any, mesh: Any) -> Callable[[Any], None]:
    """A function of local tensors between operators on DTensors."""
    weight = torch.nn.Parameter(api.distribute_tensor(torch.rand(8, 8), mesh, [api.Shard(0)]))
    doubled = api.local_map(lambda part: part * 2, out_placements=[api.Shard(0)], in_placements=([api.Shard(0)],))

    def step(run: Callable[[str, Callable[[], Any]], Any]) -> None:
        result = run("local_map", lambda: doubled(weight))
        run("backward and gradients", lambda: (result.sum().backward(), weight.grad))
        run("to_local", weight.to_local)

    return step


PROGRAMS: dict[str, Callable[[Any, Any], Callable[[Any], None]]] = {
    "tensor parallel, AdamW": tensor_parallel,
    "tensor parallel, AdamW in a loop": lambda api, mesh: tensor_parallel(api, mesh, foreach=False),
    "tensor parallel, AdamW on lists": lambda api, mesh: tensor_parallel(api, mesh, foreach=True),
    "tensor parallel, fused AdamW": lambda api, mesh: tensor_parallel(api, mesh, fused=True),
    "tensor parallel, SGD": lambda api, mesh: tensor_parallel(api, mesh, torch.optim.SGD, momentum=0.9),
    "data parallel": data_parallel,
    "local functions": local_functions,
}


def _ours() -> Any:
    from dtckpt import dtensor
    from dtckpt.dtensor import debug, experimental

    return _api(dtensor, debug, experimental, dtensor.init_device_mesh)


def _pytorchs() -> Any:
    import torch.distributed.tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import debug, experimental

    return _api(dtensor, debug, experimental, init_device_mesh)


def _api(dtensor: Any, debug: Any, experimental: Any, init_device_mesh: Any) -> Any:
    return SimpleNamespace(
        DTensor=dtensor.DTensor,
        Partial=dtensor.Partial,
        Replicate=dtensor.Replicate,
        Shard=dtensor.Shard,
        distribute_tensor=dtensor.distribute_tensor,
        init_device_mesh=init_device_mesh,
        CommDebugMode=debug.CommDebugMode,
        implicit_replication=experimental.implicit_replication,
        local_map=experimental.local_map,
    )
