"""DTensors and modules made on a mesh: values, memory, agreement between clients, and what is refused."""

import torch

from dtckpt import Replicate, Shard, abstract_mesh
from dtckpt.dtensor import distribute_tensor

WHOLE = torch.arange(42.0).reshape(6, 7)


def test_copies_share_no_memory():
    one = distribute_tensor(WHOLE, abstract_mesh({"x": 1}), [Shard(0)])
    made = one.redistribute(abstract_mesh({"x": 2, "y": 3}), [Replicate(), Replicate()])
    assert len({component.data_ptr() for component in made.components}) == 6
