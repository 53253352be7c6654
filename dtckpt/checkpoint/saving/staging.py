"""Staging: copy the elements that a client will write to host memory, which is kept from one save to the next.

Replicas that other clients write are needed for the comparison only: they are digested where they are, which is faster
than a copy.

The staging memory is one block. A save of the same structure uses it again. Reuse matters: new memory costs a page
fault per page, more than the copy itself. Tensors on a GPU are copied into page-locked memory, on a separate stream.

Bounded staging (`stage_in_buckets`) needs no block. Elements are copied when the writer asks for them, and a bounded
number of bytes wait for storage. The call of `save_async` returns when the last element is copied. Until then its
caller cannot change a tensor, so the checkpoint holds the values of one moment. The price is time: the call lasts about
as long as the write of all but the last ``nbytes`` bytes.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from dtckpt.checkpoint.leaves import host_array, is_elsewhere
from dtckpt.checkpoint.saving.plan import CopyRule, SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import Replica, part_digests, shared_boxes, written_as_held
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.checkpoint.saving.write import Source
from dtckpt.comm import host_memory, torch_private
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointError, SliceError
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

ALIGNMENT = 64
LARGE_NBYTES = 128 << 10
"""Least bytes of a tensor that PyTorch would copy in several threads."""
PIECE_NBYTES = 8 << 20
"""Bytes that a thread copies at a time."""
Parts = list[tuple[Region, list[torch.Tensor]]]
Noted = Mapping[tuple[str, Region], Sequence[Replica]]


class StagingMemory:
    """The block of staging memory, and the tensors that it was cut into for the last save.

    Args:
        allocate: Returns a block of at least so many bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self._allocate = allocate or _allocate
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_for_gpus = False
        self._unlock: Callable[[], object] = lambda: None
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._pieces: list[torch.Tensor] = []

    def stage(
        self,
        state: State,
        plan: SavePlan,
        client: int,
        *,
        with_copies: bool,
        count: Callable[[int], object],
        beside: Mapping[str, Sequence[Region]] = MappingProxyType({}),
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> State:
        """Copy the elements that a client will write; with ``with_copies``, digest every copy of a value that it holds.

        Chunks that the save's base has already are not copied. Tied tensors are copied once. Copies of values on a GPU
        are staged, to be digested later.

        Blocks: On the copies and digests; for tensors on a GPU, on the work that the current stream has still to do.

        Args:
            state: The state to be saved.
            plan: The plan of the save.
            client: This client.
            with_copies: Whether the save compares replicas.
            count: Called with the bytes that were copied.
            beside: By tensor, further regions to copy, each inside a box that this client holds. These copies come
                behind the others.
            dtypes: By tensor, the dtype that its elements are converted to; default: their own.

        Returns:
            The state in staging memory; the given one if its elements do not come from memory.
        """
        if not isinstance(state.source, MemorySource):
            return state
        boxes: list[tuple[str, Region, list[torch.Tensor]]] = []
        noted: dict[tuple[str, Region], list[Replica]] = {}
        for item, shared in zip(plan.tensors, shared_boxes(plan, client), strict=True):
            name = item.spec.name
            reused = state.reuse.regions.get(name, frozenset())
            written = [region for region in written_regions(item, client) if region not in reused]
            compares = with_copies and item.spec.copies is not CopyRule.FREE
            for box, copies in state.source.parts(name):
                is_compared = compares and (box in shared or len(copies) > 1)
                is_noted = is_compared and not any(map(is_elsewhere, copies))
                if is_noted:
                    noted[name, box] = _noted(item, box, copies, client)
                elif reused and not is_compared:
                    # Not all of it is staged, and there is no other copy to compare it with.
                    noted[name, box] = [Replica(None)]
                if is_compared and not is_noted:
                    boxes.append((name, box, [copy.detach() for copy in copies]))
                else:
                    boxes += [
                        (name, region, [view]) for region, view in _views_to_stage(box, copies[0].detach(), written)
                    ]
        tied = _tied_views([(view, dtypes.get(name, view.dtype)) for name, _, views in boxes for view in views])
        for name, regions in beside.items():
            for box, copies in state.source.parts(name):
                boxes += [(name, region, [view]) for region, view in _views_to_stage(box, copies[0].detach(), regions)]
        views = [(view, dtypes.get(name, view.dtype)) for name, _, views in boxes for view in views]
        distinct = [number for number in range(len(views)) if number not in tied]
        sources = [views[number][0] for number in distinct]
        targets = self._carve(sources, [views[number][1] for number in distinct])
        with torch.no_grad():
            _copy(targets, sources)
        buffers = dict(zip(distinct, targets, strict=True))
        parts: dict[str, Parts] = {}
        numbers = itertools.count()
        for name, region, copies in boxes:
            staged = [buffers[tied.get(number, number)] for number in itertools.islice(numbers, len(copies))]
            parts.setdefault(name, []).append((region, staged))
        count(sum(target.nbytes for target in targets))
        return replace(state, source=MemorySource(parts, noted))

    def _carve(self, sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Cut the block into buffers for the tensors; take a new block if it is too small, or much too large."""
        shapes = [(source.shape, dtype) for source, dtype in zip(sources, dtypes, strict=True)]
        gpu = next((source.device for source in sources if source.is_cuda and source.numel()), None)
        is_for_gpus = gpu is not None
        lengths = [source.numel() * dtype.itemsize for source, dtype in zip(sources, dtypes, strict=True)]
        sizes = [math.ceil(length / ALIGNMENT) * ALIGNMENT for length in lengths]
        needed = sum(sizes)
        if not needed <= self._block.numel() <= 2 * needed or is_for_gpus > self._is_for_gpus:
            self._unlock()
            # The old block is freed before the new block is allocated, so that there is never memory for both.
            self._pieces, self._shapes, self._block = [], [], torch.empty(0, dtype=torch.uint8)
            self._block, self._is_for_gpus = self._allocate(needed), is_for_gpus
            self._unlock = host_memory.lock_pages(self._block, self, gpu) if gpu else lambda: None
        elif shapes == self._shapes:
            return self._pieces
        starts = np.cumsum([0, *sizes]).tolist()
        self._pieces = [
            self._block[start : start + length].view(dtype).view(shape)
            for start, length, (shape, dtype) in zip(starts, lengths, shapes, strict=False)
        ]
        self._shapes = shapes
        return self._pieces


def _tied_views(views: Sequence[tuple[torch.Tensor, Hashable]]) -> dict[int, int]:
    """Find the views whose elements an earlier view has, too, in the same memory.

    Args:
        views: Views, each with the dtype that its elements are converted to.

    Returns:
        By number of such a view, the number of the earlier one.
    """
    first_at: dict[int, int] = {}
    first_like: dict[Hashable, int] = {}
    tied = {}
    for number, (view, dtype) in enumerate(views):
        first = first_at.setdefault(view.data_ptr(), number)
        if first != number:  # rare: only then the views are described, which takes longer
            for each, other in ((first, views[first]), (number, (view, dtype))):
                like = first_like.setdefault((_facts(other[0]), other[1]), each)
            if like != number:
                tied[number] = like
    return tied


def tied_nbytes(state: State, plan: SavePlan, client: int) -> int:
    """Return the bytes of staging memory that a client needs less because tied tensors are copied once."""
    source = state.source
    if not isinstance(source, MemorySource):
        return 0
    addresses = [tensor.data_ptr() for tensor in source.tensors]
    if len(set(addresses)) == len(addresses):
        return 0
    specs = [(item.spec, list(written_regions(item, client))) for item in plan.tensors]
    found = [
        (spec.dtype, region, view)
        for spec, written in specs
        for box, copies in source.parts(spec.name)
        for region, view in _views_to_stage(box, copies[0].detach(), written)
    ]
    tied = _tied_views([(view, dtype) for dtype, _, view in found])
    return sum(aligned_nbytes(found[number][1], DTYPES[found[number][0]].itemsize) for number in tied)


def aligned_nbytes(region: Region, itemsize: int) -> int:
    """Return the bytes of staging memory for a region."""
    return math.ceil(region.numel * itemsize / ALIGNMENT) * ALIGNMENT


def _facts(view: torch.Tensor) -> tuple[object, ...]:
    return view.device, view.data_ptr(), view.dtype, view.shape, view.stride(), view.is_conj(), view.is_neg()


def _allocate(nbytes: int) -> torch.Tensor:
    return host_memory.allocate((nbytes,), torch.uint8)


def _noted(plan: TensorPlan, box: Region, copies: Sequence[torch.Tensor], client: int) -> list[Replica]:
    """Digest all copies of a box; of the first copy, the chunks that this client writes are digested at the write."""
    but = written_as_held(plan, client)
    return [
        Replica(None, part_digests(plan, box, host_array(copy), but=frozenset() if number else but))
        for number, copy in enumerate(copies)
    ]


def _views_to_stage(
    box: Region, copy: torch.Tensor, written: Sequence[Region]
) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the regions of a box that are staged: the box itself if all of it is written, else the written regions."""
    inside = [region for region in written if box.contains(region)]
    if sum(region.numel for region in inside) == box.numel:
        yield box, copy
    else:
        yield from ((region, copy[region.relative_to(box).slices()]) for region in inside)


def written_regions(plan: TensorPlan, client: int) -> Iterator[Region]:
    """Yield the disjoint regions whose elements a client gives: its chunks, and its pieces of split ones."""
    for number in plan.owned_by(client):
        if number not in plan.pieces:
            yield plan.grid.region(plan.grid.index(number))
    for pieces in plan.pieces.values():
        yield from (piece.region for piece in pieces if piece.client == client)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    pairs = list(zip(targets, sources, strict=True))
    with ExitStack() as copying:
        for device in sorted({source.device for source in sources if source.is_cuda}, key=str):
            # A side stream: the copy waits for the work that the current stream has already, not for later work.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            copying.callback(stream.synchronize)
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    if source.device == device:
                        # A conjugate or negative view is resolved on the host after the copy, so this copy blocks.
                        target.copy_(source, non_blocking=not (source.is_conj() or source.is_neg()))
        on_host = [pair for pair in pairs if not pair[1].is_cuda]
        large = [pair for pair in on_host if _is_large(*pair)]
        others = [pair for pair in on_host if not _is_large(*pair)]
        _copy_large(large)
        if others:
            torch_private.foreach_copy([target for target, _ in others], [source for _, source in others])


def _is_large(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a tensor's bytes are copied by `_copy_large`, as they are."""
    is_plain = source.is_contiguous() and not source.is_conj() and not source.is_neg()
    return is_plain and target.dtype == source.dtype and source.device.type == "cpu" and source.nbytes >= LARGE_NBYTES


def _copy_large(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy large tensors in as many threads as PyTorch has for its operators.

    PyTorch's own threads wait for each other in loops after every tensor: on cores that others use, too, that took
    three to ten times as long, and as much more processor time.
    """
    copies = [(_bytes_of(target), _bytes_of(source)) for target, source in pairs]
    pieces = [
        (target[start : start + PIECE_NBYTES], source[start : start + PIECE_NBYTES])
        for target, source in copies
        for start in range(0, source.size, PIECE_NBYTES)
    ]
    num_threads = min(torch.get_num_threads(), len(pieces))
    if num_threads < 2:
        for target, source in pieces:
            np.copyto(target, source)
        return
    with Pool(num_threads, "dtckpt-copies") as pool:
        list(pool.map(np.copyto, *zip(*pieces, strict=True)))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return host_array(tensor).reshape(-1).view(np.uint8)


# --- bounded ----------------------------------------------------------------------------------------------------------


class BucketSource(Source):
    """Elements of tensors in memory, each copied when it is fetched.

    Args:
        memory: The tensors.
        noted: By tensor name and box, the digests of all copies of the boxes that are compared.
        nbytes: Bound on the bytes of copies that wait to be written.
    """

    def __init__(self, memory: MemorySource, noted: Noted, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory = memory
        self._noted = noted
        self._num_expected: int | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_copied = threading.Event()

    @property
    @override
    def max_pending_nbytes(self) -> int:
        return self._nbytes

    def wait(self) -> None:
        """Wait until all elements are copied, or `end` was called.

        If the wait is interrupted, the caller's tensors may change at any time, so the save fails.
        """
        try:
            self._is_copied.wait()
        except BaseException:
            with self._lock:
                self._is_closed = True
            raise

    def end(self) -> None:
        """Note that nothing more will be fetched."""
        self._is_copied.set()

    @override
    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        # These regions are the last ones to be fetched.
        self._num_expected = sum(1 for _ in regions)
        if not self._num_expected:
            self.end()

    @override
    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        with self._lock:
            if self._is_closed:
                raise CheckpointError("the call of save_async was interrupted while it copied the state; save again")
            elements = self._copy(plan.spec.name, region)
        if self._num_expected is not None:
            self._num_expected -= 1
            if not self._num_expected:
                self.end()
        return elements

    def _copy(self, name: str, region: Region) -> np.ndarray[Any, Any]:
        for box, copies in self._memory.parts(name):
            if box.contains(region):
                # Of a tensor on a GPU only this region goes to the host.
                view = copies[0].detach()[region.relative_to(box).slices()]
                elements = host_array(view)
                return elements if is_elsewhere(view) else elements.copy()
        raise SliceError(f"this client does not hold {region} of tensor {name!r}")

    @override
    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        return self._noted.get((plan.spec.name, region), (Replica(None),))


def stage_in_buckets(state: State, plan: SavePlan, client: int, *, with_copies: bool, nbytes: int) -> State:
    """Prepare to copy the elements that a client will write; with ``with_copies``, digest every copy of a value.

    Blocks: On the digests; for tensors on a GPU, on the work that the current stream has still to do.

    Args:
        state: The state to be saved.
        plan: The plan of the save.
        client: This client.
        with_copies: Whether the save compares replicas.
        nbytes: Bound on the bytes of copies that wait to be written.

    Returns:
        The state, whose source is a `BucketSource`; the given one if its elements do not come from memory.
    """
    memory = state.source
    if not isinstance(memory, MemorySource):
        return state
    memory.synchronize()
    noted: dict[tuple[str, Region], list[Replica]] = {}
    for item, shared in zip(plan.tensors, shared_boxes(plan, client), strict=True):
        for box, copies in memory.parts(item.spec.name):
            if with_copies and (box in shared or len(copies) > 1):
                noted[item.spec.name, box] = _noted(item, box, [copy.detach() for copy in copies], client)
    return replace(state, source=BucketSource(memory, noted, nbytes))
