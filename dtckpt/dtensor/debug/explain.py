"""`explain` a redistribution: its steps, the bytes that each device receives, and the least possible."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtckpt.errors import LayoutError, LayoutTypeError, format_nbytes
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.region import Region
from dtckpt.pictures.svg import INK, PALETTE, Picture
from dtckpt.redistribution.exchange_plan import (
    ExchangePlan,
    Move,
    kept_axes,
    overlapping_shards,
    plan_exchange,
    reduced_axes,
    term_of,
)
from dtckpt.redistribution.execute import resolve_match
from dtckpt.redistribution.path_plan import plan_path

MAX_TEXT_DEVICES = 64
"""Devices that the text of an explanation lists."""

_LEFT, _WIDTH, _LINE = 140, 400, 20
"""Lengths of the picture, in pixels."""

_HEADINGS = ("device", "client", "received", "copied", "lower bound")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one device receives and copies.

    Args:
        device: Complete name.
        client: Its client.
        received: Bytes from other clients.
        copied: Bytes from devices of the same client, the device itself included.
        lower_bound: Bytes that the client must receive for this device: its new box without the parts that the client
            held. A box that several devices of one client need counts for the first of them. A reduced box counts once,
            if the client did not hold all terms.
    """

    device: str
    client: int
    received: int
    copied: int
    lower_bound: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step from a layout to the next.

    Args:
        source: Layout before.
        target: Layout after.
        kind: ``copy`` (no client receives anything), ``exchange`` (clients exchange boxes) or ``terms`` (values become
            terms of a reduction, in place).
        devices: The target's devices, in mesh order.
    """

    source: Layout
    target: Layout
    kind: str
    devices: tuple[Traffic, ...]

    def __str__(self) -> str:
        received, copied = (sum(getattr(each, name) for each in self.devices) for name in ("received", "copied"))
        change = f"{_brief(self.source)} -> {_brief(self.target)}"
        return f"{self.kind:<10} {change}: {received} bytes received, {copied} copied"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The steps and bytes of a redistribution; `str` gives a table.

    Args:
        source: The layout before.
        target: The layout after.
        shape: Global shape.
        dtype: The tensor's dtype.
        steps: In order; none if the layouts are equal.
        devices: Sums over the steps, and the lower bounds of the whole change. The devices of the target come first, in
            mesh order; then devices that only take part in between.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]
    devices: tuple[Traffic, ...]

    @property
    def received(self) -> int:
        """Bytes that all devices receive from other clients."""
        return sum(device.received for device in self.devices)

    @property
    def copied(self) -> int:
        """Bytes that are copied within clients."""
        return sum(device.copied for device in self.devices)

    @property
    def lower_bound(self) -> int:
        """The fewest bytes that all devices could receive from other clients."""
        return sum(device.lower_bound for device in self.devices)

    def __str__(self) -> str:
        heading = f"{self.shape} of {self.dtype}: {_brief(self.source)} -> {_brief(self.target)}"
        steps = [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)] or ["  nothing to do"]
        return "\n".join([heading, *steps, *self._table()])

    def _repr_svg_(self) -> str:
        return received_picture(self)

    def _table(self) -> Iterator[str]:
        shown = self.devices[:MAX_TEXT_DEVICES]
        rows = [_HEADINGS, *(_row(device.device, device.client, device) for device in shown)]
        if more := len(self.devices) - len(shown):
            rows.append((f"and {more} more", "", "", "", ""))
        rows.append(_row("total", "", self))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *numbers in rows:
            cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
            yield "  ".join(["", name.ljust(widths[0]), *cells])


def _row(name: str, client: int | str, sums: Traffic | Explanation) -> tuple[str, ...]:
    return name, str(client), str(sums.received), str(sums.copied), str(sums.lower_bound)


def received_picture(explanation: Explanation) -> str:
    """Draw the bytes that each device receives; a line marks the fewest possible."""
    devices = explanation.devices[:MAX_TEXT_DEVICES]
    change = f"{_brief(explanation.source)} -> {_brief(explanation.target)}"
    picture = Picture(f"Bytes received: {change}", _LEFT + _WIDTH + 120, 94 + len(devices) * _LINE)
    picture.text(20, 28, "Bytes that each device receives", "h")
    picture.text(20, 48, f"{explanation.shape} of {explanation.dtype}: {change}", "s")
    total = f"{format_nbytes(explanation.received)} in all, {format_nbytes(explanation.lower_bound)} at least"
    more = len(explanation.devices) - len(devices)
    picture.text(20, 66, f"{total}; lines mark the least of each device{f'; {more} more devices' if more else ''}", "s")
    most = max((max(each.received, each.lower_bound) for each in devices), default=0) or 1
    for number, each in enumerate(devices):
        y = 80 + number * _LINE
        name = f"client {each.client}, {each.device.rpartition('/')[2].removeprefix('device:')}"
        picture.text(_LEFT - 8, y + 13, name, "t", anchor="end")
        picture.rect(_LEFT, y + 2, max(1.0, each.received / most * _WIDTH), _LINE - 5, PALETTE[0], each.device)
        picture.rect(_LEFT + each.lower_bound / most * _WIDTH - 1, y, 2, _LINE - 1, INK)
        picture.text(_LEFT + _WIDTH + 8, y + 13, format_nbytes(each.received), "t")
    return picture.svg()


def explain(source: Layout, target: Layout, shape: Sequence[int], dtype: torch.dtype) -> Explanation:
    """Explain how `redistribute` would bring a tensor into another layout, for all clients. Sends nothing.

    Neither the devices nor a process group need exist. The plan cache stays unchanged. The call takes as long as
    planning for every client.

    Args:
        source: The layout before.
        target: The layout after; a MATCH spec keeps the source's.
        shape: Global shape.
        dtype: The tensor's dtype.

    Raises:
        LayoutTypeError: An argument is no Layout.
        LayoutError: The layouts and the shape do not fit each other, or a layout has no mesh.

    >>> from dtckpt import Layout, abstract_mesh
    >>> mesh = abstract_mesh({"x": 2})
    >>> print(explain(Layout(["x"], mesh), Layout.replicated(mesh, 1), (4,), torch.float32).steps[0])
    copy       [x] on x=2 -> [-] on x=2: 0 bytes received, 32 copied
    """
    for layout in (source, target):
        if not isinstance(layout, Layout):
            raise LayoutTypeError(f"explain needs layouts; got {type(layout).__name__}")
        if not layout.mesh.device_ids:
            raise LayoutError(f"explain: got {layout!r}, expected a layout on a mesh with a grid of devices")
        layout.region(layout.mesh.device_ids[0], shape)  # refuses a shape that does not fit
    shape, target = tuple(shape), resolve_match(target, source)
    # Plans differ between clients only by their own devices, so the steps are the same for any member.
    viewer = source.mesh.clients[0]
    layout = _seen_by(viewer, source)
    steps = []
    is_rounded = not (dtype.is_floating_point or dtype.is_complex)
    for step in plan_path(layout, _seen_by(viewer, target), shape, is_rounded=is_rounded):
        steps.append(_explain_step(layout, step, shape, dtype))
        layout = step
    bounds = _as_traffic(layout, _lower_bounds(source, layout, shape), {}, {}, dtype)
    if layout != target:
        steps.append(Step(layout, target, "terms", _as_traffic(target, {}, {}, {}, dtype)))
    return Explanation(source, target, shape, dtype, tuple(steps), _summed(bounds, steps))


def _explain_step(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Step:
    bounds = _lower_bounds(source, target, shape)
    received: dict[int, int] = defaultdict(int)
    copied: dict[int, int] = defaultdict(int)
    axes = reduced_axes(source, target)
    for client in target.mesh.clients:
        # Not through the cache: an explanation must not evict plans in use.
        plan = plan_exchange.__wrapped__(source, target, shape, client)
        _add(received, itertools.chain.from_iterable(plan.receives.values()))
        if axes or not _keeps_components(plan, source, target, shape):
            _add(copied, (*plan.copies, *plan.forwards))
    kind = "exchange" if any(received.values()) else "copy"
    return Step(source, target, kind, _as_traffic(target, bounds, received, copied, dtype))


def _add(numbers: dict[int, int], moves: Iterable[Move]) -> None:
    for move in moves:
        numbers[move.target] += move.region.numel


def _keeps_components(plan: ExchangePlan, source: Layout, target: Layout, shape: tuple[int, ...]) -> bool:
    """Tell whether the new components are old components, without a copy."""
    return plan.is_local and all(
        move.region == source.region(move.source, shape) == target.region(move.target, shape) for move in plan.copies
    )


def _lower_bounds(source: Layout, target: Layout, shape: tuple[int, ...]) -> dict[int, int]:
    """Return, by device of the target, the elements of its box that its client must receive; see `Traffic`.

    The bounds follow from the parts that clients hold, not from any plan.
    """
    kept, reduced = kept_axes(source, target), reduced_axes(source, target)
    num_terms = math.prod(source.mesh.dim_size(axis) for axis in reduced)
    # By client, shard and coordinates along the kept axes: the terms that the client holds.
    held_terms: dict[tuple[object, ...], set[tuple[int, ...]]] = defaultdict(set)
    for device, shard in zip(source.mesh.device_ids, source.offset_to_shard(), strict=True):
        part = source.mesh.client_of(device), shard, term_of(source, kept, device)
        held_terms[part].add(term_of(source, reduced, device))
    bounds: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    for device in target.mesh.device_ids:
        client, coordinates = target.mesh.client_of(device), term_of(target, kept, device)
        box = target.region(device, shape)
        if (need := (client, coordinates, box)) in seen:
            continue
        seen.add(need)
        complete = (
            overlap.numel
            for shard, overlap in _parts(source, shape, box)
            if len(held_terms.get((client, shard, coordinates), ())) == num_terms
        )
        bounds[device] = box.numel - sum(complete)
    return bounds


def _parts(source: Layout, shape: tuple[int, ...], box: Region) -> Iterable[tuple[tuple[int, ...], Region]]:
    return () if box.is_empty else overlapping_shards(source, shape, box)


def _as_traffic(
    layout: Layout,
    bounds: Mapping[int, int],
    received: Mapping[int, int],
    copied: Mapping[int, int],
    dtype: torch.dtype,
) -> tuple[Traffic, ...]:
    """Return the traffic of every device, from numbers of elements by device id."""
    mesh = layout.mesh
    return tuple(
        Traffic(
            name, mesh.client_of(device), *(by.get(device, 0) * dtype.itemsize for by in (received, copied, bounds))
        )
        for device, name in zip(mesh.device_ids, mesh.portable().global_devices(), strict=True)
    )


def _summed(bounds: Sequence[Traffic], steps: Sequence[Step]) -> tuple[Traffic, ...]:
    sums = {traffic.device: traffic for traffic in bounds}
    for step in steps:
        for traffic in step.devices:
            sum_ = sums.get(traffic.device) or replace(traffic, received=0, copied=0, lower_bound=0)
            sums[traffic.device] = replace(
                sum_, received=sum_.received + traffic.received, copied=sum_.copied + traffic.copied
            )
    return tuple(sums.values())


def _seen_by(client: int, layout: Layout) -> Layout:
    """Return the layout on the mesh as a client sees it."""
    return Layout(layout.sharding_specs, layout.mesh.seen_by(client), layout.partial)


def _brief(layout: Layout) -> str:
    """Return a short text for a layout: the axes of each dim, pending reductions, the mesh."""
    dims = (
        "-" if spec == UNSHARDED else spec if isinstance(spec, str) else "+".join(spec)
        for spec in layout.sharding_specs
    )
    pending = "".join(f" {op} over {axis}" for axis, op in sorted(layout.partial.items()))
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.mesh.axis_sizes.items())
    return f"[{', '.join(dims)}]{pending} on {layout.mesh.name or axes}"
