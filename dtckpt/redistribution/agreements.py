"""Agreements: facts that clients settle once and then take for granted; message tags carry a digest of them.

When a client meets a case for the first time, it asks the others for a fact that all need, such as the global shape of
given local shapes. When the case comes again, the client takes the answer for granted, without a message. This shortcut
fails if the case of one client comes again while another client's case has changed:

    client 0: case A, as in agreement 0       takes (8,) for granted     digest of 0
    client 1: case B, as in agreement 1       takes (6,) for granted     digest of 1

So each client keeps a digest of all facts that it has taken for granted, in order. The tags of messages contain this
digest (`dtckpt.redistribution.execute`). So messages of clients with different digests never meet, and the clients find
the cause as in any disagreement (`dtckpt.redistribution.disagreement`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

Group = tuple[int, ...]
"""Clients, ascending."""

MAX_AGREEMENTS = 1024
"""Most agreements that a group of clients remembers."""
MISMATCH = (
    "from_local, pack, distribute_tensor, local_map, or a module of a parallel style: from one call to a later one, "
    "local shapes or other arguments changed on some clients only, so the clients took different things for granted; "
    "where local shapes change like that, pass shape= or run_check=True to from_local, use_local_output=False to the "
    "styles, and let the shapes of local_map's results follow from those of its DTensors"
)
"""Text of the error that all clients raise when their digests differ."""
_MASK = 2**31 - 1


class _Agreements:
    """The agreements of a group of clients.

    Attributes:
        digest: Of all facts that this client has taken for granted since the clients last found a difference.
    """

    def __init__(self) -> None:
        self.digest = 0
        self._count = 0
        self._known: dict[Hashable, tuple[int, Any]] = {}
        self._cases: deque[Hashable] = deque()

    def recall(self, case: Hashable) -> Any:
        known = self._known.get(case)
        if known is None:
            return None
        number, fact = known
        self.digest = (self.digest * 1_000_003 + number + 1) & _MASK
        return fact

    def remember(self, case: Hashable, fact: Any) -> None:
        # All clients took part in an agreement, each with its own case. So they give it the same number, and forget it
        # at the same time.
        if len(self._cases) == MAX_AGREEMENTS:
            self._known.pop(self._cases.popleft(), None)
        self._cases.append(case)
        self._known[case] = self._count, fact
        self._count += 1


# By default process group, so that the agreements of a group that has ended go with it.
_agreements: WeakKeyDictionary[Any, dict[Group, _Agreements]] = WeakKeyDictionary()
_alone: dict[Group, _Agreements] = {}
"""Of groups of one client, which need no process group."""


def _of(group: Group) -> _Agreements:
    groups = _alone
    if len(group) > 1:
        world = dist.group.WORLD
        known = _agreements.get(world)
        groups = _agreements.setdefault(world, {}) if known is None else known
    return groups.get(group) or groups.setdefault(group, _Agreements())


def recall(group: Group, case: Hashable) -> Any:
    """Return the fact that a group of clients has agreed on for this client's case, and take it for granted.

    A group of several clients needs the default process group. Returns None if there was no such agreement.
    """
    return _of(group).recall(case)


def remember(group: Group, case: Hashable, fact: Any) -> None:
    """Note an agreement of a group of clients; each client calls this after the exchange that settled the fact.

    Args:
        group: The clients.
        case: The values on this client from which the fact follows. The case holds all objects that its parts refer to.
        fact: Anything but None.
    """
    _of(group).remember(case, fact)


def digest(group: Group) -> int:
    """Return a number below 2**31 that differs between two clients if they used different agreements."""
    return _of(group).digest


def forget(group: Group) -> None:
    """Forget all agreements of a group of clients, because they have found that they differ; all of them do."""
    _agreements.get(dist.group.WORLD, {}).pop(group, None)
