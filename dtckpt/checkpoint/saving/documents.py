"""The ``zarr.json`` documents of a planned checkpoint: one for each array and group, the same on all clients.

Clients share the writing. The manifest holds the digest of all, so that a reader can tell a damaged one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan
from dtckpt.format.digest import documents_digest
from dtckpt.format.zarr_documents import documents


@lru_cache(maxsize=KEPT_STRUCTURES)
def plan_documents(plan: SavePlan, *, raw_bits: bool) -> tuple[Sequence[tuple[str, bytes]], int]:
    """Return every ``zarr.json`` by its key, and the digest of all; they do not depend on the tensors' elements.

    Args:
        plan: The plan of the save.
        raw_bits: See `dtckpt.checkpoint.options.SaveOptions`.
    """
    by_key = documents(plan.tensors, raw_bits=raw_bits)
    return list(by_key.items()), documents_digest(by_key.items())


def documents_of_share(
    plan: SavePlan, client: int, clients: Sequence[int], *, raw_bits: bool
) -> Sequence[tuple[str, bytes]]:
    """Return the documents that one client writes; none, if it is not among the clients that share them."""
    if client not in clients:
        return ()
    listed, _ = plan_documents(plan, raw_bits=raw_bits)
    return listed[clients.index(client) :: len(clients)]
