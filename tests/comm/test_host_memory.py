import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.states import needs_gpu

from dtckpt.comm import host_memory

_SMAPS = Path("/proc/self/smaps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def _flags_at(address):
    """Return the flags of the mapping that has an address; see `man 5 proc_pid_smaps`."""
    lines = iter(_SMAPS.read_text().splitlines())
    for line in lines:
        head = line.split(" ", 1)[0]
        if "-" in head and ":" not in head:
            start, end = (int(part, 16) for part in head.split("-"))
            if start <= address < end:
                return next(flags for flags in lines if flags.startswith("VmFlags:")).split()[1:]
    raise AssertionError("nothing is mapped there")


def test_large_memory_lies_in_huge_pages():
    if not (_SMAPS.exists() and _HUGE_PAGES.exists() and host_memory._madvise()):
        pytest.skip("this kernel has no huge pages to lend, or does not say where they are")
    large = host_memory.allocate((host_memory.HUGE_PAGE_MIN_NBYTES,), torch.uint8)
    assert "hg" in _flags_at(large.data_ptr() + large.nbytes // 2)


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (2049, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_a_copy_is_contiguous_and_its_own(shape, dtype):
    source = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    source = source.permute(list(reversed(range(source.ndim)))).requires_grad_(dtype.is_floating_point)
    copy = host_memory.detached_clone(source)
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert copy.dtype == dtype
    torch.testing.assert_close(copy, source.detach())
    if copy.numel():
        assert copy.data_ptr() != source.data_ptr()


def test_a_copy_of_what_is_sparse_is_sparse():
    source = torch.eye(3).to_sparse()
    copy = host_memory.detached_clone(source)
    assert copy.layout is torch.sparse_coo
    assert copy.coalesce().values().data_ptr() != source.coalesce().values().data_ptr()
    torch.testing.assert_close(copy.to_dense(), torch.eye(3))


def test_what_has_no_memory_is_made_alike():
    assert host_memory.allocate((1 << 23,), torch.float32, "meta").is_meta
    sizes = [host_memory.allocate((length,), torch.uint8).nbytes for length in itertools.accumulate([1 << 22, 1, 4095])]
    assert sizes == [1 << 22, (1 << 22) + 1, (1 << 22) + 4096]


class Runtime:
    """Stands for CUDA's, as far as locking pages goes."""

    def __init__(self, error=0):
        self.error = error
        self.locked = {}

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1
        if not self.error:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


class Owner: ...


GPU = torch.device("cuda", 3)


def test_memory_is_locked_until_it_is_unlocked_or_its_owner_is_gone(monkeypatch):
    runtime = Runtime()
    current = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext(current.append(gpu)))
    memory, other, owner = torch.empty(100), torch.empty(10), Owner()
    unlock = host_memory.lock_pages(memory, owner, GPU)
    host_memory.lock_pages(other, owner, GPU)
    assert runtime.locked == {memory.data_ptr(): 400, other.data_ptr(): 40}
    unlock()
    unlock()
    assert runtime.locked == {other.data_ptr(): 40}
    del owner
    assert runtime.locked == {}
    # CUDA would make a context on whichever GPU is current.
    assert current == [GPU] * 4


def test_memory_that_cannot_be_locked_serves_as_it_is(monkeypatch, caplog):
    taken = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(host_memory, "_take_last_error", lambda: taken.append(True))
    host_memory.lock_pages(torch.empty(100), Owner(), GPU)()
    assert taken == [True]
    assert "400 bytes of host memory cannot be page-locked: cudaError 2" in caplog.text


@pytest.mark.parametrize("gpu", [pytest.param("cuda", marks=needs_gpu)])
def test_what_is_refused_does_not_show_in_the_next_kernel(gpu, caplog):
    memory, owner = torch.empty(100), Owner()
    torch.ones(1, device=gpu)
    host_memory.lock_pages(memory, owner, torch.device(gpu))
    host_memory.lock_pages(memory, Owner(), torch.device(gpu))
    assert "cannot be page-locked" in caplog.text
    assert (torch.ones(2, device=gpu) + 1).tolist() == [2, 2]
