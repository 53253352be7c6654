"""PyTorch's experimental functions on DTensors, under the same names."""

from collections.abc import Iterator
from contextlib import contextmanager

from dtckpt.dtensor.experimental.context_parallel import context_parallel, context_parallel_unshard
from dtckpt.dtensor.experimental.local_map import local_map
from dtckpt.dtensor.experimental.register_sharding import OperandSpec, register_sharding
from dtckpt.dtensor.operators.plans import trust_plain_tensors_in_all_threads

__all__ = [
    "OperandSpec",
    "context_parallel",
    "context_parallel_unshard",
    "implicit_replication",
    "local_map",
    "register_sharding",
]


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Treat plain tensors beside DTensors as replicated in a ``with`` block, without comparing the clients' values.

    Outside of such a block plain tensors also count as replicated, but clients compare their values first. Blocks may
    be nested, and hold for all threads, as in PyTorch.
    """
    with trust_plain_tensors_in_all_threads():
        yield
