"""Changes of a box from one version to another: positions and new values of the elements that differ; pure.

The values are absolute, so to apply changes twice does no harm. The reader applies them and compares the result with
the digest of the box in the new version. So changes to another base, or damaged ones, are found.

::

    width of a gap (1 byte)   number of elements (8 bytes)   gaps   values
                                                             from one changed element to the next, in C order
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtckpt.checkpoint.parts.open_part import spans
from dtckpt.checkpoint.reading.read_chunks import cut
from dtckpt.format.digest import as_bytes

WORDS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Elements are compared by their bits, as whole numbers of their size. There are changes for these sizes only."""
MAX_CHANGED = 0.25
"""Highest share of changed elements: with more of them, changes save little and take memory of the array's size."""
SAMPLED_SPANS, SAMPLED_NBYTES = 8, 4096
"""Number and size of the samples that are compared first, to see whether too many elements changed."""
MAX_GAP = np.iinfo(np.uint32).max
_HEAD = struct.Struct("<BQ")


def changes_between(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes | None:
    """Return the changes from one array to another; None if there are too many, and the new array is to be sent whole.

    Args:
        old: The old elements.
        new: The new elements, of the same shape and dtype; an element has 1, 2, 4 or 8 bytes.
    """
    word, all_spans = WORDS[new.itemsize], list(spans(new.shape, new.itemsize))
    if _share_changed(old, new, all_spans[:: -(-len(all_spans) // SAMPLED_SPANS)]) > 2 * MAX_CHANGED:
        return None
    gaps: list[np.ndarray[Any, Any]] = []
    values: list[np.ndarray[Any, Any]] = []
    begin = last = count = 0
    for span in all_spans:
        before, after = as_bytes(cut(old, span)).view(word), as_bytes(cut(new, span)).view(word)
        changed = np.flatnonzero(before != after)
        if changed.size:
            count += changed.size
            if count > new.size * MAX_CHANGED or changed[0] + begin - last > MAX_GAP:
                return None
            gaps.append(np.diff(changed + begin, prepend=last).astype(np.uint32))
            values.append(after[changed])
            last = int(changed[-1]) + begin
        begin += after.size
    widest = max((int(each.max()) for each in gaps), default=0)
    width = next(size for size, each in WORDS.items() if widest <= np.iinfo(each).max)
    head = _HEAD.pack(width, count)
    data = b"".join((head, *(each.astype(WORDS[width]).tobytes() for each in gaps), *(v.tobytes() for v in values)))
    return data if len(data) < new.nbytes else None


def _share_changed(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], sample: Sequence[tuple[slice, ...]]) -> float:
    """Return the share of the first bytes of some spans that differ: usually all elements change, or few."""
    pairs = [(as_bytes(cut(old, span))[:SAMPLED_NBYTES], as_bytes(cut(new, span))[:SAMPLED_NBYTES]) for span in sample]
    sizes = [before.size // new.itemsize for before, _ in pairs]
    word = WORDS[new.itemsize]
    return sum(np.count_nonzero(before.view(word) != after.view(word)) for before, after in pairs) / sum(sizes)


def apply_changes(data: bytes, elements: memoryview, itemsize: int) -> None:
    """Change elements.

    Args:
        data: The changes.
        elements: The bytes of the old elements, in C order; they get the new ones.
        itemsize: Bytes of an element.

    Raises:
        ValueError: The changes are malformed; nothing was changed.
    """
    word = WORDS[itemsize]
    if len(data) < _HEAD.size:
        raise ValueError("they have no head")
    width, count = _HEAD.unpack_from(data)
    if width not in WORDS or len(data) != _HEAD.size + count * (width + itemsize):
        raise ValueError(f"they have {len(data)} bytes, and claim {count} gaps of {width} bytes")
    target = np.frombuffer(elements, word)
    gaps = np.frombuffer(data, WORDS[width], count, _HEAD.size)
    positions = np.cumsum(gaps, dtype=np.int64)
    if count and not 0 <= int(positions.min()) <= int(positions.max()) < target.size:
        raise ValueError(f"an element of them is not among the {target.size} elements")
    target[positions] = np.frombuffer(data, word, count, _HEAD.size + count * width)
