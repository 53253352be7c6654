"""What the coordinator of a save tells the other ranks, through the plans that DCP scatters.

A planner that caches plans (``enable_plan_caching``) drops the plan that it gets, and uses an older one. So a rank
takes an announcement from the message itself: an `Announcement` notes itself in the thread that makes or receives it,
which is the thread that goes on with the save.
"""

from __future__ import annotations

import threading
from typing import Any

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.errors import CheckpointError
from dtckpt.interop.dcp.write_plan import Share

_latest = threading.local()


class Announcement:
    """A save that the coordinator has begun, as ``storage_data`` of a rank's plan.

    Args:
        token: The attempt that all ranks write to.
        where: The checkpoint's path or URL.
        options: The coordinator's options.
        share: What the rank writes; None: what it wrote when its planner cached its plan.
    """

    def __init__(self, token: str, where: str, options: SaveOptions, share: Share | None) -> None:
        self.token = token
        self.where = where
        self.options = options
        self.share = share
        _latest.announcement = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Announcement, (self.token, self.where, self.options, self.share)


def forget() -> None:
    """Forget the announcement of an earlier save of this thread."""
    _latest.announcement = None


def received() -> Announcement:
    """Return the announcement of the save that this thread is in.

    Raises:
        CheckpointError: There is none.
    """
    announcement: Announcement | None = getattr(_latest, "announcement", None)
    if announcement is None:
        raise CheckpointError(
            "this rank was not told which save it is in; prepare_global_plan of the coordinator's writer must have "
            "been called, and its plans sent to all ranks"
        )
    return announcement


def share_of(announcement: Announcement, cached: Any) -> Share:
    """Return a rank's share in a save.

    Args:
        announcement: The announcement of the save.
        cached: ``storage_data`` of the plan that the planner gave: an announcement too, or an older one. It gets the
            new share, as the planner will give it again.

    Raises:
        CheckpointError: It is neither.
    """
    if not isinstance(cached, Announcement):
        raise CheckpointError(
            f"the planner's plan has no storage_data of this writer; got {type(cached).__name__}; finish_plan must "
            "keep it"
        )
    if cached.token != announcement.token and announcement.share is not None:
        cached.share = announcement.share
    if cached.share is None:
        raise CheckpointError("the planner uses a cached plan that was never written; make a planner without the cache")
    return cached.share
