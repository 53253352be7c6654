"""Draw the picture of the README: a tensor on four devices, its checkpoint, and the same tensor on two devices.

python -m examples.plot_overview docs/overview.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from dtckpt.layout.svg import Picture

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Of Okabe and Ito, which people of all kinds of sight tell apart."""
CELL, ROWS, COLUMNS = 26, 4, 6


def grid(picture: Picture, x: float, y: float, colours: list[list[str]]) -> None:
    """Draw a tensor, element by element."""
    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            picture.rect(x + column * CELL, y + row * CELL, CELL - 2, CELL - 2, colour)


def arrow(picture: Picture, x: float, y: float, text: str) -> None:
    """Draw an arrow with a text above it."""
    picture.rect(x, y - 1, 74, 2, "#616e7c")
    picture.text(x + 74, y + 5, "▶", fill="#616e7c")
    picture.text(x + 38, y - 10, text, "s", anchor="middle")


def draw() -> str:
    """Return the picture."""
    picture = Picture("A tensor is saved by four devices and restored by two", 800, 190)
    blocks = [[COLOURS[row // 2 * 2 + column // 3] for column in range(COLUMNS)] for row in range(ROWS)]
    columns = [[COLOURS[column // 3] for column in range(COLUMNS)] for _ in range(ROWS)]
    y = 50.0
    for x, title, below, colours in (
        (20, "4 devices, mesh 2 x 2", "each holds a block", blocks),
        (312, "one checkpoint", "chunks with digests, Zarr v3", blocks),
        (604, "2 devices, any mesh", "each holds three columns", columns),
    ):
        picture.text(x, 30, title, "h")
        grid(picture, x, y, colours)
        picture.text(x, y + ROWS * CELL + 20, below, "s")
    arrow(picture, 196, y + 2 * CELL, "save")
    arrow(picture, 488, y + 2 * CELL, "restore")
    return picture.svg()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
