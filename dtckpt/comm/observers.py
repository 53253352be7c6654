"""The one place where the runtime tells what it communicates: to observers, and to the log ``dtckpt.dtensor``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from dtckpt.errors import capped

LOG = logging.getLogger("dtckpt.dtensor")


@dataclass(frozen=True, slots=True)
class Communication:
    """One communication that this client took part in.

    Args:
        kind: ``exchange``, ``all_reduce``, ``all_gather`` or ``all_gather_object``.
        nbytes: What this client got: bytes from other clients, or the size of the tensor that was reduced.
        clients: All that took part.
    """

    kind: str
    nbytes: int
    clients: tuple[int, ...]


Observer = Callable[[Communication], None]

_observers: tuple[Observer, ...] = ()
_lock = Lock()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Call ``observer`` after each communication of any thread, while the body runs."""
    global _observers  # noqa: PLW0603  (one registry per process; reading it must cost nothing)
    with _lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            # By position: the same callable may listen twice, and equal ones are not the same.
            at = next(index for index, known in enumerate(_observers) if known is observer)
            _observers = _observers[:at] + _observers[at + 1 :]


def is_observed() -> bool:
    """Whether anyone listens; ask before working out what to `report`."""
    return bool(_observers) or LOG.isEnabledFor(logging.DEBUG)


def report(kind: str, nbytes: int, clients: Iterable[int]) -> None:
    """Tell observers and log of a communication that has been done; see `Communication`."""
    communication = Communication(kind, nbytes, tuple(clients))
    if LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("%s: got %d bytes, clients %s", kind, nbytes, capped(communication.clients))
    for observer in _observers:
        observer(communication)
