"""PyTorch's experimental functions on DTensors, under the same names."""

from dtckpt.dtensor.experimental.context_parallel import context_parallel, context_parallel_unshard
from dtckpt.dtensor.experimental.implicit_replication import implicit_replication
from dtckpt.dtensor.experimental.local_map import local_map
from dtckpt.dtensor.experimental.register_sharding import OperandSpec, register_sharding

__all__ = [
    "OperandSpec",
    "context_parallel",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "register_sharding",
]
