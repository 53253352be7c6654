"""Compare the ranks' copies of tensors and values, of which DCP's planner has one rank write each.

A rank digests its copy of every item that others have, too, whether it writes the item or not. The coordinator
compares before the commit, and raises the errors of `dtckpt.save`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dtckpt.checkpoint.leaves import dtype_name, host_array
from dtckpt.checkpoint.saving import plan as saving_plan
from dtckpt.checkpoint.saving.plan import TensorSpec
from dtckpt.checkpoint.saving.replica_check import log_differing, mismatch_error
from dtckpt.checkpoint.saving.replica_rules import ReplicaRules, Role
from dtckpt.checkpoint.saving.union import validate_same_kind
from dtckpt.errors import SaveDisagreementError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union
from dtckpt.format.digest import as_bytes, bytes_digest
from dtckpt.layout.region import Region

_NODE_NBYTES = 1 << 10
"""A value whose JSON is longer is compared by its digest: the coordinator gets one of each rank."""

Numbers = tuple[int, ...]
CopyPlace = tuple[str, Numbers]
"""DCP's key of a tensor, or the name of a tensor inside of a value; and the offset of the box."""


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A rank's copy of a box of a tensor.

    Args:
        digest: Digest of its elements.
        box: Shape of the box.
        shape: Global shape of the tensor.
        dtype: Dtype name.
    """

    digest: int
    box: Numbers
    shape: Numbers
    dtype: str

    @classmethod
    def of(cls, memory: torch.Tensor, shape: Numbers) -> TensorCopy:
        """Digest the memory of a box."""
        return cls(
            bytes_digest(as_bytes(host_array(memory)).data), tuple(memory.shape), shape, dtype_name(memory.dtype)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A rank's copies of the items that other ranks have, too.

    Args:
        tensors: Its copies of tensors.
        values: Its values as `comparable` nodes, by key.
    """

    tensors: Mapping[CopyPlace, TensorCopy]
    values: Mapping[str, trees.Node]


def comparable(node: trees.Node) -> trees.Node:
    """Return a node that is equal for equal nodes, and short."""
    data = trees.dump(node)
    return node if len(data) <= _NODE_NBYTES else {"digest": f"{bytes_digest(data):016x}"}


_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Last parts of the names of a BatchNorm's buffers: DCP's items do not name their modules."""
_CURE = "give what differs by rank a key of its own on each rank, as experts of their global numbers"


def validate_copies(
    copies: Mapping[int, Copies], names: Mapping[str, str], texts: Mapping[str, str], rules: ReplicaRules
) -> None:
    """Check that the ranks' copies are equal; log the names of those that differ and may.

    Args:
        copies: The copies, by rank.
        names: Names of the tensors, by DCP's key.
        texts: Paths of the values in the state tree, by key.
        rules: Say which tensors may differ, beside the statistics of BatchNorm.

    Raises:
        ComponentError: Ranks have tensors of different shapes or dtypes under one name.
        ReplicaMismatchError: Their elements differ.
        SaveDisagreementError: Ranks have different values under one key.
    """
    tensors: dict[CopyPlace, dict[TensorCopy, list[int]]] = {}
    values: dict[str, dict[int, trees.Node]] = {}
    for client, own in copies.items():
        for place, copy in own.tensors.items():
            tensors.setdefault(place, {}).setdefault(copy, []).append(client)
        for key, node in own.values.items():
            values.setdefault(key, {})[client] = node
    noted: list[str] = []
    for (key, offset), holders in sorted(tensors.items()):
        if len(holders) > 1:
            name = names.get(key, key)
            validate_kinds(name, ((clients, copy.shape, copy.dtype) for copy, clients in holders.items()))
            role = Role(may_differ=re.split(r"[./]", name)[-1] in _STATISTICS)
            if (rule := rules.choose(name, role)) is saving_plan.Copies.EQUAL:
                raise mismatch_error(name, Region(offset, next(iter(holders)).box), list(holders.values()), _CURE)
            noted += [name] if rule is saving_plan.Copies.NOTED else []
    log_differing(noted)
    for key, nodes in sorted(values.items()):
        first = next(iter(nodes.values()))
        if any(node != first for node in nodes.values()):
            tree_union.unite({client: _at(texts[key], node) for client, node in nodes.items()})
            # DCP stores one of them whole, where `save` would unite the dicts inside.
            raise SaveDisagreementError(
                f"clients {min(nodes)} to {max(nodes)} save different dicts at {texts[key]!r}; DCP stores one as a "
                "whole; pass the same on every client"
            )


def validate_kinds(name: str, kinds: Iterable[tuple[list[int], Numbers, str]]) -> None:
    """Check that clients pass a tensor of one shape and dtype.

    Args:
        name: The tensor's name.
        kinds: Clients, with shape and dtype of the tensor that they pass.

    Raises:
        ComponentError: The clients disagree.
    """
    claims = [(tuple(clients), TensorSpec(name, shape, dtype, dtype, ())) for clients, shape, dtype in kinds]
    validate_same_kind(name, claims)


def _at(text: str, node: trees.Node) -> trees.Node:
    """Return a tree that has a node at a path, for errors that name the path."""
    for key in reversed(text.split("/")):
        node = {"dict": [[key, node]]}
    return node
