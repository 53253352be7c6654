"""The `torch.device` of a mesh device."""

from __future__ import annotations

import sys

import torch

from dtckpt.errors import LayoutError


def device_of(name: str) -> torch.device:
    """Return the torch device of a mesh device, given by name such as ``/job:worker/task:0/device:GPU:1``.

    Mesh GPUs with an index beyond the number of cards share the cards.

    Raises:
        LayoutError: This client has no such device.
    """
    kind, _, index = name.rpartition("device:")[2].partition(":")
    if kind.upper() == "CPU":
        return torch.device("cpu")
    if kind.upper() == "TPU" and "torch_xla" in sys.modules:
        return torch.device("xla", int(index or 0))
    if kind.upper() == "GPU" and torch.cuda.is_available():
        return torch.device("cuda", int(index or 0) % torch.cuda.device_count())
    raise LayoutError(f"there is no torch device for mesh device {name!r} on its client")
