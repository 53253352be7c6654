"""Host memory for tensors: allocation in huge pages, page locking for copies to and from GPUs.

The first write to new memory costs one page fault per page. With pages of 4 KiB the faults of a large tensor take
longer than the copy that fills it, so large tensors ask for huge pages. The request is advice (``man 2 madvise``,
``MADV_HUGEPAGE``): where the kernel does not follow it, the memory has ordinary pages.
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
"""``cudaHostRegisterPortable``: the memory is page-locked for all GPUs."""

HUGE_PAGE_MIN_NBYTES = 4 << 20
"""Smallest tensor for which huge pages are requested. The allocator mostly reuses memory for smaller tensors."""


def allocate(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None = None) -> torch.Tensor:
    """Allocate a tensor without initializing it, as `torch.empty`; large host tensors get huge pages.

    Args:
        shape: The tensor's shape.
        dtype: None: torch's default dtype.
        device: None: torch's default device.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    # FakeTensor and other subclasses may have no memory.
    if tensor.nbytes >= HUGE_PAGE_MIN_NBYTES and tensor.is_cpu and type(tensor) is torch.Tensor:
        _advise_huge_pages(tensor)
    return tensor


def detached_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the same device, detached from autograd; contiguous unless the tensor is sparse."""
    source = tensor.detach()
    if source.layout is not torch.strided:
        return source.clone()
    return allocate(source.shape, source.dtype, source.device).copy_(source)


def lock_pages(memory: torch.Tensor, owner: object, gpu: torch.device) -> Callable[[], object]:
    """Lock host memory in its pages, so that GPUs copy to and from it asynchronously.

    ``torch.empty(pin_memory=True)`` would round the size up to a power of two, and keep the memory after it is freed.
    See CUDA's ``cudaHostRegister``. If CUDA refuses, the memory stays as it is: copies are slower, and block.

    Args:
        memory: A contiguous tensor on the host that is not empty.
        owner: The object that holds the memory. When it is garbage-collected, the memory is unlocked.
        gpu: A GPU that this client uses. CUDA creates a context on the current GPU, which may be another client's.

    Returns:
        A function that unlocks the memory; call it before the memory is freed.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with torch.cuda.device(gpu):
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if error:
            _take_last_error()
            logger.warning("%d bytes of host memory cannot be page-locked: cudaError %d", memory.nbytes, error)
            return lambda: None
    unlock = weakref.finalize(owner, _unlock_pages, memory.data_ptr(), gpu)
    unlock.atexit = False  # when the interpreter exits, the driver may be gone before the finalizer runs
    return unlock


def _unlock_pages(address: int, gpu: torch.device) -> None:
    with torch.cuda.device(gpu):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _take_last_error() -> None:
    """Clear CUDA's last error: the runtime keeps it, and the next kernel launch, of any caller, would raise it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    advise = _madvise()
    if advise is not None:
        # Whole pages inside the tensor only: the pages at its ends may hold other data, too.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, end - start, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return C's ``madvise``, None if this system lacks it or huge pages."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function  # type: ignore[no-any-return]
