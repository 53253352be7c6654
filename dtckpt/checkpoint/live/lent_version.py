"""`LentVersion`: a version in the training's own tensors, until its context ends.

::

    training | publish(copy=False): digests, readable | the body: nothing changes the tensors | exit  | next steps ...
    readers                                           | lease, read by HTTP, verify, done     | wait  | refused

Nothing is copied, so readers of the same host, too, ask the server of the publisher's client for their boxes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from dtckpt.checkpoint.leaves import is_elsewhere
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.errors import ConfigError, FeedConflictError, VersionGoneError, VersionLeasedError, capped

logger = logging.getLogger("dtckpt.live")

POLL_S = 0.05
"""How often a publisher asks whether readers have let go of a version."""


class LentVersion:
    """A version in the tensors of its publisher. A context manager: nothing may change them before its exit.

    Collective: The exit, over all clients of the job; barrier ``live-return/returned``.

    Blocks: The exit, on readers, at most for the publisher's ``timeout_s``. No reader begins from then on.

    Args:
        step: The step of the training.
        end: Ends the loan; called with the error of the body, if there is one.

    Raises:
        VersionLeasedError: At the exit: the readers that it names still read. The tensors may change all the same:
            these readers get no further byte, and find the changed bytes by their digests.
        CoordinatorUnavailableError: At the exit: the coordinator does not say who reads. As above.
    """

    def __init__(self, step: int, end: Callable[[BaseException | None], object]) -> None:
        self.step = step
        self._end = end

    def __enter__(self) -> LentVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end, self._end = self._end, lambda _: None  # once; the next loan is not this one's to end
        try:
            end(error)
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:  # the caller's own error says more
                logger.warning("the version of step %d was taken back: %s", self.step, failure)


def validate_lendable(state: State) -> None:
    """Check that readers can be served from the memory of a state.

    Raises:
        ConfigError: The state is not in the host's memory.
    """
    if not isinstance(state.source, MemorySource):
        return
    names = [spec.name for spec in state.specs if any(map(_is_elsewhere, state.source.parts(spec.name)))]
    if names:
        raise ConfigError(
            f"copy=False serves tensors from their own memory, on the host; tensors {capped(map(repr, names))} are on "
            "another device, or wait for their conjugation or negation: pass copy=True, or leave them out"
        )


def _is_elsewhere(part: tuple[Any, list[Any]]) -> bool:
    return is_elsewhere(part[1][0])


def await_readers(feeds: FeedClient, feed: str, number: int, timeout_s: float) -> None:
    """Refuse new leases of a version, and wait until its leases have ended. Local.

    Raises:
        VersionLeasedError: The version still has leases; the error names the readers.
        DtckptError: As `FeedClient.withdraw`.
    """
    deadline = time.monotonic() + timeout_s
    with suppress(VersionGoneError, FeedConflictError):
        feeds.retire(feed, number)
    while True:
        try:
            with suppress(VersionGoneError):
                feeds.withdraw(feed, number)
            return
        except (VersionLeasedError, FeedConflictError) as error:
            if time.monotonic() >= deadline:
                raise VersionLeasedError(
                    f"{error.message}; waited for {timeout_s:g} s. Training may change the tensors now: these readers "
                    "get no further byte, and must take a newer version"
                ) from error
        time.sleep(POLL_S)
