"""Draw the pictures of docs/concepts.md.

python -m examples.plot_concepts docs/pictures
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import dtckpt
from dtckpt.pictures.sharding import Subject, region_colours, subject_svg
from dtckpt.pictures.svg import INK, MUTED, Picture

MESH = dtckpt.abstract_mesh({"data": 2, "model": 2})
SHAPE = (4, 6)
CELL = 30


def mesh() -> str:
    """Return a mesh: four devices in two rows and two columns."""
    picture = Picture("A mesh of four devices", 420, 210)
    picture.text(20, 28, "Mesh  data=2, model=2", "h")
    for device in MESH.device_ids:
        row, column = MESH.coordinate(device)
        x, y = 130 + column * 130, 70 + row * 64
        picture.rect(x, y, 120, 54, region_colours(device)[0])
        picture.text(x + 60, y + 24, f"device {device}", anchor="middle")
        picture.text(x + 60, y + 41, f"client {device}", "t", anchor="middle")
    for index in range(2):
        picture.text(120, 102 + index * 64, f"data {index}", "s", anchor="end")
        picture.text(190 + index * 130, 60, f"model {index}", "s", anchor="middle")
    return picture.svg()


def layout(specs: Sequence[str], title: str) -> str:
    """Return which devices hold which region of a tensor of 4 x 6 elements."""
    return subject_svg(Subject(dtckpt.Layout(list(specs), MESH), SHAPE), title)


def chunks() -> str:
    """Return how regions become the chunks of an array, of which each copy is written once."""
    picture = Picture("Regions become chunks", 760, 220)
    picture.text(20, 28, "Regions on the devices", "h")
    picture.text(20, 46, "rows over data: each half on two devices", "s")
    picture.text(420, 28, "Chunks in the checkpoint", "h")
    picture.text(420, 46, "each element once, with a digest", "s")
    rows = dtckpt.Layout(["data", dtckpt.UNSHARDED], MESH)
    for number, writer in enumerate((0, 3)):
        region = rows.region(writer, SHAPE)
        y, height = 66 + region.offset[0] * CELL, region.shape[0] * CELL - 3
        for x, text, below in (
            (20, f"devices {2 * number} and {2 * number + 1}", f"rows {region.offset[0]} to {region.stop[0] - 1}"),
            (420, f"w/c/{number}/0", f"written by client {writer}"),
        ):
            picture.rect(x, y, SHAPE[1] * CELL, height, region_colours(number)[0])
            picture.text(x + 90, y + 25, text, anchor="middle")
            picture.text(x + 90, y + 42, below, "t", anchor="middle")
    picture.rect(230, 124, 150, 2, MUTED)
    picture.text(380, 131, "▶", fill=MUTED)
    picture.text(305, 112, "save: copies share", "s", anchor="middle")
    picture.text(305, 146, "out the writing", "s", anchor="middle")
    return picture.svg()


def commit() -> str:
    """Return a save in time: nothing is seen before the rename."""
    picture = Picture("A save, from the first chunk to the commit", 760, 230)
    picture.text(20, 28, "One save", "h")
    colours = [region_colours(number)[0] for number in range(4)]
    for client in range(3):
        y = 56 + client * 34
        picture.text(84, y + 17, f"client {client}", "s", anchor="end")
        for x, width, colour, what in (
            (96, 90, colours[0], "plan"),
            (206, 150 + 30 * client, colours[1], "write chunks"),
        ):
            picture.rect(x, y, width, 25, colour)
            picture.text(x + 8, y + 17, what)
        if client == 0:
            picture.rect(446, y, 110, 25, colours[2])
            picture.text(454, y + 17, "manifest")
            picture.rect(562, y, 110, 25, colours[3])
            picture.text(570, y + 17, "rename")
    for x, what in ((196, "barrier: all plan alike"), (436, "barrier: all have written")):
        picture.rect(x - 1, 50, 2, 112, INK)
        picture.text(x, 180, what, "s", anchor="middle")
    picture.text(617, 110, "the commit:", "s", anchor="middle")
    picture.text(617, 126, "until here the old checkpoint is there,", "t", anchor="middle")
    picture.text(617, 142, "from here on the new one", "t", anchor="middle")
    picture.text(20, 214, "A fault before the commit leaves the old checkpoint, one after it the new one.", "s")
    return picture.svg()


PICTURES = {
    "mesh": mesh,
    "rows": lambda: layout(["data", dtckpt.UNSHARDED], "Rows over data, copied over model"),
    "blocks": lambda: layout(["data", "model"], "Rows over data, columns over model"),
    "chunks": chunks,
    "commit": commit,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(sys.argv[1]) / f"{name}.svg").write_text(draw())
