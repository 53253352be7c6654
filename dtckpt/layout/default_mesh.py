"""The mesh that counts where none is given: that of the innermost ``with mesh:`` or `run_on` block."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

_blocks: ContextVar[tuple[Any, ...]] = ContextVar("dtckpt_default_mesh", default=())


def push(mesh: Any) -> None:
    """Enter a block."""
    _blocks.set((*_blocks.get(), mesh))


def pop() -> None:
    """Leave the innermost block."""
    _blocks.set(_blocks.get()[:-1])


def get() -> Any:
    """Return the innermost block's mesh; None outside of all."""
    return next(reversed(_blocks.get()), None)
