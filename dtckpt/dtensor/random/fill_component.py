"""Fill a device's component of a random tensor, without the components of other devices.

The random bits of an element follow from its row-major index in the global tensor. So a component is cut into boxes,
each within a run of consecutive global elements; the run is computed as a whole, and the box copied out of it:

    global tensor, row-major        run of one box              component
    . . a b . .                     a b . . . .
    . . c d . .        -->          c d             -->         a b
    . . . . . .                                                 c d

`pieces_of` plans the boxes. A run also computes gaps that take less time to compute than to skip, and drops them.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.dtensor.random.distributions import GROUP, Sampler, sampler_of
from dtckpt.dtensor.random.philox import WORDS_PER_BLOCK, stream_of
from dtckpt.errors import ComponentError, RandomParameterError, RegionError
from dtckpt.layout.region import Region

_HOST_BLOCK = 1 << 16
"""Elements computed at once on a CPU: enough for few calls, and few enough for its cache."""
_DEVICE_BLOCK = 1 << 19
"""Elements computed at once on other devices: each takes some 100 bytes, words and intermediate results."""
_HOST_SEEK = 1 << 13
"""Longest gap, in elements, that is computed and dropped on a CPU: the start of a new run takes as long."""
_DEVICE_SEEK = _DEVICE_BLOCK
"""The same on other devices, where the start takes long: some 500 kernels a run."""
_MIN_SHARED = 1 << 17
"""Components of fewer elements are filled by one thread."""


def fill(
    distribution: str, component: torch.Tensor, region: Region, shape: Sequence[int], key: int, **params: Any
) -> None:
    """Fill a device's component of a random tensor in place.

    The tensor depends only on distribution, global shape, key and parameters, not on its sharding. A complex number
    takes two elements, its real and its imaginary part; both parts of a normal number together have variance
    ``std**2``, as in torch. The call takes memory for a few blocks of bounded size, and at most as long as for the
    whole tensor. Tensors on the meta device stay unchanged.

    Args:
        distribution: A key of `DISTRIBUTIONS`.
        component: The component, of any strides, in a dtype of the distribution.
        region: The component's region of the global tensor.
        shape: Global shape.
        key: From `agreed_key`; 0 to 2**63 - 1.
        params: The distribution's parameters; ``p`` of bernoulli may be a tensor of the region's shape.

    Raises:
        ComponentError: The component does not have the region's shape, or ``p`` does not.
        RegionError: The region is not one of the global tensor.
        RandomParameterError: The distribution is unknown, or key or parameters are out of range.
        DTypeError: The distribution has no numbers in the component's dtype.
    """
    _validate(component, region, shape, key)
    component = component.detach()
    if component.is_complex():
        if distribution == "normal":
            params["std"] = params.get("std", 1.0) / math.sqrt(2)
        component, shape = torch.view_as_real(component), (*shape, 2)
        region = Region((*region.offset, 0), (*region.shape, 2))
    sampler = sampler_of(distribution, component.dtype, params)
    if sampler.threshold is not None and sampler.threshold.shape != component.shape:
        raise ComponentError(
            f"p of bernoulli: got shape {tuple(sampler.threshold.shape)}, expected {tuple(component.shape)}"
        )
    if component.is_meta or not component.numel():
        return
    block, seek = (_HOST_BLOCK, _HOST_SEEK) if component.device.type == "cpu" else (_DEVICE_BLOCK, _DEVICE_SEEK)
    _fill_pieces(sampler, component, key, pieces_of(region, shape, block - 2 * GROUP, seek))


def permutation(length: int, key: int, device: torch.device) -> torch.Tensor:
    """Return a permutation of ``range(length)``, int64, equal on every device.

    Raises:
        RandomParameterError: The length is negative.
    """
    if length < 0:
        raise RandomParameterError(f"permutation: got length {length}, expected zero or greater")
    words = torch.empty(length, dtype=torch.int64, device=device)
    fill("integers", words, Region.full((length,)), (length,), key, low=-(1 << 63), high=1 << 63)
    return torch.sort(words, stable=True).indices


def _validate(component: torch.Tensor, region: Region, shape: Sequence[int], key: int) -> None:
    if tuple(component.shape) != region.shape:
        raise ComponentError(f"random numbers: got a part of shape {tuple(component.shape)}, expected {region.shape}")
    if region.ndim != len(shape) or any(map(operator.gt, region.stop, shape)):
        raise RegionError(f"random numbers: got region {region}, expected one of a tensor of shape {tuple(shape)}")
    if not 0 <= key < 1 << 63:
        raise RandomParameterError(f"random numbers: got key {key}, expected 0 to 2**63 - 1")


@dataclass(frozen=True, slots=True)
class ElementRun:
    """A box of the component, and the run of global elements that contains it.

    Args:
        first: Global row-major index of the box's first element, where the run starts.
        count: Elements of the run, up to the box's last one.
        offset: First index of the box in the component.
        shape: Shape of the box.
        strides: Strides of the global tensor, in elements. The box in the run has the same strides.
    """

    first: int
    count: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pieces_of(region: Region, shape: Sequence[int], block: int, seek: int = _HOST_SEEK) -> Iterator[ElementRun]:
    """Yield the boxes of a region that is not empty, each within a run of ``block`` elements at most.

    Args:
        region: The region.
        shape: Global shape.
        block: Most elements of a run.
        seek: Longest gap between parts of one run, in elements.
    """
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    reach = [size - 1 for size in region.shape]
    spans = [1 + sum(map(operator.mul, reach[dim:], strides[dim:])) for dim in range(len(shape) + 1)]

    def walk(dim: int, first: int, offset: tuple[int, ...]) -> Iterator[ElementRun]:
        rest = region.shape[dim:]
        left = (0,) * len(rest)
        if spans[dim] <= block and (not rest or rest[0] == 1 or strides[dim] - spans[dim + 1] <= seek):
            box = (1,) * dim + rest
            yield ElementRun(first, spans[dim], (*offset, *left), box, strides)
            return
        size, stride, inner = rest[0], strides[dim], spans[dim + 1]
        # Gaps between runs grow from the inner dims to the outer ones: if this dim's are short, all are.
        group = 1 if stride - inner > seek else max(1, (block - inner) // stride + 1)
        for start in range(0, size, group):
            if group == 1:
                yield from walk(dim + 1, first + start * stride, (*offset, start))
            else:
                number = min(group, size - start)
                box = ((1,) * dim) + (number, *rest[1:])
                box_offset = (*offset, start, *left[1:])
                yield ElementRun(first + start * stride, (number - 1) * stride + inner, box_offset, box, strides)

    return walk(0, sum(map(operator.mul, region.offset, strides)), ())


# --- execution ---------------------------------------------------------------------------------------------------


def _fill_pieces(sampler: Sampler, component: torch.Tensor, key: int, pieces: Iterator[ElementRun]) -> None:
    """Fill all pieces of a component, on a CPU by as many threads as torch uses."""
    lock = threading.Lock()
    is_inference = component.is_inference()

    def next_piece() -> ElementRun | None:
        with lock:
            return next(pieces, None)

    def work() -> None:
        # Modes belong to threads: give these threads the calling thread's right to write.
        with torch.inference_mode(is_inference), torch.no_grad():
            stream = stream_of(key, component.device)
            while (piece := next_piece()) is not None:
                first = piece.first // GROUP
                groups = -(-(piece.first + piece.count) // GROUP) - first
                blocks = GROUP * sampler.bits // 64 // WORDS_PER_BLOCK
                values = sampler.from_words(stream.words(first * blocks, groups * blocks))
                _copy_box(values, piece, piece.first - first * GROUP, component, sampler.threshold)

    num_threads = torch.get_num_threads() if component.device.type == "cpu" and component.numel() >= _MIN_SHARED else 1
    if num_threads == 1:
        work()
        return
    with ThreadPoolExecutor(num_threads - 1, "dtckpt-random") as threads:
        helpers = [threads.submit(work) for _ in range(num_threads - 1)]
        work()
        for helper in helpers:
            helper.result()


def _copy_box(
    values: torch.Tensor, piece: ElementRun, start: int, component: torch.Tensor, threshold: torch.Tensor | None
) -> None:
    """Copy a piece's box into the component, from its run, which begins at ``start`` of the values."""
    box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offset, piece.shape, strict=True))
    numbers = values.as_strided(piece.shape, piece.strides, start)
    component[box].copy_(numbers if threshold is None else numbers < threshold[box])
