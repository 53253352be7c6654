"""Other libraries: `to_torch` and `from_torch` share the memory of tensors with PyTorch's DTensors.

Every public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtckpt.dtensor.torch_interop import from_torch, to_torch

_MODULES = {"dtensor.torch_interop": ("from_torch", "to_torch")}
_MODULE_OF = {name: f"dtckpt.{module}" for module, names in _MODULES.items() for name in names}

__all__ = ["from_torch", "to_torch"]


def __getattr__(name: str) -> Any:
    try:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    except KeyError:
        raise AttributeError(f"module 'dtckpt.interop' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
