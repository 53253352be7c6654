"""Visualize shardings: which device holds which region of a tensor, in the terminal, as SVG and as HTML."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.pictures.sharding import (
    MAX_DRAWN_RANK,
    Subject,
    range_text,
    region_colours,
    sharding_grid,
    subject_svg,
)
from dtckpt.pictures.svg import escape

__all__ = ["sharding_grid", "sharding_html", "sharding_svg", "visualize_sharding"]

MAX_TEXT_COLUMNS = 16
"""Most columns of a drawn table; a tensor that is cut into more gets a list of regions."""

MAX_TEXT_ROWS = 256
"""Most rows of a table."""

_MAX_FILE_COLUMNS = 10_000


def _subject_of(tensor: DTensor | Layout, shape: Sequence[int] | None) -> Subject:
    if isinstance(tensor, Layout):
        if shape is None:
            raise LayoutTypeError("drawing a layout: got no shape, expected the global shape of the tensor")
        return Subject(tensor, tuple(shape))
    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"drawing needs a DTensor; got {type(tensor).__name__}")
    if shape is not None and tuple(shape) != tuple(tensor.shape):
        raise LayoutError(f"drawing a DTensor: got shape {tuple(shape)}, expected its own, {tuple(tensor.shape)}")
    return Subject(tensor.layout, tuple(tensor.shape))


# --- terminal -----------------------------------------------------------------------------------------------------


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which device holds which region of a tensor, once per mesh.

    The client that owns the mesh's first device prints, the others do nothing; no client waits for another. Tensors
    with two or three dims are drawn, those of other ranks, or cut very finely, get a list of regions.

    Args:
        dtensor: The tensor.
        header: Text to print above.
        use_rich: Colour the regions, where the terminal can show colours.

    Raises:
        LayoutError: The argument is no DTensor.
    """
    subject = _subject_of(dtensor, None)
    mesh = subject.layout.mesh
    if mesh.device_ids[0] not in mesh.local_device_ids():
        return
    console = Console(highlight=False)
    tables = _tables(subject, is_coloured=use_rich)
    if not console.is_terminal:  # a file has no width to fold lines at
        console.width = _MAX_FILE_COLUMNS
    for line in [header] * bool(header) + subject.caption():
        console.print(Text(line), soft_wrap=True)
    for name, table in tables:
        if name:
            console.print(Text(name))
        console.print(table)
    if empty := sorted(device for _, devices in subject.empty for device in devices):
        whole = "" if subject.filled else "the tensor has no elements: "
        console.print(Text(f"{whole}no elements on {subject.devices(empty)}"), soft_wrap=True)
    console.print()


def _tables(subject: Subject, is_coloured: bool) -> list[tuple[str, Table]]:
    texts = {
        region: Text(subject.devices(devices), f"black on {region_colours(position)[0]}" if is_coloured else "")
        for position, (region, devices) in enumerate(subject.filled)
    }
    rows, columns, panels = subject.rows, subject.columns, subject.panels
    is_fine = len(columns) > MAX_TEXT_COLUMNS or len(rows) * len(panels) > MAX_TEXT_ROWS
    if len(subject.shape) not in (2, MAX_DRAWN_RANK) or is_fine:
        return [("", _region_table(texts))] if texts else []
    corner = "dim {} \\ dim {}".format(*range(len(subject.shape))[-2:])
    tables = []
    for name, panel in panels.items():
        table = Table(corner, *map(range_text, columns), box=box.SQUARE, show_lines=True)
        for row in rows:
            table.add_row(range_text(row), *(texts[panel[row, column][0]] for column in columns))
        tables.append((name, table))
    return tables


def _region_table(texts: dict[Region, Text]) -> Table:
    left = len(texts) - MAX_TEXT_ROWS
    table = Table("region", "devices", box=box.SQUARE, caption=f"and {left} more" if left > 0 else None)
    for region, text in itertools.islice(texts.items(), MAX_TEXT_ROWS):
        table.add_row(Text(str(region)), text)
    return table


# --- pictures -----------------------------------------------------------------------------------------------------


def sharding_svg(dtensor_or_layout: DTensor | Layout, shape: Sequence[int] | None = None, title: str = "") -> str:
    """Draw which device holds which region, as an SVG picture.

    Each distinct region is one cell, with a colour and the devices that hold it, as far as there is room (its tooltip
    has all of them). Empty regions are dashed cells below the drawing.

    Of three dims, every chunk of the first one gets a panel.
    Long dims are shortened and very short chunks widened; the numbers at the edges are indices.

    Args:
        dtensor_or_layout: The tensor, or a layout.
        shape: Global shape; needed with a layout.
        title: Text to show above.

    Raises:
        LayoutError: The tensor has more than three dims, or the shape does not fit the layout.
    """
    return subject_svg(_subject_of(dtensor_or_layout, shape), title)


def sharding_html(dtensor_or_layout: DTensor | Layout, shape: Sequence[int] | None = None, title: str = "") -> str:
    """Return a page of HTML with the picture of `sharding_svg` and a table of the regions.

    Args:
        dtensor_or_layout: The tensor, or a layout.
        shape: Global shape; needed with a layout.
        title: Text to show above.

    Raises:
        LayoutError: The tensor has more than three dims, or the shape does not fit the layout.
    """
    subject = _subject_of(dtensor_or_layout, shape)
    rows = "".join(
        f"<tr><td>{region}<td>{region.numel}<td>{escape(subject.devices(devices))}\n"
        for region, devices in subject.cells
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title or "Sharding")}</title>\n'
        "<style>body{margin:24px;font:14px system-ui,Helvetica,Arial,sans-serif;color:#1f2933;background:#fff}"
        "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin:8px 24px}"
        "th,td{padding:4px 16px 4px 0;border-bottom:1px solid #e4e7eb;text-align:left}</style>\n"
        f"{subject_svg(subject, title)}\n"
        f"<table><tr><th>region<th>elements<th>devices\n{rows}</table></html>\n"
    )
