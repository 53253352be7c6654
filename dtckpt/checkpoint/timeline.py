"""Timelines of saves and restores: the phases of each client, as a picture."""

from __future__ import annotations

from collections.abc import Mapping

from dtckpt.format.manifest import Costs, PhaseCost
from dtckpt.layout.clients import client_id
from dtckpt.pictures.svg import MUTED, PALETTE, WAIT, Picture
from dtckpt.storage.location import Location

_EDGE, _LEFT, _TOP = 24.0, 84.0, 112.0


def report_picture(what: str, path: Location, phases: Mapping[str, PhaseCost]) -> str | None:
    """Draw the phases of this client, for a notebook; None if there are none."""
    if not phases:
        return None
    total = sum(cost.seconds for cost in phases.values())
    return timeline_picture({client_id(): phases}, f"{what} {path}", f"{total:.3g} s on this client")


def timeline_picture(costs: Costs, title: str, subtitle: str) -> str:
    """Draw a lane per client: its phases, one after the other, as long as each took."""
    phases = list(dict.fromkeys(phase for own in costs.values() for phase in own))
    fills = {phase: WAIT if phase == "barrier" else PALETTE[at % len(PALETTE)] for at, phase in enumerate(phases)}
    longest = max((sum(cost.seconds for cost in own.values()) for own in costs.values()), default=0.0) or 1.0
    lane = max(2.0, min(28.0, 900 / max(len(costs), 1)))
    gap = 4.0 if lane >= 12 else 1.0 if lane >= 5 else 0.0
    width, height = 760.0, lane * len(costs)
    picture = Picture(title, _LEFT + width + 2 * _EDGE, _TOP + height + 52)
    picture.text(_EDGE, 36, title, "h")
    picture.text(_EDGE, 56, subtitle, "s")
    x = _LEFT
    for phase in phases:
        picture.rect(x, 70, 12, 12, fills[phase])
        picture.text(x + 17, 80, phase, "s")
        x += 17 + 7 * len(phase) + 22
    picture.text(_LEFT - 8, _TOP - 6, "client", "t", anchor="end")
    for at, (client, own) in enumerate(sorted(costs.items())):
        x, y = _LEFT, _TOP + at * lane
        for phase, cost in own.items():
            length = cost.seconds / longest * width
            tip = f"client {client}, {phase}: {cost}"
            picture.rect(x, y, length, lane - gap, fills[phase], tip)
            x += length
        if at % max(1, round(16 / lane)) == 0:
            picture.text(_LEFT - 8, y + (lane - gap) / 2 + 4, str(client), "t", anchor="end")
    for part in range(5):
        at_x = _LEFT + width * part / 4
        picture.rect(at_x, _TOP + height + 4, 1, 6, MUTED)
        picture.text(at_x, _TOP + height + 24, f"{longest * part / 4:.3g} s", "t", anchor="middle")
    return picture.svg()
