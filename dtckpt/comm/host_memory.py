"""New memory for tensors; what is large lies in huge pages of the host where the operating system lends them.

Filling new memory costs a fault per page, so with pages of 4 KiB it takes longer than the copy itself. The request is
advice: where it is not heeded, all is as without it. See ``man 2 madvise``, ``MADV_HUGEPAGE``.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import torch

logger = logging.getLogger("dtckpt.host_memory")

_PORTABLE = 1
"""The runtime's flag for memory that is page-locked for all cards."""

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


def lock_pages(memory: torch.Tensor, owner: object, card: torch.device) -> Callable[[], object]:
    """Lock memory in pages, so that cards copy to and from it beside other work.

    That of ``torch.empty(pin_memory=True)`` comes in powers of two, and is kept when it is freed. See CUDA's
    ``cudaHostRegister``. Where the runtime refuses, copies are slower and block.

    Args:
        memory: Contiguous, on the host, and not empty.
        owner: Holds the memory; when it is gone the memory is unlocked.
        card: One that this client uses. CUDA makes a context on the current card, which may be another client's.

    Returns:
        What unlocks the memory, to be called before it is freed.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.device(card):
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if error:
            _take_last_error()
            logger.warning("%d bytes of host memory cannot be page-locked: cudaError %d", memory.nbytes, error)
            return lambda: None
    unlock = weakref.finalize(owner, _unlock_pages, memory.data_ptr(), card)
    unlock.atexit = False  # the driver is gone by then
    return unlock


def _unlock_pages(address: int, card: torch.device) -> None:
    with torch.cuda.device(card):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _take_last_error() -> None:
    """Have an error that CUDA's runtime keeps for whoever asks next raised here."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


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
