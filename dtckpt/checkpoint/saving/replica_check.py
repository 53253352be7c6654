"""Compare replicas by digests: a client compares its own copies of a value, the leader the copies of all clients.

The digest of a copy of a box is made of the digests of its parts, one for each chunk that the box intersects. A client
that writes a chunk digests it anyway, so its own copy costs nothing more.

Data parallelism keeps parameters equal on all clients, and leaves buffers to each: a BatchNorm has running statistics
of the batches that its client has seen. So a difference between parameters is a defect, and a difference between such
buffers is not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.digests import TensorDigests
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, CopyRule, SavePlan, TensorPlan
from dtckpt.errors import ConfigError, ReplicaMismatchError, capped
from dtckpt.format.digest import Blocks, bytes_digest, digest_chunk
from dtckpt.layout.region import Region

_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules whose buffers are statistics of the batches that a client has seen. A SyncBatchNorm's are of all clients."""


class Role(NamedTuple):
    """The part that a tensor of a state tree has in training.

    Args:
        is_parameter: The tensor is a parameter, or state that an optimizer keeps of a parameter.
        may_differ: The tensor is a buffer that each client keeps for itself.
    """

    is_parameter: bool = False
    may_differ: bool = False


@dataclass(slots=True, eq=False)
class Roles:
    """The roles of the tensors in the states of modules and optimizers."""

    # By id, with the tensor itself, so that no other object gets its id.
    _parameters: dict[int, Any] = field(default_factory=dict)
    _own_buffers: dict[int, Any] = field(default_factory=dict)

    def note(self, owner: Any, state: Any) -> None:
        """Note the tensors in an object's state.

        Args:
            owner: The object.
            state: Its state.
        """
        if not isinstance(state, Mapping):
            return
        if isinstance(owner, nn.Module):
            names = (name for name, _ in owner.named_parameters(remove_duplicate=False))
            self._parameters |= {id(state[name]): state[name] for name in names if name in state}
            self._own_buffers |= {id(state[name]): state[name] for name in _own_buffers(owner) if name in state}
        elif isinstance(owner, Optimizer):
            of_parameters = (own for own in state.get("state", {}).values() if isinstance(own, Mapping))
            self._parameters |= {id(value): value for own in of_parameters for value in own.values()}

    def of(self, leaf: Any) -> Role:
        """Return the role of a tensor of the tree."""
        is_parameter = id(leaf) in self._parameters or (isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return Role(is_parameter, type(leaf) is torch.Tensor and id(leaf) in self._own_buffers)


def _own_buffers(module: nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that each client keeps for itself."""
    outer: list[str] = []
    for name, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        is_inside = any(prefix.startswith(each) for each in outer)
        if not is_inside and _is_data_parallel(inner):
            outer.append(prefix)
            is_inside = True
        if is_inside or isinstance(inner, _STATISTICS):
            yield from (prefix + buffer for buffer, _ in inner.named_buffers(recurse=False, remove_duplicate=False))


def _is_data_parallel(module: nn.Module) -> bool:
    # A module can be one of FSDP2 only if the program has imported that already.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, DistributedDataParallel) or (fsdp is not None and isinstance(module, fsdp.FSDPModule))


def validate_rules_used(options: SaveOptions, plan: SavePlan) -> None:
    """Refuse patterns of ``check_replicas`` that match no tensor of any client, which most likely are typos.

    Args:
        options: The options of the save.
        plan: Its plan.

    Raises:
        ConfigError: A pattern matches no tensor.
    """
    if unused := _unused(tuple(pattern for pattern, _ in options.replica_rules), plan):
        raise ConfigError(
            f"option check_replicas: no tensor matches {capped(map(repr, unused))}; expected globs over the names of "
            "the tensors that are saved"
        )


@lru_cache(maxsize=KEPT_STRUCTURES)
def _unused(patterns: tuple[str, ...], plan: SavePlan) -> list[str]:
    return [pattern for pattern in patterns if not any(fnmatchcase(each.name, pattern) for each in plan.tensors)]


class ReplicaRules:
    """The rules of one save, in order: the first whose pattern matches a tensor's name decides.

    Args:
        options: Their ``check_replicas``.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._rules = options.replica_rules

    def choose(self, name: str, role: Role) -> CopyRule:
        """Return the rule for different copies of a tensor."""
        chosen = next((is_equal for pattern, is_equal in self._rules if fnmatchcase(name, pattern)), None)
        if chosen is None:
            return CopyRule.NOTED if role.may_differ else CopyRule.EQUAL
        return CopyRule.EQUAL if chosen else CopyRule.FREE


logger = logging.getLogger("dtckpt.checkpoint")


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A client's copy of a box, of which it may have several.

    Args:
        elements: The elements, an array of the box's shape; None if they were digested and not kept.
        digests: Digests of its parts that are known already, by number of the chunk.
    """

    elements: np.ndarray[Any, Any] | None
    digests: Mapping[int, int] = field(default_factory=dict)


@lru_cache(maxsize=KEPT_STRUCTURES)
def shared_boxes(plan: SavePlan, client: int) -> tuple[frozenset[Region], ...]:
    """Return, for each tensor of the plan, the boxes that both a client and others hold."""
    return tuple(
        frozenset(
            holding.region for holding in item.spec.holdings if len(holding.clients) > 1 and client in holding.clients
        )
        for item in plan.tensors
    )


def part_digests(
    plan: TensorPlan, box: Region, elements: np.ndarray[Any, Any], *, but: frozenset[int] = frozenset()
) -> dict[int, int]:
    """Return the digests of a box's parts, by number of the chunk that each lies in.

    Args:
        plan: The tensor's plan.
        box: The box.
        elements: The box's elements, an array of its shape.
        but: Chunks that are left out.
    """
    blocks, digests = Blocks.of(plan.grid, elements.itemsize), {}
    for index in plan.grid.meeting(box):
        number, part = plan.grid.number(index), plan.grid.region(index).intersect(box)
        if part is not None and number not in but:
            some = elements[part.relative_to(box).slices()] if box.ndim else elements
            digests[number], _ = digest_chunk(plan.spec.name, index, some, blocks)
    return digests


def written_as_held(plan: TensorPlan, client: int) -> frozenset[int]:
    """Return the chunks that a client writes as they lie in its memory, so that the write digests them."""
    if plan.spec.stored_dtype != plan.spec.dtype:
        return frozenset()
    return frozenset(number for number in plan.owned_by(client) if number not in plan.pieces)


def copy_digests(
    plan: SavePlan,
    client: int,
    copies_of: Callable[[TensorPlan, Region], Sequence[Replica]],
    written: Mapping[int, TensorDigests],
) -> Iterator[checkpoint_pb2.CopyDigest]:
    """Compare a client's copies with each other, and yield the digests of the boxes that other clients hold, too.

    Args:
        plan: The plan of the save.
        client: This client.
        copies_of: Returns all of its copies of one of its boxes; the first is the one that it writes.
        written: Digests of the chunks that it wrote, by index of the tensor.

    Raises:
        ReplicaMismatchError: Two of its copies differ.
    """
    for position, item in enumerate(plan.tensors):
        if item.spec.copies is CopyRule.FREE:
            continue
        # A chunk that was written as it lies in memory need not be digested again.
        is_same = item.spec.stored_dtype == item.spec.dtype and position in written
        chunk_digests = written[position].chunks if is_same else {}
        for box, holding in enumerate(item.spec.holdings):
            if client not in holding.clients:
                continue
            copies = copies_of(item, holding.region)
            if len(copies) == len(holding.clients) == 1:
                continue
            digests = [
                _copy_digest(item, holding.region, copy, {} if number else chunk_digests)
                for number, copy in enumerate(copies)
            ]
            if len(set(digests)) > 1 and item.spec.copies is CopyRule.EQUAL:
                raise ReplicaMismatchError(
                    f"copies of {holding.region} of tensor {item.spec.name!r} differ between the devices of client "
                    f"{client}"
                )
            if len(holding.clients) > 1:
                yield checkpoint_pb2.CopyDigest(tensor=position, box=box, digest=digests[0])


def mismatch_error(name: str, box: Region, sides: Sequence[Sequence[int]], cure: str) -> ReplicaMismatchError:
    """Return the error for copies that differ between clients.

    Args:
        name: The tensor's name.
        box: The box of which they have copies.
        sides: The clients whose copies are equal, for each of the different copies.
        cure: What to do.
    """
    differing = " differs from ".join(f"that of clients {capped(clients)}" for clients in sides)
    return ReplicaMismatchError(
        f"copies of {box} of tensor {name!r} must be equal: {differing}; {cure}; nothing was committed"
    )


def log_differing(names: Iterable[str]) -> None:
    """Tell of buffers whose copies differ between clients, as they may: one line."""
    if found := list(dict.fromkeys(names)):
        logger.warning(
            "%d buffers differ between clients, as they may; each is saved as the lowest client that has it: %s",
            len(found),
            capped(map(repr, found)),
        )


def _copy_digest(plan: TensorPlan, box: Region, copy: Replica, written: Mapping[int, int]) -> int:
    """Return the digest of a copy of a box, made of the digests of its parts."""
    by_chunk = {**copy.digests, **{number: digest for number, digest in written.items() if number not in plan.pieces}}
    if copy.elements is not None:
        by_chunk |= part_digests(plan, box, copy.elements, but=frozenset(by_chunk))
    digests = [by_chunk[plan.grid.number(index)] for index in plan.grid.meeting(box)]
    return bytes_digest(np.array(digests, np.uint64).data)
