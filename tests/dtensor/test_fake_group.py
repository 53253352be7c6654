"""Programs with DTensors run dry under PyTorch's ``fake`` process group: shapes are right, values are not."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=int(sys.argv[1]), world_size=4)
import dtckpt
from dtckpt import DTensor, Layout, Replicate, Shard
from dtckpt.dtensor import distribute_tensor
from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtckpt.errors import LayoutError

mesh = dtckpt.create_distributed_mesh([("x", 4)])
rows = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
made = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
shapes = [
    rows.full_tensor().shape == (10,),
    rows.redistribute(placements=[Replicate()]).to_local().shape == (10,),
    rows.redistribute(placements=[Shard(0)]).shape == (10,),
    made.shape == (12, 2),
    DTensor.from_local(torch.ones(3, 2), mesh, [Shard(1)], run_check=True).shape == (3, 8),
    dtckpt.pack([torch.ones(3)], Layout(["x"], mesh)).shape == (12,),
    rows.sum().full_tensor().shape == (),
    torch.nn.functional.dropout(rows).shape == (10,),
]
try:
    rows.redistribute(placements=[Shard(3)])
except LayoutError:
    shapes.append(True)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    out = net(torch.ones(4, 8))
    out.sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
shapes.append(out.shape == (4, 8))
print(shapes)
"""


@pytest.mark.share(1)
@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 3])
def test_dry_run(rank):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rank)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == str([True] * 10), done.stderr
