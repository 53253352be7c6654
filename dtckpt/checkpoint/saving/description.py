"""`Description`: what one client passes to a save, as text that the other clients can read; pure.

Clients compare the digests of their descriptions. Where these differ, they read each other's descriptions and plan
from the union of all (`dtckpt.checkpoint.saving.union`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, Copies, Holding, TensorSpec
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """One client's description of the state.

    Args:
        specs: The tensors that it passes, each as it would be if all clients passed it.
        values: The paths of the plain values that it passes, in the order of its tree.
    """

    specs: tuple[TensorSpec, ...]
    values: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the text; equal descriptions give equal bytes on all clients."""
        meshes: dict[Mesh, int] = {}
        kinds: dict[tuple[Any, ...], int] = {}
        tensors: list[tuple[str, int]] = []
        for spec in self.specs:
            # Most tensors of a model are like others; those share the object of their holdings, too.
            placed = id(spec.holdings), spec.shape, spec.layout
            kept = spec.dtype, spec.stored_dtype, spec.codec, spec.copies, spec.is_parameter
            tensors.append((spec.name, kinds.setdefault((*placed, *kept), len(kinds))))
        by_kind = {kind: spec for spec, (_, kind) in zip(self.specs, tensors, strict=True)}
        described = [_kind_to_json(by_kind[kind], meshes) for kind in range(len(kinds))]
        texts = [mesh.portable().to_string() for mesh in meshes]
        facts = {"meshes": texts, "kinds": described, "tensors": tensors, "values": self.values}
        return json.dumps(facts, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Description:
        """Read the text of another client's description."""
        facts = json.loads(data)
        meshes = [Mesh.from_string(text) for text in facts["meshes"]]
        kinds = [_kind_of_json(kind, meshes) for kind in facts["kinds"]]
        specs = tuple(replace(kinds[kind], name=name) for name, kind in facts["tensors"])
        return cls(specs, tuple(facts["values"]))


def _kind_to_json(spec: TensorSpec, meshes: dict[Mesh, int]) -> list[Any]:
    layout = None
    if spec.layout is not None:
        layout = [meshes.setdefault(spec.layout.mesh, len(meshes)), spec.layout.sharding_specs]
    holdings = [[holding.region.offset, holding.region.shape, holding.clients] for holding in spec.holdings]
    return [spec.shape, spec.dtype, spec.stored_dtype, holdings, layout, spec.codec, spec.copies, spec.is_parameter]


def _kind_of_json(kind: Sequence[Any], meshes: Sequence[Mesh]) -> TensorSpec:
    shape, dtype, stored_dtype, holdings, placed, codec, copies, is_parameter = kind
    boxes = tuple(Holding(Region(tuple(at), tuple(size)), tuple(clients)) for at, size, clients in holdings)
    layout = None
    if placed is not None:
        mesh, specs = placed
        layout = Layout([tuple(spec) if isinstance(spec, list) else spec for spec in specs], meshes[mesh])
    return TensorSpec(
        "",
        tuple(shape),
        dtype,
        stored_dtype,
        boxes,
        layout,
        codec=codec,
        copies=Copies(copies),
        is_parameter=is_parameter,
    )


@lru_cache(maxsize=KEPT_STRUCTURES)
def described(specs: tuple[TensorSpec, ...], values: tuple[str, ...]) -> tuple[bytes, int]:
    """Return the text of a description and its digest; they are kept for later saves of the very same specs."""
    data = Description(specs, values).to_bytes()
    return data, bytes_digest(data)
