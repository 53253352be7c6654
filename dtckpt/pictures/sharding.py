"""Draw which device holds which region of a tensor, from its layout, as SVG and as a page of HTML; pure."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dtckpt.errors import LayoutError
from dtckpt.layout import text_format
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.pictures.svg import OKABE_ITO, escape

MAX_DEVICE_RUNS = 16
"""Most runs of devices that the text of one region names."""

MAX_DRAWN_RANK = 3

Span = tuple[int, int]
Cell = tuple[Region, tuple[int, ...]]
_Extent = tuple[float, float]
Panel = dict[tuple[Span, Span], Cell]

_UNIT = (0, 1)


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
class Subject:
    """A layout and a shape, cut into the cells of a picture."""

    layout: Layout
    shape: tuple[int, ...]

    @cached_property
    def cells(self) -> list[Cell]:
        return sharding_grid(self.layout, self.shape)

    @property
    def empty(self) -> list[Cell]:
        return [cell for cell in self.cells if cell[0].is_empty]

    @property
    def filled(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell[0].is_empty]

    @cached_property
    def panels(self) -> dict[str, Panel]:
        """The filled cells by row and column, by name of panel; of three dims, each chunk of the first is a panel."""
        panels: dict[str, Panel] = {}
        for region, devices in self.filled:
            spans = list(zip(region.offset, region.stop, strict=True))
            row, column = [_UNIT, _UNIT, *spans][-2:]
            name = f"dim 0 in {range_text(spans[0])}" if len(spans) > 2 else ""
            panels.setdefault(name, {})[row, column] = region, devices
        return panels

    @property
    def rows(self) -> list[Span]:
        return sorted({row for panel in self.panels.values() for row, _ in panel})

    @property
    def columns(self) -> list[Span]:
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


def range_text(span: Span) -> str:
    return f"{span[0]}:{span[1]}"


def _runs(ids: Sequence[int]) -> Iterator[Span]:
    """Yield first and last id of every run of three or more consecutive ids, and each other id as a separate run."""
    for _, group in itertools.groupby(enumerate(ids), lambda item: item[1] - item[0]):
        run = [device for _, device in group]
        yield from [(run[0], run[-1])] if len(run) > 2 else [(device, device) for device in run]


def region_colours(position: int) -> tuple[str, str]:
    """Return a light fill and a dark line of one hue; nearby positions differ, along rows and along columns."""
    lap, step = divmod(position, len(OKABE_ITO))
    hue = OKABE_ITO[(step + 3 * lap) % len(OKABE_ITO)]
    return _mixed(hue, 255, (0.62, 0.42, 0.78)[lap % 3]), _mixed(hue, 0, 0.4)


def _mixed(colour: tuple[int, int, int], other: int, share: float) -> str:
    """Return a colour with a share of white (255) or black (0)."""
    return "#" + "".join(f"{round(part + (other - part) * share):02x}" for part in colour)


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


def subject_svg(subject: Subject, title: str = "") -> str:
    """Draw a tensor, as `dtckpt.dtensor.debug.sharding_svg` says.

    Raises:
        LayoutError: The tensor has more than three dims, or the shape does not fit the layout.
    """
    if len(subject.shape) > MAX_DRAWN_RANK:
        raise LayoutError(
            f"drawing a tensor: got shape {subject.shape}, expected at most {MAX_DRAWN_RANK} dims; "
            "visualize_sharding lists the regions of any tensor"
        )
    return _Drawing(subject, title).svg()


def subject_html(subject: Subject, title: str = "") -> str:
    """Return a page of HTML with the picture and a table of the regions. Raises: As `subject_svg`."""
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


class _Drawing:
    """A picture that grows downwards; lengths are pixels."""

    def __init__(self, subject: Subject, title: str) -> None:
        self.subject = subject
        self.title = title
        self.colours = {region: region_colours(position) for position, (region, _) in enumerate(subject.cells)}
        self.rows, self.columns = self._sides()
        self.height, self.width = (sum(length for _, length in side.values()) for side in (self.rows, self.columns))
        digits = max((len(str(stop)) for _, stop in self.rows), default=0)
        self.left = _EDGE + (_LINE + _CHAR * digits + 8 if len(subject.shape) > 1 else 0)
        self.panels_per_line = int(max(1, min(len(subject.panels), _MAX_WIDTH / (self.left + self.width))))
        self.full_width = max(560, round(self.panels_per_line * (self.left + self.width) + _EDGE))
        self.bottom: float = _EDGE
        self.body: list[str] = []

    def _sides(self) -> tuple[dict[Span, _Extent], dict[Span, _Extent]]:
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
            f'viewBox="0 0 {width} {height}" role="img">\n<title>{escape(self.title or "Sharding")}</title>\n'
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

    def _cell(self, cell: Cell, x: float, y: float, width: float, height: float) -> str:
        region, devices = cell
        fill, line = self.colours[region]
        look = f'fill="#fff" stroke="{line}" stroke-dasharray="4 3"' if region.is_empty else f'fill="{fill}"'
        inset = min(1.5, width / 6, height / 6)
        parts = [
            f'<g class="c"><title>{region} on {escape(self.subject.devices(devices))}</title>',
            f'<rect x="{_px(x + inset)}" y="{_px(y + inset)}" width="{_px(width - 2 * inset)}" '
            f'height="{_px(height - 2 * inset)}" rx="{_px(min(4, inset * 3))}" {look}/>',
        ]
        lines = self._label(cell, int((width - 6) / _CHAR), int((height - 2) / _LINE))
        baseline = y + height / 2 - (len(lines) - 1) * _LINE / 2 + 4
        parts += [
            _text(x + width / 2, baseline + position * _LINE, text, kind) for position, (text, kind) in enumerate(lines)
        ]
        return "".join([*parts, "</g>\n"])

    def _label(self, cell: Cell, num_chars: int, num_lines: int) -> list[tuple[str, str]]:
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


def _extents(spans: list[Span], total: float) -> dict[Span, _Extent]:
    """Return ``(start, length)`` of every span, in pixels: about ``total`` for all, very short ones widened."""
    size = sum(stop - start for start, stop in spans)
    least = min(40.0, total / max(len(spans), 1))
    lengths = [max(least, total * (stop - start) / size) for start, stop in spans]
    starts = itertools.accumulate(lengths, initial=0.0)
    return dict(zip(spans, zip(starts, lengths, strict=False), strict=True))


def _ticks(extents: dict[Span, _Extent], width: Callable[[int], float]) -> Iterator[tuple[float, int]]:
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
    return f'<text x="{_px(x)}" y="{_px(y)}"{attributes}>{escape(text)}</text>\n'
