"""Observers of communication: each exchange and collective is reported to them and to the log ``dtckpt.dtensor``."""

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
        kind: ``exchange``, or the name of a collective, such as ``all_reduce`` or ``all_gather_object``.
        nbytes: Bytes that this client received from others, or the size of the tensor that was reduced.
        clients: All clients that took part.
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
            # By identity, and once: the same callable may be registered twice, and another callable may compare equal.
            position = next(index for index, other in enumerate(_observers) if other is observer)
            _observers = _observers[:position] + _observers[position + 1 :]


def is_observed() -> bool:
    """Whether there is an observer or the log is on; check it before computing the arguments of `report`."""
    return bool(_observers) or LOG.isEnabledFor(logging.DEBUG)


def report(kind: str, nbytes: int, clients: Iterable[int]) -> None:
    """Pass a `Communication` that this client takes part in to the log and the observers."""
    communication = Communication(kind, nbytes, tuple(clients))
    if LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("%s: got %d bytes, clients %s", kind, nbytes, capped(communication.clients))
    for observer in _observers:
        observer(communication)
