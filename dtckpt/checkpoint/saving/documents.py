"""The ``zarr.json`` documents of a planned checkpoint: one for each array, the same on all clients.

Clients share the writing. The manifest holds the digest of all, so that a reader can tell a damaged one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan
from dtckpt.format.digest import documents_digest
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.layout import Layout
from dtckpt.storage.zarr_tensorstore import array_metadata, documents


@lru_cache(maxsize=KEPT_STRUCTURES)
def plan_documents(plan: SavePlan) -> tuple[Sequence[tuple[str, bytes]], int]:
    """Return every ``zarr.json`` by its key, and the digest of all; they do not depend on the tensors' elements."""
    arrays: dict[str, bytes] = {}
    for item in plan.tensors:
        spec = item.spec
        before, after = _document_around_name(item.grid, spec.dtype, spec.stored_dtype, spec.codec, spec.layout)
        arrays[item.path] = before + json.dumps(spec.name).encode() + after
    by_key = documents(arrays)
    return list(by_key.items()), documents_digest(by_key.items())


def documents_of_share(plan: SavePlan, position: int, count: int) -> Sequence[tuple[str, bytes]]:
    """Return the documents that one client writes: the client at ``position`` of ``count`` clients."""
    listed, _ = plan_documents(plan)
    return listed[position::count]


_NO_NAME = "\0"
"""Stands for a tensor's name; no tensor can have it."""


@lru_cache(maxsize=4096)
def _document_around_name(
    grid: ChunkGrid, dtype: str, stored_dtype: str, codec: str, layout: Layout | None
) -> tuple[bytes, bytes]:
    """Return the text before and after the name in the ``zarr.json`` of all tensors of one kind.

    The attributes hold the facts that Zarr has no place for: the name, the dtype, the layout.
    """
    facts: dict[str, Any] = {"name": _NO_NAME, "dtype": dtype}
    if layout is not None:
        facts["mesh"] = {"name": layout.mesh.name, "axes": dict(layout.mesh.axis_sizes)}
        facts["sharding_specs"] = [list(spec) if isinstance(spec, tuple) else spec for spec in layout.sharding_specs]
    text = json.dumps(array_metadata(grid, stored_dtype, codec, {"dtckpt": facts})).encode()
    before, _, after = text.partition(json.dumps(_NO_NAME).encode())
    return before, after
