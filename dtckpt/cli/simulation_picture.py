"""The charts of ``dtckpt simulate``: seconds of operations, bytes of links, and time lost by interval between saves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtckpt.checkpoint.simulating.report import LinkLoad, Operation, Simulation
from dtckpt.cli.output import format_age
from dtckpt.errors import format_nbytes
from dtckpt.pictures.svg import MUTED, PALETTE, WAIT, Picture

_WIDTH, _EDGE, _LEFT, _BAR = 860.0, 24.0, 170.0, 22.0
_CURVE_HEIGHT, _CURVE_COLUMNS = 150.0, 61
_FILLS = {
    "device to host": PALETTE[0],
    "storage": PALETTE[5],
    "network": PALETTE[1],
    "agreement": PALETTE[2],
    "planning": WAIT,
}
_KINDS = {
    "stage": "device to host",
    "hand over": "storage",
    "write": "storage",
    "commit": "agreement",
    "open": "agreement",
    "read": "storage",
    "share": "network",
    "load": "device to host",
    "agree": "agreement",
    "move": "network",
    "plan": "planning",
    "read and write": "storage",
}
"""By part of an operation, what takes its time."""
_CURVE_RANGE = 30.0
"""The curve goes from the best interval divided by this to the best times this."""


def simulation_picture(found: Simulation) -> str:
    """Draw the result of a simulation."""
    loads = [(each, load) for each in found.operations for load in each.loads if load.total_nbytes]
    seconds_top = 108.0
    links_top = seconds_top + len(found.operations) * (_BAR + 10) + 80
    curve_top = links_top + len(loads) * (_BAR + 6) + 66
    picture = Picture(f"Simulation of {found.model}", _WIDTH, curve_top + _CURVE_HEIGHT + 72)
    axes = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    picture.text(_EDGE, 36, f"{found.model} on {found.num_clients} clients ({axes})", "h")
    picture.text(_EDGE, 56, f"{format_nbytes(found.nbytes)} in {found.num_chunks} chunks, {found.num_hosts} hosts", "s")
    _draw_seconds(picture, found.operations, seconds_top)
    _draw_links(picture, loads, links_top)
    _draw_curve(picture, found, curve_top)
    return picture.svg()


def _draw_seconds(picture: Picture, operations: Sequence[Operation], top: float) -> None:
    picture.text(_EDGE, top - 20, "Seconds", "s")
    x = _LEFT
    for kind, fill in _FILLS.items():
        picture.rect(x, top - 30, 12, 12, fill)
        picture.text(x + 17, top - 20, kind, "s")
        x += 17 + 7 * len(kind) + 20
    longest = max(each.seconds for each in operations) or 1.0
    scale = (_WIDTH - _LEFT - 120) / longest
    for row, each in enumerate(operations):
        x, y = _LEFT, top + row * (_BAR + 10)
        picture.text(_LEFT - 10, y + 15, each.name, anchor="end")
        for part, seconds in each.parts.items():
            picture.rect(x, y, seconds * scale, _BAR, _FILLS[_KINDS[part]], f"{each.name}, {part}: {seconds:.3g} s")
            x += seconds * scale
        picture.text(x + 8, y + 15, f"{each.seconds:.3g} s", "t")


def _draw_links(picture: Picture, loads: Sequence[tuple[Operation, LinkLoad]], top: float) -> None:
    picture.text(_EDGE, top - 20, "Bytes of the busiest link, and of all links of its kind", "s")
    most = max((load.max_nbytes for _, load in loads), default=1)
    for row, (operation, load) in enumerate(loads):
        y = top + row * (_BAR + 6)
        text = f"{format_nbytes(load.max_nbytes)} of {format_nbytes(load.total_nbytes)}"
        length = (_WIDTH - _LEFT - 210) * load.max_nbytes / most
        picture.text(_LEFT - 10, y + 15, f"{operation.name}: {load.link}", "t", anchor="end")
        picture.rect(
            _LEFT,
            y,
            max(1.0, length),
            _BAR,
            _FILLS.get(load.link, PALETTE[0]),
            f"{operation.name}, {load.link}: {text}",
        )
        picture.text(_LEFT + length + 8, y + 15, text, "t")


def _draw_curve(picture: Picture, found: Simulation, top: float) -> None:
    """Draw the share of the time that is lost, a column per interval; intervals grow by a factor."""
    share = 100 * found.lost_share(found.interval_s)
    picture.text(
        _EDGE,
        top - 20,
        f"Time lost by interval between saves: at best {share:.2f} %, every {format_age(found.interval_s)}",
        "s",
    )
    middle = _CURVE_COLUMNS // 2
    intervals = [
        found.interval_s * math.exp(math.log(_CURVE_RANGE) * (at - middle) / middle) for at in range(_CURVE_COLUMNS)
    ]
    # A save must be complete before the next one begins.
    possible = [interval if interval >= found.lag_s else math.nan for interval in intervals]
    shares = [found.lost_share(interval) for interval in possible]
    most = max(share for share in shares if not math.isnan(share))
    width = (_WIDTH - _LEFT - _EDGE) / _CURVE_COLUMNS
    for at, (interval, lost) in enumerate(zip(intervals, shares, strict=True)):
        x = _LEFT + at * width
        if not math.isnan(lost):
            height = _CURVE_HEIGHT * lost / most
            fill = PALETTE[1] if at == middle else WAIT
            tip = f"every {format_age(interval)}: {100 * lost:.2f} %"
            picture.rect(x, top + _CURVE_HEIGHT - height, width - 2, height, fill, tip)
        if at % (middle // 3) == 0:
            picture.text(x + width / 2, top + _CURVE_HEIGHT + 18, format_age(interval), "t", anchor="middle")
    picture.rect(_LEFT, top + _CURVE_HEIGHT + 1, _WIDTH - _LEFT - _EDGE, 1, MUTED)
    picture.text(_LEFT - 10, top + 12, f"{100 * most:.1f} %", "t", anchor="end")
    picture.text(_LEFT - 10, top + _CURVE_HEIGHT, "0", "t", anchor="end")
