"""Find tensors of a restore's target that share memory: tied tensors are allowed, any other overlap is refused.

Many tensors are read at the same time, by several threads, so no two of them may write to the same byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

import torch

from dtckpt.checkpoint.leaves import Leaf
from dtckpt.errors import LayoutError

NamedLeaf = tuple[str, Leaf]
"""A tensor's name in the checkpoint, and the memory that it is restored to."""
TiedLeaf = tuple[str, str, Leaf]
"""A name, the name of another tensor that has the same memory, and that memory."""


def split_tied(leaves: Sequence[NamedLeaf]) -> tuple[list[NamedLeaf], list[TiedLeaf]]:
    """Separate the tensors to be filled from further names for the same memory.

    Returns:
        The tensors to be filled, and the tied ones.
    """
    starts = Counter([memory.data_ptr() for _, leaf in leaves for memory in leaf.components])
    if len(starts) == starts.total():
        return list(leaves), []
    first: dict[object, str] = {}
    apart: list[NamedLeaf] = []
    tied: list[TiedLeaf] = []
    for name, leaf in leaves:
        if all(starts[memory.data_ptr()] == 1 for memory in leaf.components):
            apart.append((name, leaf))
            continue
        addresses = [(memory.device, memory.data_ptr(), memory.stride()) for memory in leaf.components]
        key = leaf.dtype, leaf.regions, tuple(addresses)
        has_memory = any(memory.numel() for memory in leaf.components)
        if has_memory and first.setdefault(key, name) != name:
            tied.append((name, first[key], leaf))
        else:
            apart.append((name, leaf))
    return apart, tied


def validate_apart(leaves: Sequence[NamedLeaf]) -> None:
    """Check that no two elements of the targets share memory.

    Raises:
        LayoutError: Elements of one target, or of two, do.
    """
    # A sweep over the sorted spans: a group is a run of spans, each of which begins before an earlier span ends.
    group: list[tuple[str, torch.Tensor]] = []
    end, last_device = -1, ""
    for device, start, stop, name, memory in _sorted_spans(leaves):
        if start >= end or device != last_device:
            if len(group) > 1:
                _validate_group(group)
            group, end, last_device = [], -1, device
        group.append((name, memory))
        end = max(end, stop)
        if not memory.is_contiguous():
            _validate_group([(name, memory)])
    if len(group) > 1:
        _validate_group(group)


def _sorted_spans(leaves: Sequence[NamedLeaf]) -> list[tuple[str, int, int, str, torch.Tensor]]:
    """Return device, first byte, byte behind the last, name and memory of all components, in the order of addresses."""
    spans = [
        ("" if memory.is_cpu else str(memory.device), *_span(memory), name, memory)
        for name, leaf in leaves
        for memory in leaf.components
        if memory.numel()
    ]
    return sorted(spans, key=itemgetter(0, 1, 2, 3))


def _span(memory: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor's memory and the byte behind its last."""
    start = memory.data_ptr()
    if memory.is_contiguous():
        return start, start + memory.nbytes
    last = sum(step * (size - 1) for step, size in zip(memory.stride(), memory.shape, strict=True))
    return start, start + (last + 1) * memory.itemsize


def _is_apart(memory: torch.Tensor) -> bool:
    """Whether a tensor's elements surely share no byte: in order of stride, each step clears the dims before it."""
    extent = 1
    for step, size in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if size > 1:
            if step < extent:
                return False
            extent += step * (size - 1)
    return True


def _validate_group(group: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check targets with overlapping spans byte by byte: views may interleave, such as columns of one tensor."""
    if len(group) == 1 and _is_apart(group[0][1]):
        return
    start = min(_span(memory)[0] for _, memory in group)
    stop = max(_span(memory)[1] for _, memory in group)
    # A map with one cell per byte of the span; each target marks its own bytes.
    taken = torch.zeros(stop - start, dtype=torch.uint8)
    for name, memory in group:
        cells = taken.as_strided(
            (*memory.shape, memory.itemsize),
            (*(step * memory.itemsize for step in memory.stride()), 1),
            memory.data_ptr() - start,
        )
        overlaps_itself = any(step == 0 and size > 1 for step, size in zip(memory.stride(), memory.shape, strict=True))
        before = int(taken.sum(dtype=torch.int64))
        if overlaps_itself or bool(cells.any()):
            raise _overlap(name)
        cells.fill_(1)
        if int(taken.sum(dtype=torch.int64)) - before != memory.numel() * memory.itemsize:
            raise _overlap(name)


def _overlap(name: str) -> LayoutError:
    return LayoutError(
        f"tensor {name!r} cannot be filled: its elements overlap in memory with each other or with another target's "
        "(expand() and slices do that); pass a tensor that has its own memory"
    )
