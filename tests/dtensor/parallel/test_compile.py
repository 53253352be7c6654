"""`torch.compile` around parallel modules: the graph breaks where styles convert values, and results are right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtckpt import abstract_mesh
from dtckpt.dtensor import Replicate, Shard
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

pytestmark = pytest.mark.together("compilers")  # each worker would import them


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# PyTorch's compiler reads the gradients of tensors that it finds at the start of a graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_parallel_model_trains(backend):
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Linear(6, 5))
    whole, rows = Replicate(), Shard(1)
    module = parallelize_module(
        copy.deepcopy(plain),
        abstract_mesh({"tp": 1}),
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(),
            "2": PrepareModuleInput(input_layouts=Shard(2), desired_input_layouts=Shard(2), use_local_output=True),
            "3": RowwiseParallel(output_layouts=rows),
            "4": ColwiseParallel(input_layouts=rows, use_local_output=False),
            "": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=Shard(2), use_local_output=False),
        },
    )
    x, targets = torch.randn(2, 3, 6), torch.arange(6) % 5
    wanted = F.cross_entropy(plain(x).flatten(0, 1), targets)
    wanted.backward()
    with loss_parallel():
        loss = F.cross_entropy(torch.compile(module, backend=backend)(x).flatten(0, 1), targets)
        loss.backward()
    torch.testing.assert_close(loss.detach().full_tensor(), wanted.detach())
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
