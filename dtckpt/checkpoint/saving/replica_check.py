"""Compare replicas by digests: a client compares its own copies of a value, the leader the copies of all clients.

The digest of a copy of a box is made of the digests of its parts, one for each chunk that the box intersects. A client
that writes a chunk digests it anyway, so its own copy costs nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.saving.digests import TensorDigests
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, CopyRule, SavePlan, TensorPlan
from dtckpt.errors import ReplicaMismatchError, capped
from dtckpt.format.digest import Blocks, bytes_digest, digest_chunk
from dtckpt.layout.region import Region

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
        copies_of: Returns all of the client's copies of a box; the client writes the first copy.
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
    differing = " differs from ".join(f"the copy of clients {capped(clients)}" for clients in sides)
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
