"""Fill one device's part of a tensor: plan runs of global elements, make them block by block, cut the part out."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.dtensor.random.distributions import GROUP, Draw, draw_of
from dtckpt.dtensor.random.philox import WORDS_PER_BLOCK, stream_of
from dtckpt.errors import ComponentError, RandomParameterError, RegionError
from dtckpt.layout.region import Region

_HOST_BLOCK = 1 << 16
"""Elements made at once on a CPU: calls are few, and they stay in its cache."""
_DEVICE_BLOCK = 1 << 19
"""Elements made at once elsewhere: words and what is computed on the way take some 100 bytes each."""
_HOST_SEEK = 1 << 13
"""Elements between runs that are made and thrown away rather than started anew behind them: it takes as long."""
_DEVICE_SEEK = _DEVICE_BLOCK
"""The same elsewhere, where what takes long is to start: some 500 kernels a run."""
_MIN_SHARED = 1 << 17
"""Fewer elements are not worth threads."""


def fill(kind: str, component: torch.Tensor, region: Region, shape: Sequence[int], key: int, **params: Any) -> None:
    """Fill a device's part of a random tensor in place; the tensor follows from kind, shape, key and parameters alone.

    A complex number is made of two elements, its real and its imaginary part; normal ones have variance ``std**2`` in
    all, as torch's have. Takes no more memory than a few blocks of bounded size, nor longer than the whole tensor
    would take. Nothing happens to tensors on the meta device.

    Args:
        kind: One of `KINDS`, with its parameters; ``p`` of bernoulli may be a tensor of the region's shape.
        component: The part, any strides; of dtypes that the kind is made in.
        region: What the part covers.
        shape: Of the global tensor.
        key: From `agreed_key`; 0 to 2**63 - 1.
        params: See `KINDS`.

    Raises:
        ComponentError: The part does not have the region's shape, or ``p`` does not.
        RegionError: The region is not one of the global tensor.
        RandomParameterError: The kind is unknown, or key or parameters are out of range.
        DTypeError: The kind is not made in the part's dtype.
    """
    _validate(component, region, shape, key)
    component = component.detach()
    if component.is_complex():
        if kind == "normal":
            params["std"] = params.get("std", 1.0) / math.sqrt(2)
        component, shape = torch.view_as_real(component), (*shape, 2)
        region = Region((*region.offset, 0), (*region.shape, 2))
    draw = draw_of(kind, component.dtype, params)
    if draw.limit is not None and draw.limit.shape != component.shape:
        raise ComponentError(f"p of bernoulli: got shape {tuple(draw.limit.shape)}, expected {tuple(component.shape)}")
    if component.is_meta or not component.numel():
        return
    block, seek = (_HOST_BLOCK, _HOST_SEEK) if component.device.type == "cpu" else (_DEVICE_BLOCK, _DEVICE_SEEK)
    _execute(draw, component, key, pieces_of(region, shape, block - 2 * GROUP, seek))


def permutation(length: int, key: int, device: torch.device) -> torch.Tensor:
    """Return a permutation of ``range(length)``, int64, the same on every device.

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
class Piece:
    """A box of the part, and the run of global elements that it is cut out of.

    Args:
        first: The box's first element, which is the run's.
        count: Elements of the run, up to the box's last one.
        offset: Where the box stands in the part.
        shape: The box's.
        strides: The global tensor's: elements from one index to the next, in the run as well.
    """

    first: int
    count: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pieces_of(region: Region, shape: Sequence[int], block: int, seek: int = _HOST_SEEK) -> Iterator[Piece]:
    """Yield boxes that make up a region that is not empty, each within a run of ``block`` elements at most.

    Runs follow each other where no more than ``seek`` elements lie between them.
    """
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    reach = [size - 1 for size in region.shape]
    spans = [1 + sum(map(operator.mul, reach[dim:], strides[dim:])) for dim in range(len(shape) + 1)]

    def walk(dim: int, first: int, offset: tuple[int, ...]) -> Iterator[Piece]:
        rest = region.shape[dim:]
        left = (0,) * len(rest)
        if spans[dim] <= block and (not rest or rest[0] == 1 or strides[dim] - spans[dim + 1] <= seek):
            box = (1,) * dim + rest
            yield Piece(first, spans[dim], (*offset, *left), box, strides)
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
                place = (*offset, start, *left[1:])
                yield Piece(first + start * stride, (number - 1) * stride + inner, place, box, strides)

    return walk(0, sum(map(operator.mul, region.offset, strides)), ())


# --- execution ---------------------------------------------------------------------------------------------------


def _execute(draw: Draw, component: torch.Tensor, key: int, pieces: Iterator[Piece]) -> None:
    """Make all pieces, on a CPU by as many threads as torch uses."""
    taking = threading.Lock()
    is_inference = component.is_inference()

    def take() -> Piece | None:
        with taking:
            return next(pieces, None)

    def work() -> None:
        # Modes belong to threads: these must write as the calling one may.
        with torch.inference_mode(is_inference), torch.no_grad():
            stream = stream_of(key, component.device)
            while (piece := take()) is not None:
                first = piece.first // GROUP
                groups = -(-(piece.first + piece.count) // GROUP) - first
                blocks = GROUP * draw.bits // 64 // WORDS_PER_BLOCK
                values = draw.values(stream.words(first * blocks, groups * blocks))
                _place(values, piece, piece.first - first * GROUP, component, draw.limit)

    num_threads = torch.get_num_threads() if component.device.type == "cpu" and component.numel() >= _MIN_SHARED else 1
    if num_threads == 1:
        work()
        return
    with ThreadPoolExecutor(num_threads - 1, "dtckpt-random") as threads:
        helpers = [threads.submit(work) for _ in range(num_threads - 1)]
        work()
        for helper in helpers:
            helper.result()


def _place(values: torch.Tensor, piece: Piece, start: int, component: torch.Tensor, limit: torch.Tensor | None) -> None:
    """Copy a piece's box from its run, which begins at ``start`` of the values, into the part."""
    box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offset, piece.shape, strict=True))
    numbers = values.as_strided(piece.shape, piece.strides, start)
    component[box].copy_(numbers if limit is None else numbers < limit[box])
