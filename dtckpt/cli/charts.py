"""The charts of ``dtckpt plot --kind traffic`` and ``dtckpt simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.simulating.simulate import LinkLoad, SimulatedOperation, Simulation
from dtckpt.cli.output import format_age
from dtckpt.errors import format_nbytes
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.pictures.svg import MUTED, PALETTE, WAIT, Picture
from dtckpt.redistribution.exchange_plan import plan_exchange

_EDGE = 24.0

# --- traffic: bytes between devices as a matrix -----------------------------------------------------------------------

MAX_CELLS = 64
"""Rows and columns of a matrix, at most; of more devices, a cell stands for a block of them."""
_LIGHT, _DARK = np.array([0xDE, 0xEB, 0xF7]), np.array([0x08, 0x30, 0x6B])
_MATRIX_LEFT, _MATRIX_TOP = 84.0, 112.0


def traffic(source: Layout, target: Layout, shape: tuple[int, ...], nbytes: int) -> npt.NDArray[np.int64]:
    """Return the bytes from every device of the source (rows) to every device of the target (columns).

    Devices with the same number in both meshes are one device. A device keeps elements that it needs and already holds.

    Args:
        source: The layout before.
        target: The layout after.
        shape: Global shape.
        nbytes: Bytes of the whole tensor.
    """
    itemsize = nbytes // max(1, math.prod(shape))
    matrix = np.zeros((source.mesh.size(), target.mesh.size()), np.int64)
    rows, columns = source.mesh.offsets, target.mesh.offsets
    for client in target.mesh.clients:
        plan = plan_exchange(source, target, shape, client)
        moves = [*plan.copies, *(move for moves in plan.receives.values() for move in moves)]
        origins: dict[tuple[int, Region], list[int]] = {}
        for move in moves:
            matrix[rows.of(move.source), columns.of(move.target)] += move.region.numel * itemsize
            origins.setdefault((move.target, move.region), []).append(move.source)
        for move in plan.forwards:
            for origin in origins[move.source, move.region]:
                matrix[rows.of(origin), columns.of(move.target)] += move.region.numel * itemsize
    return matrix


def traffic_picture(matrix: npt.NDArray[np.int64], title: str, subtitle: str) -> str:
    """Draw bytes from every device (rows) to every device (columns): the darker, the more."""
    steps = [-(-size // MAX_CELLS) for size in matrix.shape]
    rows, columns = (range(0, size, step) for size, step in zip(matrix.shape, steps, strict=True))
    blocks = np.add.reduceat(np.add.reduceat(matrix, list(rows), axis=0), list(columns), axis=1)
    cell = max(10.0, min(64.0, 640 / max(blocks.shape)))
    width, height = len(columns) * cell, len(rows) * cell
    picture = Picture(title, max(560.0, _MATRIX_LEFT + width + _EDGE), _MATRIX_TOP + height + 84)
    picture.text(_EDGE, 36, title, "h")
    picture.text(_EDGE, 56, subtitle, "s")
    sides = f"from device (rows{_block_note(steps[0])}) to device (columns{_block_note(steps[1])})"
    picture.text(_EDGE, _MATRIX_TOP - 32, sides, "s")
    most = int(blocks.max(initial=0))
    for at, row in enumerate(rows):
        for to, column in enumerate(columns):
            nbytes = int(blocks[at, to])
            share = nbytes / most if most else 0.0
            fill = "#f5f7fa" if not nbytes else _shade(share)
            sender, receiver = _names(row, steps[0], matrix.shape[0]), _names(column, steps[1], matrix.shape[1])
            tip = f"{sender} to {receiver}: {nbytes} bytes"
            picture.rect(_MATRIX_LEFT + to * cell + 0.5, _MATRIX_TOP + at * cell + 0.5, cell - 1, cell - 1, fill, tip)
            if nbytes and cell >= 60:
                x, y = _MATRIX_LEFT + (to + 0.5) * cell, _MATRIX_TOP + (at + 0.5) * cell + 4
                picture.text(
                    x, y, format_nbytes(nbytes), "r", anchor="middle", fill="#ffffff" if share > 0.45 else "#1f2933"
                )
    for at in range(0, len(rows), max(1, round(18 / cell))):
        picture.text(_MATRIX_LEFT - 8, _MATRIX_TOP + (at + 0.5) * cell + 4, str(rows[at]), "t", anchor="end")
    for to in range(0, len(columns), max(1, round(34 / cell))):
        picture.text(_MATRIX_LEFT + (to + 0.5) * cell, _MATRIX_TOP - 8, str(columns[to]), "t", anchor="middle")
    for part in range(40):
        picture.rect(_MATRIX_LEFT + part * 4, _MATRIX_TOP + height + 24, 4.5, 12, _shade(part / 39))
    picture.text(_MATRIX_LEFT, _MATRIX_TOP + height + 54, "0", "t")
    picture.text(_MATRIX_LEFT + 160, _MATRIX_TOP + height + 54, format_nbytes(most), "t", anchor="end")
    return picture.svg()


def _block_note(step: int) -> str:
    return f", in blocks of {step}" if step > 1 else ""


def _names(first: int, step: int, size: int) -> str:
    last = min(first + step, size) - 1
    return f"device {first}" if first == last else f"devices {first}-{last}"


def _shade(share: float) -> str:
    red, green, blue = (_LIGHT + (_DARK - _LIGHT) * share).round().astype(int).tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"


# --- simulation: seconds of operations, bytes of links, and time lost by interval between saves -----------------------

_WIDTH, _LEFT, _BAR = 860.0, 170.0, 22.0
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
"""By part of an operation, the kind of work that takes its time."""
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


def _draw_seconds(picture: Picture, operations: Sequence[SimulatedOperation], top: float) -> None:
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


def _draw_links(picture: Picture, loads: Sequence[tuple[SimulatedOperation, LinkLoad]], top: float) -> None:
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
