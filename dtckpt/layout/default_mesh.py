"""The default mesh: that of the innermost ``with mesh:`` or `run_on` block."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

_blocks: ContextVar[tuple[Any, ...]] = ContextVar("dtckpt_default_mesh", default=())


def push(mesh: Any) -> None:
    """Make a mesh the default, at the start of a block."""
    _blocks.set((*_blocks.get(), mesh))


def pop() -> None:
    """Restore the default mesh from before the innermost block, at its end."""
    _blocks.set(_blocks.get()[:-1])


def get() -> Any:
    """Return the default mesh, None outside of all blocks."""
    return next(reversed(_blocks.get()), None)
