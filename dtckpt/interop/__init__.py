"""Adapters for other libraries. Each item names the library, and the functions or classes for it.

* `to_torch` and `from_torch` share the memory of tensors with PyTorch's DTensors.
* `DtckptStorageWriter` and `DtckptStorageReader` are for `torch.distributed.checkpoint`.
* `CheckpointStore` is a read-only store for zarr-python. Making one also registers bfloat16 and the float8 data types.
* `DtckptCheckpointIO` and `DtckptModelParallelStrategy` are for Lightning.
* `resize_loader` deals the positions of torchdata's ``StatefulDataLoader`` out to another number of clients.
* `DtckptTrainer` is a ``Trainer`` of Hugging Face; `accelerator_state` is the state of an ``Accelerator``.
* `dtckpt.interop.vllm` has a weight-transfer engine for vLLM, and its trainer side.

Every public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtckpt.dtensor.torch_interop import from_torch, to_torch
    from dtckpt.interop.accelerate import accelerator_state
    from dtckpt.interop.dcp.storage_reader import DtckptStorageReader
    from dtckpt.interop.dcp.storage_writer import DtckptStorageWriter
    from dtckpt.interop.lightning import DtckptCheckpointIO
    from dtckpt.interop.lightning_strategy import DtckptModelParallelStrategy
    from dtckpt.interop.stateful_loader import resize_loader
    from dtckpt.interop.transformers import DtckptTrainer
    from dtckpt.interop.zarr_store import CheckpointStore

_MODULES = {
    "dtensor.torch_interop": ("from_torch", "to_torch"),
    "interop.accelerate": ("accelerator_state",),
    "interop.dcp.storage_reader": ("DtckptStorageReader",),
    "interop.dcp.storage_writer": ("DtckptStorageWriter",),
    "interop.lightning": ("DtckptCheckpointIO",),
    "interop.lightning_strategy": ("DtckptModelParallelStrategy",),
    "interop.stateful_loader": ("resize_loader",),
    "interop.transformers": ("DtckptTrainer",),
    "interop.zarr_store": ("CheckpointStore",),
}
_MODULE_OF = {name: f"dtckpt.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "CheckpointStore",
    "DtckptCheckpointIO",
    "DtckptModelParallelStrategy",
    "DtckptStorageReader",
    "DtckptStorageWriter",
    "DtckptTrainer",
    "accelerator_state",
    "from_torch",
    "resize_loader",
    "to_torch",
]


def __getattr__(name: str) -> Any:
    try:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    except KeyError:
        raise AttributeError(f"module 'dtckpt.interop' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
