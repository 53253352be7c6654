"""Replicas are compared by digests: which copies a client has that others have too, and what each comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.saving.digests import TensorDigests
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan, TensorPlan
from dtckpt.errors import ReplicaMismatchError
from dtckpt.format.digest import Blocks, bytes_digest, digest_chunk
from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One of a client's copies of a box.

    Args:
        elements: What it holds; None, if it is not kept.
        digests: Digests of its parts, by number of the chunk, as far as they were taken.
    """

    elements: np.ndarray[Any, Any] | None
    digests: Mapping[int, int] = field(default_factory=dict)


@lru_cache(maxsize=KEPT_STRUCTURES)
def shared_boxes(plan: SavePlan, client: int) -> tuple[frozenset[Region], ...]:
    """Return per tensor the boxes that a client and others hold."""
    return tuple(
        frozenset(
            holding.region for holding in item.spec.holdings if len(holding.clients) > 1 and client in holding.clients
        )
        for item in plan.tensors
    )


def part_digests(
    plan: TensorPlan, box: Region, elements: np.ndarray[Any, Any], *, but: frozenset[int] = frozenset()
) -> dict[int, int]:
    """Return the digests of a box's parts by number of the chunk that each lies in, ``but`` for some."""
    cut, found = Blocks.of(plan.grid, elements.itemsize), {}
    for index in plan.grid.meeting(box):
        number, part = plan.grid.number(index), plan.grid.region(index).intersect(box)
        if part is not None and number not in but:
            some = elements[part.relative_to(box).slices()] if box.ndim else elements
            found[number], _ = digest_chunk(plan.spec.name, index, some, cut)
    return found


def known_numbers(plan: TensorPlan, client: int) -> frozenset[int]:
    """Return the chunks that a client writes as they lie in its memory, and thus digests anyway."""
    if plan.spec.stored_dtype != plan.spec.dtype:
        return frozenset()
    return frozenset(number for number in plan.owned_by(client) if number not in plan.pieces)


def copy_digests(
    plan: SavePlan,
    client: int,
    copies_of: Callable[[TensorPlan, Region], Sequence[Copy]],
    written: Mapping[int, TensorDigests],
) -> Iterator[checkpoint_pb2.CopyDigest]:
    """Compare a client's copies, and yield the digests of the boxes that others hold, too.

    Args:
        plan: The plan of the save.
        client: This client.
        copies_of: Gives all of its copies of one of its boxes; the first is the one that it writes.
        written: Digests of what it wrote, by position of the tensor.

    Raises:
        ReplicaMismatchError: Two of its copies differ.
    """
    for position, item in enumerate(plan.tensors):
        # A chunk that was written as it lies in memory need not be digested again.
        is_same = item.spec.stored_dtype == item.spec.dtype and position in written
        known = written[position].chunks if is_same else {}
        for box, holding in enumerate(item.spec.holdings):
            if client not in holding.clients:
                continue
            copies = copies_of(item, holding.region)
            if len(copies) == len(holding.clients) == 1:
                continue
            digests = [
                _copy_digest(item, holding.region, copy, {} if number else known) for number, copy in enumerate(copies)
            ]
            if len(set(digests)) > 1:
                raise ReplicaMismatchError(
                    f"copies of {holding.region} of tensor {item.spec.name!r} differ between the devices of client "
                    f"{client}"
                )
            if len(holding.clients) > 1:
                yield checkpoint_pb2.CopyDigest(tensor=position, box=box, digest=digests[0])


def _copy_digest(plan: TensorPlan, box: Region, copy: Copy, written: Mapping[int, int]) -> int:
    """Return the digest of a copy of a box, made of those of its parts of the chunks."""
    known = {**copy.digests, **{number: digest for number, digest in written.items() if number not in plan.pieces}}
    if copy.elements is not None:
        known |= part_digests(plan, box, copy.elements, but=frozenset(known))
    digests = [known[plan.grid.number(index)] for index in plan.grid.meeting(box)]
    return bytes_digest(np.array(digests, np.uint64).data)
