"""`AnnouncedBoxes`: the boxes that readers have announced, so that the next part has a digest of each box.

A piece has one digest. A reader on another mesh needs a box of it, and cannot verify the box by the piece's digest. So
it announces its boxes once, and the writer of the parts digests each distinct box with the pieces.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace

from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.open_part import elements_of, piece_digest
from dtckpt.checkpoint.parts.records import PartBox, PartIndex, PartPiece
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

Box = tuple[str, Region]
"""A region of a tensor, by its name."""
MAX_BOXES = 1 << 16
"""Number of boxes that are kept; a new box replaces the box that was announced longest ago."""
MAX_ANNOUNCEMENT_NBYTES = 32 << 20
MAX_PASSES = 4
"""How often the bytes of a part may be digested for boxes: so many readers' layouts may differ in all boxes."""
KEPT_PARTS = 64
"""A box goes when it was not announced again within so many parts."""
RENEWED_PARTS = KEPT_PARTS // 2
"""A reader announces its boxes again after so many parts."""


def announcement(boxes: Iterable[Box]) -> bytes:
    """Return the text that announces boxes."""
    return json.dumps([(name, box.offset, box.shape) for name, box in boxes], separators=(",", ":")).encode()


class AnnouncedBoxes:
    """The boxes that readers of one client's parts have announced. Thread-safe.

    Args:
        client: The client.
    """

    def __init__(self, client: int) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._boxes: dict[Box, int] = {}
        """The number of parts when each box was announced, by box; in the order of announcements."""
        self._num_parts = 0
        self._wholes: dict[str, Region] = {}
        """The tensors of the last part."""

    def announce(self, text: bytes) -> None:
        """Note the boxes of an `announcement` that are inside tensors of the last part, which bounds their memory.

        Raises:
            ValueError: The text is malformed.
        """
        try:
            boxes = [(_name(name), Region(tuple(at), tuple(shape))) for name, at, shape in json.loads(text)]
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"boxes that a reader announces cannot be read: {error}") from error
        with self._lock:
            for name, region in boxes:
                whole = self._wholes.get(name)
                if whole is not None and _is_part(region, whole):
                    self._boxes.pop((name, region), None)
                    self._boxes[name, region] = self._num_parts
            for box in list(self._boxes)[:-MAX_BOXES]:
                del self._boxes[box]

    def digested(self, index: PartIndex, data: memoryview | LentMemory) -> PartIndex:
        """Return the index of the next part with digests of the announced boxes that are inside one of its pieces.

        Args:
            index: The index without them.
            data: The part's file, or the memory that has its pieces.
        """
        with self._lock:
            self._num_parts += 1
            self._wholes = {tensor.name: Region.full(tensor.shape) for tensor in index.tensors}
            self._boxes = {box: at for box, at in self._boxes.items() if self._num_parts - at <= KEPT_PARTS}
            newest_first = list(reversed(self._boxes))
        pieces: dict[str, list[PartPiece]] = {}
        left = 0
        for piece in index.pieces:
            tensor = index.tensors[piece.tensor]
            pieces.setdefault(tensor.name, []).append(piece)
            left += MAX_PASSES * piece.region.numel * DTYPES[tensor.dtype].itemsize
        boxes = []
        for name, region in newest_first:
            around = next((each for each in pieces.get(name, ()) if _is_part(region, each.region)), None)
            if around is None:
                continue
            elements = elements_of(data, around, DTYPES[index.tensors[around.tensor].dtype])
            box = elements[region.relative_to(around.region).slices()]
            left -= box.nbytes
            if left < 0:
                break
            boxes.append(PartBox(around.tensor, region, piece_digest(name, region, box)))
        return replace(index, boxes=tuple(boxes))


def _is_part(box: Region, piece: Region) -> bool:
    return box.ndim == piece.ndim and not box.is_empty and box != piece and piece.contains(box)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r}, expected the name of a tensor")
    return value
