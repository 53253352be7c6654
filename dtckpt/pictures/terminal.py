"""Print which device holds which region of a tensor, as tables in the terminal."""

from __future__ import annotations

import itertools

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtckpt.layout.region import Region
from dtckpt.pictures.sharding import MAX_DRAWN_RANK, Subject, range_text, region_colours

MAX_TEXT_COLUMNS = 16
"""Most columns of a drawn table; a tensor that is cut into more gets a list of regions."""

MAX_TEXT_ROWS = 256
"""Most rows of a table."""

_MAX_FILE_COLUMNS = 10_000


def print_sharding(subject: Subject, header: str, *, is_coloured: bool) -> None:
    """Print the caption and the tables of a tensor, below a header."""
    console = Console(highlight=False)
    tables = _tables(subject, is_coloured=is_coloured)
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
