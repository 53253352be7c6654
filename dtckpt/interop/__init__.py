"""Other libraries: PyTorch's DTensors (`to_torch`, `from_torch`), and zarr-python (`CheckpointStore`, data types).

Every public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtckpt.dtensor.torch_interop import from_torch, to_torch
    from dtckpt.interop.zarr_store import CheckpointStore

_MODULES = {
    "dtensor.torch_interop": ("from_torch", "to_torch"),
    "interop.zarr_store": ("CheckpointStore",),
}
_MODULE_OF = {name: f"dtckpt.{module}" for module, names in _MODULES.items() for name in names}

__all__ = ["CheckpointStore", "from_torch", "to_torch"]


def __getattr__(name: str) -> Any:
    try:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    except KeyError:
        raise AttributeError(f"module 'dtckpt.interop' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
