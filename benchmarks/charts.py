"""Charts of benchmarks as SVG: how far each bar is met, and times side by side; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtckpt.pictures.svg import INK, MUTED, PALETTE, Picture

SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILION = PALETTE
MET, MISSED = BLUE, VERMILION
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
LABELS, PLOT, LINE = 330, 430, 20


@dataclass(frozen=True)
class Mark:
    """A bar and how far it is met.

    Args:
        text: Name of the measurement.
        share: The measured figure as a multiple of the wanted one, above 1 where it is better.
        figures: Both, for people.
    """

    text: str
    share: float
    figures: str


def marks_chart(marks: Sequence[Mark]) -> str:
    """Draw each figure beside its bar, on a logarithmic scale; the line in the middle is the bar."""
    height = 58 + len(marks) * LINE + 10
    picture = Picture("How far each bar is met", LABELS + PLOT + 200, height)
    picture.text(20, 24, "Measured beside wanted", "h")
    middle = LABELS + PLOT / 3
    picture.text(middle, 46, "wanted", "t", anchor="middle")
    widest = max((abs(math.log(mark.share)) for mark in marks if mark.share > 1), default=1.0)
    for number, mark in enumerate(marks):
        y = 54 + number * LINE
        length = max(-PLOT / 3, math.log(mark.share) / max(widest, 0.1) * PLOT * 2 / 3)
        start, width = min(middle, middle + length), max(abs(length), 2.0)
        picture.text(LABELS - 8, y + 13, mark.text, "t", anchor="end", fill=INK)
        picture.rect(start, y + 2, width, LINE - 6, MET if mark.share >= 1 else MISSED, mark.figures)
        at = middle + length + 6 if mark.share >= 1 else middle + 6
        picture.text(at, y + 13, mark.figures, "t")
    picture.rect(middle - 0.5, 50, 1, len(marks) * LINE + 4, INK)
    return picture.svg()


def times_chart(
    title: str, rows: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]], unit: str
) -> str:
    """Draw times side by side, shorter is faster.

    Args:
        title: The heading.
        rows: Names of the operations.
        series: Each library's name, and its times by row; None: the library does not have the operation.
        unit: Unit of the times.
    """
    height = 64 + len(rows) * (len(series) * 15 + 12)
    picture = Picture(title, LABELS + PLOT + 90, height)
    picture.text(20, 24, title, "h")
    x: float = 20
    for number, (name, _) in enumerate(series):
        picture.rect(x, 36, 12, 12, SERIES[number % len(SERIES)])
        picture.text(x + 18, 46, name, "s")
        x += 40 + 7.2 * len(name)
    longest = max((value for _, values in series for value in values if value is not None), default=1.0)
    y = 62.0
    for row, name in enumerate(rows):
        picture.text(LABELS - 8, y + len(series) * 7.5 + 4, name, "t", anchor="end", fill=INK)
        for number, (who, values) in enumerate(series):
            value = values[row]
            if value is not None:
                width = max(1.5, value / longest * PLOT)
                picture.rect(
                    LABELS, y + number * 15, width, 12, SERIES[number % len(SERIES)], f"{who}: {value:g} {unit}"
                )
                picture.text(LABELS + width + 6, y + number * 15 + 10, f"{value:g} {unit}", "t", fill=MUTED)
        y += len(series) * 15 + 12
    return picture.svg()
