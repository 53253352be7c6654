"""Draw the pictures of the README: a tensor on four devices, its checkpoint, the same on two devices; and the badges.

python -m examples.plot_overview docs
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from dtckpt.pictures.svg import Picture

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


def badges() -> str:
    """Return what pyproject.toml says of version, Python, PyTorch and license."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    (torch,) = (each.removeprefix("torch>=") for each in project["dependencies"] if each.startswith("torch>="))
    facts = {
        "version": project["version"],
        "Python": f"{pythons[0]} to {pythons[-1]}",
        "PyTorch": f"{torch} or later",
        "license": project["license"],
    }
    widths = [(14 + 7 * len(name), 14 + 7 * len(fact)) for name, fact in facts.items()]
    picture = Picture(", ".join(map(" ".join, facts.items())), sum(a + b + 8 for a, b in widths), 22)
    x = 0.0
    for (name, fact), (left, right) in zip(facts.items(), widths, strict=True):
        picture.rect(x, 1, left, 20, "#4a5560")
        picture.text(x + left / 2, 15, name, "t", anchor="middle", fill="#ffffff")
        picture.rect(x + left, 1, right, 20, COLOURS[0])
        picture.text(x + left + right / 2, 15, fact, "t", anchor="middle", fill="#ffffff")
        x += left + right + 8
    return picture.svg()


PICTURES = {"overview": draw, "badges": badges}

if __name__ == "__main__":
    for name, make in PICTURES.items():
        (Path(sys.argv[1]) / f"{name}.svg").write_text(make())
