"""New memory for tensors; what is large lies in huge pages of the host where the operating system lends them.

Filling new memory costs a fault per page, so with pages of 4 KiB it takes longer than the copy itself. The request is
advice: where it is not heeded, all is as without it. See ``man 2 madvise``, ``MADV_HUGEPAGE``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import torch

LEAST_NBYTES = 4 << 20
"""Of what lies in huge pages; what is smaller is mostly made of memory that was used before."""


def empty(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a new tensor with any values, as `torch.empty`."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.nbytes >= LEAST_NBYTES and made.is_cpu and type(made) is torch.Tensor:  # fake ones have no memory
        _advise(made)
    return made


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on its device, without a gradient; contiguous, if it is dense."""
    source = tensor.detach()
    if source.layout is not torch.strided:
        return source.clone()
    return empty(source.shape, source.dtype, source.device).copy_(source)


def _advise(tensor: torch.Tensor) -> None:
    advise = _madvise()
    if advise is not None:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, end - start, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found  # type: ignore[no-any-return]
