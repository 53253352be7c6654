"""Visualize shardings: which device holds which region of a tensor, in the terminal, as SVG and as HTML."""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtckpt.dtensor.tensor import DTensor, fetch_layout
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.layout import text_format
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

MAX_DEVICE_RUNS = 16
"""Most runs of devices that the text of one region names."""

MAX_TEXT_COLUMNS = 16
"""Most columns of a drawn table; a tensor that is cut into more gets a list of regions."""

MAX_TEXT_ROWS = 256
"""Most rows of a table."""

MAX_DRAWN_RANK = 3

_Span = tuple[int, int]
_Cell = tuple[Region, tuple[int, ...]]
_Extent = tuple[float, float]
_Panel = dict[tuple[_Span, _Span], _Cell]

_MAX_FILE_COLUMNS = 10_000
_UNIT = (0, 1)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# --- regions ------------------------------------------------------------------------------------------------------


def sharding_grid(layout: Layout, shape: Sequence[int]) -> list[tuple[Region, tuple[int, ...]]]:
    """Return the distinct regions of a tensor, in row-major order, each with all devices that hold it, ascending.

    Every device occurs once. Regions that hold an element are disjoint and cover the tensor.

    Args:
        layout: The layout of the tensor.
        shape: Global shape.

    Raises:
        LayoutError: The shape does not fit the layout, or the layout has no shards.

    >>> from dtckpt import Layout, abstract_mesh
    >>> sharding_grid(Layout(["x"], abstract_mesh({"x": 2, "y": 2})), (3,))
    [(Region(offset=(0,), shape=(2,)), (0, 1)), (Region(offset=(2,), shape=(1,)), (2, 3))]
    """
    holders: dict[Region, list[int]] = {}
    for devices in layout.devices_by_shard().values():
        holders.setdefault(layout.region(devices[0], shape), []).extend(devices)
    return [(region, tuple(sorted(devices))) for region, devices in holders.items()]


@dataclass(frozen=True)
class _Subject:
    """A layout and a shape, cut into the cells of a picture."""

    layout: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor | Layout, shape: Sequence[int] | None) -> _Subject:
        if isinstance(tensor, Layout):
            if shape is None:
                raise LayoutTypeError("drawing a layout: got no shape, expected the global shape of the tensor")
            return cls(tensor, tuple(shape))
        layout = fetch_layout(tensor)
        if shape is not None and tuple(shape) != tuple(tensor.shape):
            raise LayoutError(f"drawing a DTensor: got shape {tuple(shape)}, expected its own, {tuple(tensor.shape)}")
        return cls(layout, tuple(tensor.shape))

    @cached_property
    def cells(self) -> list[_Cell]:
        return sharding_grid(self.layout, self.shape)

    @property
    def empty(self) -> list[_Cell]:
        return [cell for cell in self.cells if cell[0].is_empty]

    @property
    def filled(self) -> list[_Cell]:
        return [cell for cell in self.cells if not cell[0].is_empty]

    @cached_property
    def panels(self) -> dict[str, _Panel]:
        """The filled cells by row and column, by name of panel; of three dims, each chunk of the first is a panel."""
        panels: dict[str, _Panel] = {}
        for region, devices in self.filled:
            spans = list(zip(region.offset, region.stop, strict=True))
            row, column = [_UNIT, _UNIT, *spans][-2:]
            name = f"dim 0 in {_range(spans[0])}" if len(spans) > 2 else ""
            panels.setdefault(name, {})[row, column] = region, devices
        return panels

    @property
    def rows(self) -> list[_Span]:
        return sorted({row for panel in self.panels.values() for row, _ in panel})

    @property
    def columns(self) -> list[_Span]:
        return sorted({column for panel in self.panels.values() for _, column in panel})

    def caption(self) -> list[str]:
        """Return lines that name the shape, the mesh, the sharding specs and the pending reductions."""
        mesh = self.layout.mesh
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.axis_sizes.items())
        specs = ", ".join(map(text_format.spec_to_text, self.layout.sharding_specs))
        lines = [f"shape {self.shape}; mesh {axes}; sharding specs ({specs})"]
        pending = ", ".join(f"{op} over {axis}" for axis, op in self.layout.partial.items())
        return [*lines, f"partial: {pending}"] if pending else lines

    def devices(self, ids: Sequence[int]) -> str:
        """Return a short text for devices, such as ``cpu:0-3,8``."""
        runs = list(_runs(ids))
        left = sum(stop - start + 1 for start, stop in runs[MAX_DEVICE_RUNS:])
        shown = ",".join(f"{start}" if start == stop else f"{start}-{stop}" for start, stop in runs[:MAX_DEVICE_RUNS])
        return f"{self.layout.mesh.device_type}:{shown}" + (f" and {left} more" if left else "")


