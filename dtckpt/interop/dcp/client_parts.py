"""The messages of a save's ranks to the coordinator when they have written, and the state tree made of them.

A rank digests its copy of every item that others have, too, whether it writes the item or not. The coordinator
compares before the commit, and raises the errors of `dtckpt.save`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dtckpt.checkpoint.leaves import dtype_name, host_array
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving import plan as saving_plan
from dtckpt.checkpoint.saving.plan import SavePlan, TensorSpec
from dtckpt.checkpoint.saving.replica_check import log_differing, mismatch_error
from dtckpt.checkpoint.saving.replica_rules import ReplicaRules, Role
from dtckpt.checkpoint.saving.union import validate_same_kind
from dtckpt.errors import SaveDisagreementError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union
from dtckpt.format.digest import as_bytes, bytes_digest
from dtckpt.format.manifest import PhaseCost
from dtckpt.interop.dcp.state_items import is_path, name_of, path_of, tree_of
from dtckpt.interop.dcp.write_plan import TensorBoxes, boxes_of_results, plan_written
from dtckpt.layout.layout import Layout
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
class RankCopies:
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
_CURE = "give values that differ by rank distinct keys, for example the global numbers of experts"


def validate_copies(
    copies: Mapping[int, RankCopies], names: Mapping[str, str], texts: Mapping[str, str], rules: ReplicaRules
) -> None:
    """Check that the ranks' copies are equal; log the names of tensors that differ and may.

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
            if (rule := rules.choose(name, role)) is saving_plan.CopyRule.EQUAL:
                raise mismatch_error(name, Region(offset, next(iter(holders)).box), list(holders.values()), _CURE)
            noted += [name] if rule is saving_plan.CopyRule.NOTED else []
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


@dataclass(frozen=True, slots=True, eq=False)
class ClientPart:
    """A rank's message to the coordinator about the part that it has written.

    Args:
        token: The attempt that it wrote to.
        topic: The topic of its plan.
        chunk_list: Digest of the file of its chunk list; None if it has written nothing.
        dtypes: The dtypes in which it has written tensors, by name.
        values: The nodes of its items that are no tensors, by key.
        inner: The tensors inside of these items.
        layouts: The layouts of its tensors, by name.
        copies: Its copies of items that others have, too.
        costs: Cost of its phases.
    """

    token: str
    topic: bytes
    chunk_list: int | None
    dtypes: Mapping[str, str]
    values: Mapping[str, trees.Node]
    inner: tuple[TensorBoxes, ...]
    layouts: Mapping[str, Layout]
    copies: RankCopies
    costs: Mapping[str, PhaseCost]


def parts_of(results: Sequence[Sequence[WriteResult]], token: str) -> dict[int, ClientPart]:
    """Return the parts that come with the results; ranks with nothing to write or to compare are left out.

    Args:
        results: The results of all ranks.
        token: The coordinator's attempt.

    Raises:
        SaveDisagreementError: A rank has written with another writer, or to another attempt.
    """
    parts: dict[int, ClientPart] = {}
    for client, each in enumerate(results):
        part = getattr(each, "part", None)
        if part is None and not each:
            continue
        if not isinstance(part, ClientPart):
            raise SaveDisagreementError(
                f"rank {client} has not written with a DtckptStorageWriter; its results are a {type(each).__name__}"
            )
        if part.token != token:
            raise SaveDisagreementError(
                f"rank {client} has written for another save; got {part.token!r}, expected {token!r}; nothing was "
                "committed"
            )
        parts[client] = part
    return parts


def plan_of_parts(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], parts: Mapping[int, ClientPart], options: SaveOptions
) -> tuple[SavePlan, trees.Node]:
    """Return the plan of everything that the ranks have written, and the state tree.

    Args:
        metadata: The metadata that DCP's planner has made.
        results: The results of all ranks.
        parts: The parts that come with the results.
        options: See `SaveOptions`.

    Raises:
        SaveDisagreementError: No rank has written an item in the metadata, or a rank has written other items, or by
            another plan; or ranks have different values under one key.
        ComponentError: Ranks have tensors of different shapes or dtypes under one name.
        ReplicaMismatchError: Ranks have tensors with different elements under one name.
        TensorNameError: Names of tensors lead through others.
        TreeError: Two items are at one place, or the planner adds other data to the metadata.
    """
    inner = tuple(tensor for part in parts.values() for tensor in part.inner)
    layouts: dict[str, Layout] = {}
    for part in reversed(list(parts.values())):  # the first rank's layout counts
        layouts |= part.layouts
    tensors = boxes_of_results(metadata, results)
    paths = {key: path_of(key, [metadata.planner_data]) for key in metadata.state_dict_metadata}
    validate_copies(
        {client: part.copies for client, part in parts.items()},
        {key: tensor.name for key, tensor in tensors.items()},
        {key: name_of(path) for key, path in paths.items()},
        ReplicaRules(options),
    )
    dtypes = _dtypes(tensors.values(), parts)
    plan = plan_written(tuple(tensors.values()), inner, dtypes, layouts, options=options, num_clients=len(results))
    if strangers := [client for client, part in parts.items() if part.topic != plan.topic]:
        raise SaveDisagreementError(
            f"rank {strangers[0]} has not written by the plan of all ranks; nothing was committed; if the planner "
            "caches plans, make one without enable_plan_caching"
        )
    return plan, _tree(metadata, tensors, parts)


def _dtypes(tensors: Iterable[TensorBoxes], parts: Mapping[int, ClientPart]) -> dict[str, str]:
    """Return the dtypes in which the tensors were written, by name; all ranks must agree on each."""
    writers: dict[str, dict[str, list[int]]] = {}
    for client, part in parts.items():
        for name, dtype in part.dtypes.items():
            writers.setdefault(name, {}).setdefault(dtype, []).append(client)
    for tensor in tensors:
        if len(found := writers.get(tensor.name, {})) > 1:
            validate_kinds(tensor.name, ((clients, tensor.shape, dtype) for dtype, clients in found.items()))
    return {name: dtype for name, (dtype, *_) in writers.items()}


def _tree(metadata: Metadata, tensors: Mapping[str, TensorBoxes], parts: Mapping[int, ClientPart]) -> trees.Node:
    paths, items = metadata.planner_data, metadata.state_dict_metadata
    if paths is not None and not (isinstance(paths, Mapping) and all(map(is_path, paths.values()))):
        raise TreeError(
            f"the planner has its own data for the metadata, which is not stored; got {type(paths).__name__}, "
            "expected the paths of flattened keys; save it as an item of the state dict"
        )
    values = {key: node for part in parts.values() for key, node in part.values.items()}
    if lost := [key for key in items if key not in tensors and key not in values]:
        raise SaveDisagreementError(f"no rank has written item {lost[0]!r}; nothing was committed")
    # In the order of the state dict; the metadata has the order of the ranks that write.
    keys = dict.fromkeys((*(key for key in paths or () if key in items), *items))
    return tree_of(
        {path_of(key, [paths]): {"tensor": tensors[key].name} if key in tensors else values[key] for key in keys}
    )
