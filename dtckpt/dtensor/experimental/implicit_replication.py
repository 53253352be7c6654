"""`implicit_replication`: take plain tensors beside DTensors for replicated without comparing clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtckpt.dtensor.operators.plans import trust_plain_tensors_in_all_threads


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors beside DTensors for replicated in a ``with`` block, without comparing the clients' values.

    Outside of such a block they count as replicated too, but clients compare their values first. Blocks may be nested,
    and hold for all threads, as PyTorch's do.
    """
    with trust_plain_tensors_in_all_threads():
        yield
