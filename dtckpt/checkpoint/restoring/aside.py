"""`AsideMemory`: host memory beside a target's tensors, which a restore fills while the target stays as it is.

::

    plan      leaf (the target's memory)  --beside-->  leaf of the same regions, in this memory
    read      fill and verify the second leaf; the target is in use meanwhile
    apply     copy the second leaf into the first: every tensor keeps its address

The memory is kept for the next restore into the same target: new memory costs a page fault per page, which takes longer
than the copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import compress

import torch

from dtckpt.checkpoint.leaves import Leaf
from dtckpt.checkpoint.parts.held_boxes import HeldBoxes
from dtckpt.checkpoint.restoring.fill import note_writes
from dtckpt.comm import host_memory, torch_private
from dtckpt.errors import CheckpointError, format_nbytes

_Key = tuple[torch.device, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class AsideMemory:
    """Memory beside the tensors of one target.

    Args:
        max_nbytes: Bound on the bytes of the memory; None: no bound.
        needs: Whether a component of a tensor must stay as it is during the read. Tensors without such a component are
            read in place. Default: all must.
    """

    def __init__(self, max_nbytes: int | None = None, needs: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        self._max_nbytes = max_nbytes
        self._needs = needs
        self._memory: dict[_Key, torch.Tensor] = {}
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.held = HeldBoxes(self._has)
        """The boxes of the version that was read last, as the memory holds them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is kept."""
        return sum(memory.nbytes for memory in self._memory.values())

    def beside(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Return leaves of the same regions in this memory; memory for tensors that are not among them is freed.

        Raises:
            CheckpointError: The memory would be larger than ``max_nbytes``; none is taken.
        """
        leaves = list(leaves)
        moved = [not leaf.components or any(map(self._needs, leaf.components)) for leaf in leaves]
        wanted = {_key(memory): memory for leaf in compress(leaves, moved) for memory in leaf.components}
        nbytes = sum(memory.nbytes for memory in wanted.values())
        if self._max_nbytes is not None and nbytes > self._max_nbytes:
            raise CheckpointError(
                f"memory beside the target would take {format_nbytes(nbytes)}, as its tensors do; got a bound of "
                f"{format_nbytes(self._max_nbytes)}: raise it, or update in place"
            )
        kept = {key: memory for key, memory in self._memory.items() if key in wanted}
        if len(kept) < len(self._memory):
            # Other memory may get the addresses.
            self.held.clear()
        # Free unwanted memory first, so that the old and the new memory never exist together.
        self._memory = kept
        for key, memory in wanted.items():
            if key not in self._memory:
                self._memory[key] = host_memory.allocate(memory.shape, memory.dtype)
        spans = sorted((memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in self._memory.values())
        self._starts, self._stops = [start for start, _ in spans], [stop for _, stop in spans]
        return [self._beside(leaf) if is_moved else leaf for leaf, is_moved in zip(leaves, moved, strict=True)]

    def _beside(self, leaf: Leaf) -> Leaf:
        components = tuple(self._memory[_key(memory)] for memory in leaf.components)
        # The tensor of such a leaf only stands for its memory; on a client without components it has none.
        tensor = components[0] if components else torch.empty(0)
        return replace(leaf, tensor=tensor, components=components)

    def _has(self, address: int) -> bool:
        """Whether an address is in this memory."""
        place = bisect_right(self._starts, address)
        return place > 0 and address < self._stops[place - 1]

    def clear(self) -> None:
        """Free the memory."""
        self._memory.clear()
        self._starts, self._stops = [], []
        self.held.clear()


def copy_into(leaves: Sequence[Leaf], beside: Sequence[Leaf]) -> None:
    """Copy the memory beside some tensors into the tensors, which keep their addresses."""
    note_writes(leaves)
    targets = [memory.detach() for leaf in leaves for memory in leaf.components]
    sources = [memory for leaf in beside for memory in leaf.components]
    with torch.no_grad():
        torch_private.foreach_copy(targets, sources)


def _key(memory: torch.Tensor) -> _Key:
    """Return the identity of a tensor's memory; tied tensors share it."""
    return memory.device, memory.data_ptr(), memory.dtype, tuple(memory.shape), memory.stride()
