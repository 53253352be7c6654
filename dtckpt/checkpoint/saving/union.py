"""The union of the states of a save's clients, from their descriptions: the holders of each box of each tensor; pure.

A `Description` is text that the other clients can read. Clients compare digests of their descriptions; where these
differ, they read each other's descriptions and plan the union (`dtckpt.checkpoint.saving.agree`).

Clients may pass different tensors, as the stages of a pipeline do, and one tensor on different meshes, as clients do
whose meshes are slices of one. The save writes the union: each client that passes a tensor holds the boxes that its own
layout gives it, and equal boxes are copies of one value::

    client 0 passes    a (rows 0..4 by client 0, rows 4..8 by client 1)    b (by all)
    client 1 passes    a (the same)                                        c (by all)
    union              a: rows 0..4 by 0, rows 4..8 by 1    b: by 0        c: by 1

Every client comes to the same union, or to the same error, from the descriptions of all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, CopyRule, Holding, TensorSpec
from dtckpt.errors import ComponentError, SaveDisagreementError, TensorPartMissingError, capped
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region

Clients = tuple[int, ...]
Claim = tuple[Clients, TensorSpec]
"""Some clients, ascending, and a tensor as all of them describe it."""

PARTS_CURE = (
    "if clients hold parts of one parameter, as experts are, say so by dtckpt.Shards.mark(module, ...), or wrap the "
    "tensor in dtckpt.Shards"
)
"""Advice in errors where clients pass different tensors as one parameter."""
_PAIRS_AT_ONCE = 1 << 20
"""Boxes are compared in pairs, so many at a time."""


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
        copies=CopyRule(copies),
        is_parameter=is_parameter,
    )


@lru_cache(maxsize=KEPT_STRUCTURES)
def described(specs: tuple[TensorSpec, ...], values: tuple[str, ...]) -> tuple[bytes, int]:
    """Return the text of a description and its digest; they are kept for later saves of the same spec objects."""
    data = Description(specs, values).to_bytes()
    return data, bytes_digest(data)


def unite(descriptions: Mapping[Clients, Description]) -> tuple[TensorSpec, ...]:
    """Return the tensors of a save whose clients pass different things.

    Args:
        descriptions: The different descriptions, by the clients that share each; the lowest client's comes first.

    Raises:
        ComponentError: Clients disagree on a tensor's shape, dtype or layout.
        TensorPartMissingError: No client passes a part of a tensor.
    """
    claims: dict[str, list[Claim]] = {}
    for clients, description in descriptions.items():
        for spec in description.specs:
            claims.setdefault(spec.name, []).append((clients, spec))
    # By the claims but for their names: tensors that are alike share their holdings, and so their plan.
    holdings: dict[tuple[object, ...], tuple[Holding, ...]] = {}
    united: list[TensorSpec] = []
    for name, each in claims.items():
        key = tuple((clients, id(spec.holdings)) for clients, spec in each)
        validate_same_kind(name, each)
        if key not in holdings:
            holdings[key] = _united_holdings(name, each)
        # All clients take the same one, so all write the same layout into the manifest.
        first = each[0][1]
        united.append(
            TensorSpec(
                name,
                first.shape,
                first.dtype,
                first.stored_dtype,
                holdings[key],
                first.layout,
                first.content,
                codec=first.codec,
                # Copies may differ if all clients say so.
                copies=next((spec.copies for _, spec in each if spec.copies is CopyRule.EQUAL), first.copies),
                is_parameter=any(spec.is_parameter for _, spec in each),
            )
        )
    return tuple(united)


@lru_cache(maxsize=KEPT_STRUCTURES)
def passed_by_all(specs: tuple[TensorSpec, ...], clients: Clients) -> tuple[TensorSpec, ...]:
    """Return the tensors of a save whose clients all pass the same; they are kept, as the plan is.

    Raises:
        TensorPartMissingError: A part of a tensor is on other clients.
    """
    everyone = set(clients)
    kept: dict[int, bool] = {}
    for spec in specs:
        # Tensors that are alike share one tuple of holdings, so each tuple is looked at once.
        if id(spec.holdings) not in kept:
            kept[id(spec.holdings)] = all(everyone.issuperset(holding.clients) for holding in spec.holdings)
    # The usual case: only these clients hold boxes, and the specs stay the same objects.
    return specs if all(kept.values()) else unite({clients: Description(specs, ())})


def validate_same_names(descriptions: Mapping[Clients, Description], per_client: Collection[str] = ()) -> None:
    """Check that all clients pass tensors and plain values of the same names.

    Args:
        descriptions: The different descriptions, as for `unite`.
        per_client: Paths below which names may differ by client.

    Raises:
        SaveDisagreementError: A name is missing on some clients.
    """
    names = {
        clients: {
            # Below a PerClient names differ on purpose: its path stands for all of them.
            next((path for path in per_client if name.startswith(f"{path}/")), name)
            for name in (*(spec.name for spec in description.specs), *description.values)
        }
        for clients, description in descriptions.items()
    }
    everything = set().union(*names.values())
    for name in sorted(everything):
        holders = _clients_of(clients for clients, own in names.items() if name in own)
        others = _clients_of(clients for clients, own in names.items() if name not in own)
        if others:
            raise SaveDisagreementError(
                f"{_these(holders)} pass {name!r} and {_these(others)} do not; pass the same names on every client, "
                "or save with SaveOptions(keys='union')"
            )


def validate_same_kind(name: str, claims: Sequence[Claim]) -> None:
    """Check that clients describe a tensor alike.

    Raises:
        ComponentError: The clients disagree on its shape or dtype.
    """
    clients, first = claims[0]
    for others, spec in claims[1:]:
        if _kind(spec) != _kind(first):
            raise ComponentError(
                f"{_these(clients)} and {_these(others)} disagree on tensor {name!r}; got {_kind_text(first)} and "
                f"{_kind_text(spec)}; {_cure(claims[0], (others, spec))}pass the same tensor on every client that "
                "passes the name, or give other tensors other names"
            )


def _cure(*claims: Claim) -> str:
    """Return, for an error about two claims on a tensor, how to save them as parts of one tensor, if they may be."""
    if all(spec.layout is None for _, spec in claims):
        return f"{PARTS_CURE}; else " if any(spec.is_parameter for _, spec in claims) else ""
    held = [box.region.shape for clients, spec in claims for box in spec.holdings if clients[0] in box.clients]
    if any(spec.layout is None for _, spec in claims) or len(held) < 2 or held[0] == held[1]:
        return ""
    return f"parts of dtckpt.Shards that differ in size, here of shapes {held[0]} and {held[1]}, need size=; else "


def _kind(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype, spec.stored_dtype, spec.codec


def _kind_text(spec: TensorSpec) -> str:
    stored = "" if spec.stored_dtype == spec.dtype else f" stored as {spec.stored_dtype}"
    return f"shape {spec.shape} {spec.dtype}{stored}"


def _united_holdings(name: str, claims: Sequence[Claim]) -> tuple[Holding, ...]:
    """Return the boxes of a tensor, each with the clients that hold it and pass the tensor."""
    holders: dict[Region, set[int]] = {}
    for clients, spec in claims:
        for holding in spec.holdings:
            # The layout names all holders on its mesh; only clients that pass the tensor can write the box.
            holders.setdefault(holding.region, set()).update(set(clients).intersection(holding.clients))
    united = tuple(Holding(box, tuple(sorted(clients))) for box, clients in holders.items() if clients)
    layouts = {frozenset(holding.region for holding in spec.holdings) for _, spec in claims}
    # Boxes of one layout are apart. Boxes of two layouts may overlap, and then it is unknown whose elements count.
    if len(layouts) > 1 and (clash := _first_overlap([holding.region for holding in united])):
        one, other = (united[number] for number in clash)
        raise ComponentError(
            f"{_these(one.clients)} and {_these(other.clients)} disagree on the layout of tensor {name!r}; got "
            f"{one.region} and {other.region}, which overlap; shards of one tensor must be equal or apart"
        )
    _validate_nothing_lost(name, claims, united)
    return united


def _validate_nothing_lost(name: str, claims: Sequence[Claim], united: Sequence[Holding]) -> None:
    """Check that the clients hold every box that their layouts name."""
    # The boxes are apart, so counting their elements tells whether all are there.
    numel = sum(holding.region.numel for holding in united)
    held = {holding.region for holding in united}
    for clients, spec in claims:
        # Slices of a larger tensor need not cover it.
        if numel >= sum(holding.region.numel for holding in spec.holdings):
            continue
        lost = next(holding for holding in spec.holdings if holding.region not in held)
        raise TensorPartMissingError(
            f"a part of tensor {name!r} would be missing: in the layout that {_these(clients)} pass, {lost.region} is "
            f"on {_these(lost.clients)}, where this save gets the tensor in another layout or not at all; pass a "
            "sharded tensor on every client of its mesh"
        )


def _first_overlap(boxes: Sequence[Region]) -> tuple[int, int] | None:
    """Return the numbers of two boxes that overlap; None if all are apart."""
    if len(boxes) < 2 or not boxes[0].ndim:
        return None  # all boxes of a scalar are one box
    starts = np.array([box.offset for box in boxes])
    stops = np.array([box.stop for box in boxes])
    rows = max(1, _PAIRS_AT_ONCE // len(boxes))
    # Some rows of the table of all pairs at a time: 100 000 boxes have 10 billion pairs.
    for first in range(0, len(boxes), rows):
        some = slice(first, first + rows)
        # Two boxes overlap if, in every dim, each begins before the other ends.
        meets = (starts[some, None] < stops[None]).all(axis=-1) & (starts[None] < stops[some, None]).all(axis=-1)
        pairs = np.argwhere(meets)
        pairs[:, 0] += first
        # Each pair once, and no box with itself.
        ordered = pairs[pairs[:, 0] < pairs[:, 1]]
        if ordered.size:
            one, other = ordered[0].tolist()
            return one, other
    return None


def _clients_of(groups: Iterable[Clients]) -> Clients:
    return tuple(sorted(client for group in groups for client in group))


def _these(clients: Sequence[int]) -> str:
    return f"client {clients[0]}" if len(clients) == 1 else f"clients {capped(clients)}"
