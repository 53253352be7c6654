"""The setting ``TORCH_LOGS="dtensor"``, or `torch._logging.set_logs`: the log ``dtckpt.dtensor`` follows PyTorch's.

``+dtensor`` (debug) shows which way each operator runs, the layouts chosen for it, and each redistribution; ``dtensor``
(info) shows which operators have no rule. The lines go where PyTorch's own go.
"""

from __future__ import annotations

import logging
from typing import Any

_OURS = logging.getLogger("dtckpt.dtensor")
_TORCHS: Any = logging.getLogger("torch.distributed.tensor")
"""PyTorch sets the level of this logger, among others, by the setting ``dtensor``."""
_set_level = _TORCHS.setLevel


class _Forwarder(logging.Handler):
    """Passes records to the handlers of PyTorch's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        _TORCHS.handle(record)


_FORWARDER = _Forwarder()


def _set_levels(level: int | str) -> None:
    """Set the level of PyTorch's logger, and of the one here."""
    _set_level(level)
    _follow()


def _follow() -> None:
    # PyTorch sets WARNING, then NOTSET, on loggers that are off. A level that the program has set here then stays.
    is_on = logging.NOTSET < _TORCHS.level < logging.WARNING
    if is_on:
        _OURS.addHandler(_FORWARDER)
        _OURS.setLevel(_TORCHS.level)
    elif _FORWARDER in _OURS.handlers:
        _OURS.removeHandler(_FORWARDER)
        _OURS.setLevel(logging.NOTSET)


def follow_torch_logs() -> None:
    """Have the log of DTensors follow PyTorch's setting, now and whenever it changes."""
    _TORCHS.setLevel = _set_levels
    _follow()