def _range(span: _Span) -> str:
    return f"{span[0]}:{span[1]}"


def _runs(ids: Sequence[int]) -> Iterator[_Span]:
    """Yield first and last id of every run of three or more consecutive ids, and each other id as a run of its own."""
    for _, group in itertools.groupby(enumerate(ids), lambda item: item[1] - item[0]):
        run = [device for _, device in group]
        yield from [(run[0], run[-1])] if len(run) > 2 else [(device, device) for device in run]


OKABE_ITO = ((86, 180, 233), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (0, 114, 178), (213, 94, 0))
"""Red, green and blue of the colours of Okabe and Ito, which colour-blind people tell apart."""


def _colours(position: int) -> tuple[str, str]:
    """Return a light fill and a dark line of one hue; nearby positions differ, along rows and along columns."""
    lap, step = divmod(position, len(OKABE_ITO))
    hue = OKABE_ITO[(step + 3 * lap) % len(OKABE_ITO)]
    return _mixed(hue, 255, (0.62, 0.42, 0.78)[lap % 3]), _mixed(hue, 0, 0.4)


def _mixed(colour: tuple[int, int, int], other: int, share: float) -> str:
    """Return a colour with a share of white (255) or black (0)."""
    return "#" + "".join(f"{round(part + (other - part) * share):02x}" for part in colour)


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
    subject = _Subject.of(dtensor, None)
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


def _tables(subject: _Subject, is_coloured: bool) -> list[tuple[str, Table]]:
    texts = {
        region: Text(subject.devices(devices), f"black on {_colours(position)[0]}" if is_coloured else "")
        for position, (region, devices) in enumerate(subject.filled)
    }
    rows, columns, panels = subject.rows, subject.columns, subject.panels
    is_fine = len(columns) > MAX_TEXT_COLUMNS or len(rows) * len(panels) > MAX_TEXT_ROWS
    if len(subject.shape) not in (2, MAX_DRAWN_RANK) or is_fine:
        return [("", _region_table(texts))] if texts else []
    corner = "dim {} \\ dim {}".format(*range(len(subject.shape))[-2:])
    tables = []
    for name, panel in panels.items():
        table = Table(corner, *map(_range, columns), box=box.SQUARE, show_lines=True)
        for row in rows:
            table.add_row(_range(row), *(texts[panel[row, column][0]] for column in columns))
        tables.append((name, table))
    return tables


def _region_table(texts: dict[Region, Text]) -> Table:
    left = len(texts) - MAX_TEXT_ROWS
    table = Table("region", "devices", box=box.SQUARE, caption=f"and {left} more" if left > 0 else None)
    for region, text in itertools.islice(texts.items(), MAX_TEXT_ROWS):
        table.add_row(Text(str(region)), text)
    return table


# --- pictures -----------------------------------------------------------------------------------------------------

_MAX_WIDTH = 1200
_EDGE = 24
_LINE = 18
_CHAR = 6.8
"""Width of a character of 12 pixels, on the safe side."""

# Named after the root, since the styles of a picture inside a page hold for the whole page.
_STYLE = "".join(
    f".dtckpt-sharding {rule}"
    for rule in (
        "text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2933}",
        ".h{font-size:15px;font-weight:600}",
        ".s{fill:#616e7c}",
        ".t{fill:#616e7c;font-size:11px}",
        ".c text{text-anchor:middle}",
        ".c .r{font-size:10.5px;fill-opacity:.85}",
    )
)


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
    subject = _Subject.of(dtensor_or_layout, shape)
    if len(subject.shape) > MAX_DRAWN_RANK:
        raise LayoutError(
            f"drawing a tensor: got shape {subject.shape}, expected at most {MAX_DRAWN_RANK} dims; "
            "visualize_sharding lists the regions of any tensor"
        )
    return _Drawing(subject, title).svg()


