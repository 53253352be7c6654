"""The picture of ``dtckpt plot --kind traffic``: bytes between devices as a matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtckpt.errors import format_nbytes
from dtckpt.pictures.svg import Picture

MAX_CELLS = 64
"""Rows and columns of a matrix, at most; of more devices, a cell stands for a block of them."""
_LIGHT, _DARK = np.array([0xDE, 0xEB, 0xF7]), np.array([0x08, 0x30, 0x6B])
_EDGE, _LEFT, _TOP = 24.0, 84.0, 112.0


def traffic_picture(matrix: npt.NDArray[np.int64], title: str, subtitle: str) -> str:
    """Draw bytes from every device (rows) to every device (columns): the darker, the more."""
    steps = [-(-size // MAX_CELLS) for size in matrix.shape]
    rows, columns = (range(0, size, step) for size, step in zip(matrix.shape, steps, strict=True))
    blocks = np.add.reduceat(np.add.reduceat(matrix, list(rows), axis=0), list(columns), axis=1)
    cell = max(10.0, min(64.0, 640 / max(blocks.shape)))
    width, height = len(columns) * cell, len(rows) * cell
    picture = Picture(title, max(560.0, _LEFT + width + _EDGE), _TOP + height + 84)
    picture.text(_EDGE, 36, title, "h")
    picture.text(_EDGE, 56, subtitle, "s")
    sides = f"from device (rows{_block_note(steps[0])}) to device (columns{_block_note(steps[1])})"
    picture.text(_EDGE, _TOP - 32, sides, "s")
    most = int(blocks.max(initial=0))
    for at, row in enumerate(rows):
        for to, column in enumerate(columns):
            nbytes = int(blocks[at, to])
            share = nbytes / most if most else 0.0
            fill = "#f5f7fa" if not nbytes else _shade(share)
            sender, receiver = _names(row, steps[0], matrix.shape[0]), _names(column, steps[1], matrix.shape[1])
            tip = f"{sender} to {receiver}: {nbytes} bytes"
            picture.rect(_LEFT + to * cell + 0.5, _TOP + at * cell + 0.5, cell - 1, cell - 1, fill, tip)
            if nbytes and cell >= 60:
                x, y = _LEFT + (to + 0.5) * cell, _TOP + (at + 0.5) * cell + 4
                picture.text(
                    x, y, format_nbytes(nbytes), "r", anchor="middle", fill="#ffffff" if share > 0.45 else "#1f2933"
                )
    for at in range(0, len(rows), max(1, round(18 / cell))):
        picture.text(_LEFT - 8, _TOP + (at + 0.5) * cell + 4, str(rows[at]), "t", anchor="end")
    for to in range(0, len(columns), max(1, round(34 / cell))):
        picture.text(_LEFT + (to + 0.5) * cell, _TOP - 8, str(columns[to]), "t", anchor="middle")
    for part in range(40):
        picture.rect(_LEFT + part * 4, _TOP + height + 24, 4.5, 12, _shade(part / 39))
    picture.text(_LEFT, _TOP + height + 54, "0", "t")
    picture.text(_LEFT + 160, _TOP + height + 54, format_nbytes(most), "t", anchor="end")
    return picture.svg()


def _block_note(step: int) -> str:
    return f", in blocks of {step}" if step > 1 else ""


def _names(first: int, step: int, size: int) -> str:
    last = min(first + step, size) - 1
    return f"device {first}" if first == last else f"devices {first}-{last}"


def _shade(share: float) -> str:
    red, green, blue = (_LIGHT + (_DARK - _LIGHT) * share).round().astype(int).tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"
