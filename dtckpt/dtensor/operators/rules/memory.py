"""Operators on the memory of tensors: ``is_set_to``, ``set_``, ``resize_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators import view_tracking
from dtckpt.dtensor.operators.operands import no_dispatch
from dtckpt.dtensor.operators.plans import become
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import OperatorError

_aten = torch.ops.aten


@composite(_aten.is_set_to.default)
def _is_set_to(self: DTensor, tensor: DTensor) -> Any:
    """Compare the global tensors, which have storages of their own where they share no values."""
    with no_dispatch():
        return _aten.is_set_to.default(self, tensor)


@composite(_aten.set_.source_Tensor)
def _set(self: DTensor, source: DTensor) -> DTensor:
    """Give the tensor memory and layout of the source."""
    view_tracking.note_reshape(self, _aten.set_.source_Tensor)
    become(self, source)
    return self


@composite(_aten.resize_.default)
def _resize(self: DTensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    """A smaller tensor keeps its memory, with all that shares it; a larger one gets new memory.

    Raises:
        OperatorError: Others share the memory of a tensor that becomes larger.
    """
    resized = torch.empty(size, dtype=self.dtype, device="meta", memory_format=memory_format)
    nbytes = torch_private.storage_nbytes(self)
    if (self.storage_offset() + resized.numel()) * resized.itemsize <= nbytes:
        return self.as_strided_(size, resized.stride())
    if nbytes and self._writes is not None:
        raise OperatorError(
            f"resize_: got a DTensor of shape {tuple(self.shape)} whose memory other tensors share, expected room for "
            f"the shape {tuple(size)} in it; make a new tensor and copy the values"
        )
    become(self, _aten.resize.default(self, size, memory_format=memory_format))
    return self
