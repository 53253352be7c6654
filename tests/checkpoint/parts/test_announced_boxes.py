"""Boxes that readers announce: the next part has their digests; how many there are, and how many bytes, is bounded."""

import dataclasses
import json
import zlib

import numpy as np
import pytest

from dtckpt.checkpoint.parts import announced_boxes
from dtckpt.checkpoint.parts.announced_boxes import KEPT_PARTS, AnnouncedBoxes, announcement
from dtckpt.checkpoint.parts.open_part import piece_digest
from dtckpt.checkpoint.parts.records import PartBox, PartIndex
from dtckpt.errors import CheckpointCorruptError
from dtckpt.layout.region import Region

from .test_server import DATA, ELEMENTS, WHOLE, index_of

LEFT, RIGHT, ROW = Region((0, 0), (12, 2)), Region((0, 2), (12, 3)), Region((4, 0), (1, 5))


def boxes_of_a_part():
    """Return the boxes of a client that has made a part, as it has when readers come."""
    boxes = AnnouncedBoxes(1)
    boxes.digested(index_of(), memoryview(DATA))
    return boxes


def digested(boxes):
    return boxes.digested(index_of(), memoryview(DATA)).boxes


def test_digests_of_boxes():
    boxes = boxes_of_a_part()
    boxes.announce(announcement([("w", LEFT), ("w", ROW)]))
    boxes.announce(announcement([("w", ROW)]))
    index = boxes.digested(index_of(), memoryview(DATA))
    values = ELEMENTS.numpy()
    assert set(index.boxes) == {
        PartBox(0, region, piece_digest("w", region, np.ascontiguousarray(values[region.slices()])))
        for region in (LEFT, ROW)
    }
    assert PartIndex.from_bytes(index.to_bytes()) == index
    assert index.digests() == {("w", WHOLE): index.pieces[0].digest} | {("w", b.region): b.digest for b in index.boxes}


def test_boxes_that_are_no_part_of_a_piece_have_none():
    boxes = boxes_of_a_part()
    others = [("v", LEFT), ("w", WHOLE), ("w", Region((0, 0), (13, 1))), ("w", Region((0,), (3,)))]
    boxes.announce(announcement([*others, ("w", Region((0, 0), (0, 1)))]))
    # Nor are they kept: names and numbers of any length would take any memory.
    assert not boxes._boxes
    assert digested(boxes) == ()


def test_those_announced_longest_ago_go_first(monkeypatch):
    monkeypatch.setattr(announced_boxes, "MAX_BOXES", 2)
    boxes = boxes_of_a_part()
    for region in (LEFT, ROW, LEFT, RIGHT):
        boxes.announce(announcement([("w", region)]))
    assert [box.region for box in digested(boxes)] == [RIGHT, LEFT]


def test_the_bytes_that_are_digested_are_bounded(monkeypatch):
    monkeypatch.setattr(announced_boxes, "MAX_PASSES", 1)
    boxes = boxes_of_a_part()
    rows = [("w", Region((row, 0), (11, 5))) for row in range(2)]
    boxes.announce(announcement([("w", LEFT), *rows]))
    assert [box.region for box in digested(boxes)] == [rows[1][1]]


def test_a_box_goes_unless_it_is_announced_again():
    boxes = boxes_of_a_part()
    boxes.announce(announcement([("w", LEFT), ("w", ROW)]))
    for number in range(KEPT_PARTS):
        assert len(digested(boxes)) == 2
        if number == 9:
            boxes.announce(announcement([("w", ROW)]))
    assert [box.region for box in digested(boxes)] == [ROW]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"3", b"[3]", b'[["w"]]', b'[[1, [0], [1]]]', b'[["w", [0], [1, 2]]]', b'[["w", [-1], [1]]]',
     b'[["w", ["0"], [1]]]', b'[["w", 0, 1]]', b"[" * 100_000, b"\xff"],
    ids=lambda text: str(text[:20]),
)  # fmt: skip
def test_malformed_announcements(text):
    boxes = boxes_of_a_part()
    with pytest.raises(ValueError, match="cannot be read"):
        boxes.announce(text)
    assert digested(boxes) == ()


def test_an_index_without_boxes_has_the_text_of_before():
    """Parts of the local tier stay readable, by this version of the library and by the version before it."""
    assert b"boxes" not in json.dumps(facts_of(index_of().to_bytes())).encode()


@pytest.mark.parametrize("box", [PartBox(1, LEFT, 0), PartBox(-1, LEFT, 0), PartBox(0, Region((0, 0), (13, 1)), 0)])
def test_an_index_with_boxes_of_nothing(box):
    index = dataclasses.replace(index_of(), boxes=(box,))
    with pytest.raises(CheckpointCorruptError, match="cannot be read"):
        PartIndex.from_bytes(index.to_bytes())


def facts_of(file):
    return json.loads(zlib.decompress(file[8:]))
