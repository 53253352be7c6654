"""The setting ``TORCH_LOGS="dtensor"``, or `torch._logging.set_logs`: the log ``dtckpt.dtensor`` follows PyTorch's.

``+dtensor`` (debug) shows which way each operator runs, the layouts chosen for it, and each redistribution; ``dtensor``
(info) shows which operators have no rule. The settings ``all`` and ``distributed`` include it. The lines go where
PyTorch's own go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_OURS = logging.getLogger("dtckpt.dtensor")
_TORCHS: Any = logging.getLogger("torch.distributed.tensor")
"""PyTorch sets the level of this logger, among others, by the setting ``dtensor``."""
_LEVELS = [_TORCHS, *map(logging.getLogger, ("torch.distributed", "torch"))]
"""The logger, and those that it takes its level from if it has none: the settings ``distributed`` and ``all``."""


class _Forwarder(logging.Handler):
    """Passes records to the handlers of PyTorch's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        _TORCHS.handle(record)


_FORWARDER = _Forwarder()


def _followed(set_level: Callable[[int | str], None]) -> Callable[[int | str], None]:
    """Return the method ``setLevel`` of a logger of PyTorch's, after which the log here follows."""

    def set_and_follow(level: int | str) -> None:
        set_level(level)
        _follow()

    return set_and_follow


def _follow() -> None:
    level = next((logger.level for logger in _LEVELS if logger.level != logging.NOTSET), logging.WARNING)
    # PyTorch sets WARNING, then NOTSET, on loggers that are off. A level that the program has set here then stays.
    if level < logging.WARNING:
        _OURS.addHandler(_FORWARDER)
        _OURS.setLevel(level)
    elif _FORWARDER in _OURS.handlers:
        _OURS.removeHandler(_FORWARDER)
        _OURS.setLevel(logging.NOTSET)


def follow_torch_logs() -> None:
    """Have the log of DTensors follow PyTorch's setting, now and whenever it changes."""
    for logger in _LEVELS:
        logger.setLevel = _followed(logger.setLevel)
    _follow()
