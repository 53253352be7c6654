"""Staging: one host copy of what a client will write, in memory that is kept from one save to the next.

Copies that others write are only compared: they are digested where they are, which is faster than to copy them.

The memory is one block. A save of the same structure finds it ready, which matters: fresh memory costs a page fault
per page, more than the copy itself. Tensors on a card are copied into page-locked memory, on a stream of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from dtckpt.checkpoint.leaves import host_array, is_elsewhere
from dtckpt.checkpoint.saving.plan import SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import Copy, known_numbers, part_digests, shared_boxes
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.comm import host_memory
from dtckpt.layout.region import Region

_ALIGNMENT = 64
Parts = list[tuple[Region, list[torch.Tensor]]]


class StagingMemory:
    """The block, and what was cut out of it for the save before."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_for_cards = False
        self._unlock: Callable[[], object] = lambda: None
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._pieces: list[torch.Tensor] = []

    def stage(
        self, state: State, plan: SavePlan, client: int, *, with_copies: bool, count: Callable[[int], object]
    ) -> State:
        """Copy what a client will write, and with ``with_copies`` take the digest of every copy that it holds.

        Copies on a card are copied to the host for that, and digested later.

        Blocks: On that; on a card, on the work that the current stream has still to do.

        Args:
            state: What is to be saved.
            plan: The plan of the save.
            client: This client.
            with_copies: Whether copies that others have, too, are to be compared.
            count: Told the bytes that were copied.
        """
        if not isinstance(state.source, MemorySource):
            return state
        found: list[tuple[str, Region, list[torch.Tensor]]] = []
        noted: dict[tuple[str, Region], list[Copy]] = {}
        for item, shared in zip(plan.tensors, shared_boxes(plan, client), strict=True):
            name, written = item.spec.name, list(_written(item, client))
            for box, copies in state.source.parts(name):
                is_compared = with_copies and (box in shared or len(copies) > 1)
                is_noted = is_compared and not any(map(is_elsewhere, copies))
                if is_noted:
                    noted[name, box] = _noted(item, box, copies, client)
                if is_compared and not is_noted:
                    found.append((name, box, [copy.detach() for copy in copies]))
                else:
                    found += [(name, region, [view]) for region, view in _wanted(box, copies[0].detach(), written)]
        sources = [view for _, _, views in found for view in views]
        targets = self._carve(sources)
        with torch.no_grad():
            _copy(targets, sources)
        parts: dict[str, Parts] = {}
        remaining = iter(targets)
        for name, region, views in found:
            parts.setdefault(name, []).append((region, [next(remaining) for _ in views]))
        count(sum(target.nbytes for target in targets))
        return State(state.specs, MemorySource(parts, noted), state.tree)

    def _carve(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for the tensors."""
        shapes = [(source.shape, source.dtype) for source in sources]
        card = next((source.device for source in sources if source.is_cuda and source.numel()), None)
        is_for_cards = card is not None
        sizes = [math.ceil(source.nbytes / _ALIGNMENT) * _ALIGNMENT for source in sources]
        needed = sum(sizes)
        if not needed <= self._block.numel() <= 2 * needed or is_for_cards > self._is_for_cards:
            self._unlock()
            # The old one goes before the new comes.
            self._pieces, self._shapes, self._block = [], [], torch.empty(0, dtype=torch.uint8)
            self._block, self._is_for_cards = host_memory.empty((needed,), torch.uint8), is_for_cards
            self._unlock = host_memory.lock_pages(self._block, self, card) if card else lambda: None
        elif shapes == self._shapes:
            return self._pieces
        starts = np.cumsum([0, *sizes]).tolist()
        self._pieces = [
            self._block[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(starts, sources, strict=False)
        ]
        self._shapes = shapes
        return self._pieces


def _noted(plan: TensorPlan, box: Region, copies: Sequence[torch.Tensor], client: int) -> list[Copy]:
    """Take the digests of copies; those of what is written are taken then, and apply to the first copy."""
    but = known_numbers(plan, client)
    return [
        Copy(None, part_digests(plan, box, host_array(copy), but=frozenset() if number else but))
        for number, copy in enumerate(copies)
    ]


def _wanted(box: Region, copy: torch.Tensor, written: Sequence[Region]) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield what is to be staged of a box, of which some regions are written: all of it, or else those."""
    inside = [region for region in written if box.contains(region)]
    if sum(region.numel for region in inside) == box.numel:
        yield box, copy
    else:
        yield from ((region, copy[region.relative_to(box).slices()]) for region in inside)


def _written(plan: TensorPlan, client: int) -> Iterator[Region]:
    """Yield the disjoint regions whose elements a client gives: its chunks, and its pieces of split ones."""
    for number in plan.owned_by(client):
        if number not in plan.pieces:
            yield plan.grid.region(plan.grid.index(number))
    for pieces in plan.pieces.values():
        yield from (piece.region for piece in pieces if piece.client == client)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    pairs = list(zip(targets, sources, strict=True))
    with ExitStack() as copying:
        for device in sorted({source.device for source in sources if source.is_cuda}, key=str):
            # Beside the work that the current stream gets from now on, but after what it has already.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            copying.callback(stream.synchronize)
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    if source.device == device:
                        # What is to be conjugated or negated is so on the host, when it is there.
                        target.copy_(source, non_blocking=not (source.is_conj() or source.is_neg()))
        on_host = [pair for pair in pairs if not pair[1].is_cuda]
        if on_host:
            torch._foreach_copy_([target for target, _ in on_host], [source for _, source in on_host])