def sharding_html(dtensor_or_layout: DTensor | Layout, shape: Sequence[int] | None = None, title: str = "") -> str:
    """Return a page of HTML with the picture of `sharding_svg` and a table of the regions.

    Args:
        dtensor_or_layout: The tensor, or a layout.
        shape: Global shape; needed with a layout.
        title: Text to show above.

    Raises:
        LayoutError: The tensor has more than three dims, or the shape does not fit the layout.
    """
    subject = _Subject.of(dtensor_or_layout, shape)
    rows = "".join(
        f"<tr><td>{region}<td>{region.numel}<td>{_escape(subject.devices(devices))}\n"
        for region, devices in subject.cells
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{_escape(title or "Sharding")}</title>\n'
        "<style>body{margin:24px;font:14px system-ui,Helvetica,Arial,sans-serif;color:#1f2933;background:#fff}"
        "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin:8px 24px}"
        "th,td{padding:4px 16px 4px 0;border-bottom:1px solid #e4e7eb;text-align:left}</style>\n"
        f"{sharding_svg(dtensor_or_layout, shape, title)}\n"
        f"<table><tr><th>region<th>elements<th>devices\n{rows}</table></html>\n"
    )


class _Drawing:
    """A picture that grows downwards; lengths are pixels."""

    def __init__(self, subject: _Subject, title: str) -> None:
        self.subject = subject
        self.title = title
        self.colours = {region: _colours(position) for position, (region, _) in enumerate(subject.cells)}
        self.rows, self.columns = self._sides()
        self.height, self.width = (sum(length for _, length in side.values()) for side in (self.rows, self.columns))
        digits = max((len(str(stop)) for _, stop in self.rows), default=0)
        self.left = _EDGE + (_LINE + _CHAR * digits + 8 if len(subject.shape) > 1 else 0)
        self.panels_per_line = int(max(1, min(len(subject.panels), _MAX_WIDTH / (self.left + self.width))))
        self.full_width = max(560, round(self.panels_per_line * (self.left + self.width) + _EDGE))
        self.bottom: float = _EDGE
        self.body: list[str] = []

    def _sides(self) -> tuple[dict[_Span, _Extent], dict[_Span, _Extent]]:
        rows, columns, shape = self.subject.rows, self.subject.columns, self.subject.shape
        if len(shape) < 2:
            return dict.fromkeys(rows, (0.0, 84.0)), _extents(columns, max(420, min(92 * len(columns), 1100)))
        # No side is drawn shorter than a third of the other one, so that long thin tensors stay readable.
        height, width = (420 * max(size / max(*shape[-2:], 1), 1 / 3) for size in shape[-2:])
        return (
            _extents(rows, max(height, min(56 * len(rows), 900))),
            _extents(columns, max(width, min(92 * len(columns), 1100))),
        )

    def svg(self) -> str:
        """Return the whole picture."""
        self._draw_heading()
        self._draw_panels()
        self._draw_empty()
        width, height = self.full_width, round(self.bottom + _EDGE / 2)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dtckpt-sharding" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{_escape(self.title or "Sharding")}</title>\n'
            f'<style>{_STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{"".join(self.body)}</svg>'
        )

    def _draw_heading(self) -> None:
        lines = [("h", line, 1.3) for line in [self.title] * bool(self.title)]
        lines += [("s", line, 1.0) for line in self.subject.caption()]
        for kind, text, scale in lines:
            for line in textwrap.wrap(text, int((self.full_width - 2 * _EDGE) / _CHAR / scale)):
                self.bottom += _LINE
                self.body.append(_text(_EDGE, self.bottom - 4, line, kind))
        self.bottom += _LINE / 2

    def _draw_panels(self) -> None:
        """Draw the panels in lines, left to right."""
        panels = self.subject.panels
        above = (3 if len(self.subject.shape) == MAX_DRAWN_RANK else 2 if self.subject.shape else 0.5) * _LINE
        for position, (name, panel) in enumerate(panels.items()):
            line, column_number = divmod(position, self.panels_per_line)
            x = self.left + column_number * (self.left + self.width)
            y = self.bottom + above + line * (above + self.height + _LINE)
            self.body.append(f'<g transform="translate({_px(x)} {_px(y)})">\n')
            self.body += [_text(0, -2.2 * _LINE, name)] if name else []
            self.body += self._axes()
            for (row, column), cell in panel.items():
                (top, height), (left, width) = self.rows[row], self.columns[column]
                self.body.append(self._cell(cell, left, top, width, height))
            self.body.append("</g>\n")
        self.bottom += -(-len(panels) // self.panels_per_line) * (above + self.height + _LINE)

    def _axes(self) -> Iterator[str]:
        """Yield the names of the dims, and the indices at the edges of the chunks."""
        rank = len(self.subject.shape)
        if rank > 0:
            yield _text(self.width / 2, -1.3 * _LINE, f"dim {rank - 1}", "t", 'text-anchor="middle"')
            for at, index in _ticks(self.columns, lambda index: _CHAR * len(str(index)) + 4):
                yield _text(at, -6, str(index), "t", 'text-anchor="middle"')
        if rank > 1:
            turned = f'text-anchor="middle" transform="rotate(-90 {_px(_EDGE + 8 - self.left)} {_px(self.height / 2)})"'
            yield _text(_EDGE + 8 - self.left, self.height / 2, f"dim {rank - 2}", "t", turned)
            for at, index in _ticks(self.rows, lambda _: 12):
                yield _text(-6, at + 4, str(index), "t", 'text-anchor="end"')

    def _draw_empty(self) -> None:
        """Draw the empty regions as a flow of dashed boxes."""
        if not self.subject.empty:
            return
        self.bottom += _LINE
        note = "no elements on" if self.subject.filled else "the tensor has no elements; its empty regions are on"
        self.body.append(_text(_EDGE, self.bottom, note, "s"))
        x, self.bottom, height = float(_EDGE), self.bottom + 8, 2.4 * _LINE
        for region, devices in self.subject.empty:
            texts = self.subject.devices(devices), str(region)
            width = min(_CHAR * max(map(len, texts)) + 16, self.full_width - 2 * _EDGE)
            if x > _EDGE and x + width > self.full_width - _EDGE:
                x, self.bottom = _EDGE, self.bottom + height
            self.body.append(self._cell((region, devices), x, self.bottom, width, height))
            x += width
        self.bottom += height

    def _cell(self, cell: _Cell, x: float, y: float, width: float, height: float) -> str:
        region, devices = cell
        fill, line = self.colours[region]
        look = f'fill="#fff" stroke="{line}" stroke-dasharray="4 3"' if region.is_empty else f'fill="{fill}"'
        inset = min(1.5, width / 6, height / 6)
        parts = [
            f'<g class="c"><title>{region} on {_escape(self.subject.devices(devices))}</title>',
            f'<rect x="{_px(x + inset)}" y="{_px(y + inset)}" width="{_px(width - 2 * inset)}" '
            f'height="{_px(height - 2 * inset)}" rx="{_px(min(4, inset * 3))}" {look}/>',
        ]
        lines = self._label(cell, int((width - 6) / _CHAR), int((height - 2) / _LINE))
        baseline = y + height / 2 - (len(lines) - 1) * _LINE / 2 + 4
        parts += [
            _text(x + width / 2, baseline + position * _LINE, text, kind) for position, (text, kind) in enumerate(lines)
        ]
        return "".join([*parts, "</g>\n"])

    def _label(self, cell: _Cell, num_chars: int, num_lines: int) -> list[tuple[str, str]]:
        """Return as many lines about a cell as there is room for, each with the class of its text."""
        region, devices = cell
        names = self.subject.devices(devices).replace(",", ", ")
        below = [(line, "r") for line in _wrap(str(region), num_chars)]
        for text, more in (
            (names, below),
            (names, []),
            (names.replace(":", ": "), []),
            (f"{len(devices)} devices", []),
        ):
            lines = [(line, "") for line in _wrap(text, num_chars)] + more
            if len(lines) <= num_lines and max(len(line) for line, _ in lines) <= num_chars:
                return lines
        return []


def _wrap(text: str, num_chars: int) -> list[str]:
    return textwrap.wrap(text, max(num_chars, 1), break_long_words=False, break_on_hyphens=False)


def _extents(spans: list[_Span], total: float) -> dict[_Span, _Extent]:
    """Return ``(start, length)`` of every span, in pixels: about ``total`` for all, very short ones widened."""
    size = sum(stop - start for start, stop in spans)
    least = min(40.0, total / max(len(spans), 1))
    lengths = [max(least, total * (stop - start) / size) for start, stop in spans]
    starts = itertools.accumulate(lengths, initial=0.0)
    return dict(zip(spans, zip(starts, lengths, strict=False), strict=True))


def _ticks(extents: dict[_Span, _Extent], width: Callable[[int], float]) -> Iterator[tuple[float, int]]:
    """Yield offset in pixels and index of the edges, the last one first, without edges whose texts would overlap."""
    edges = [(0.0, 0), *((at + length, stop) for (_, stop), (at, length) in extents.items())]
    free = float("inf")
    for at, index in reversed(edges):
        if at + width(index) / 2 <= free:
            yield at, index
            free = at - width(index) / 2


def _px(length: float) -> str:
    return f"{length:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, kind: str = "", extra: str = "") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f" {extra}" if extra else "")
    return f'<text x="{_px(x)}" y="{_px(y)}"{attributes}>{_escape(text)}</text>\n'


def _escape(text: str) -> str:
    """Return a text as XML and HTML write it; characters that XML cannot hold are replaced."""
    return html.escape(_NOT_XML.sub("\ufffd", text))
