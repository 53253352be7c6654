"""Host memory for the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.comm import host_memory
from dtckpt.errors import CheckpointError


def new_memory(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate host memory for a tensor of a checkpoint.

    Raises:
        CheckpointError: The host lacks the memory.
    """
    try:
        return host_memory.allocate(shape, dtype)
    # PyTorch's class for an allocation that fails.
    except RuntimeError as error:
        raise CheckpointError(
            f"this host lacks the memory for tensor {name!r}; got shape {tuple(shape)} of {dtype}; read a part of it, "
            "or restore it on more hosts"
        ) from error
