"""Parses and prints TensorFlow's ``shape_and_slices`` strings, which say that a tensor is a slice of a larger one.

``"4 5 0,2:-"``: the tensor is the slice ``[0:2, :]`` of a tensor of shape (4, 5). The form is that of TensorFlow's
``SaveV2``: the dims of the larger tensor, then ``start,length`` or ``-`` (all) per dim, joined by colons. The empty
string stands for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtckpt.errors import SliceError
from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """A slice: the shape of the larger tensor, and the region of it that the tensor fills."""

    full_shape: tuple[int, ...]
    region: Region

    def __str__(self) -> str:
        if self.region == Region.full(self.full_shape):
            return ""
        parts = (
            "-" if (start, length) == (0, size) else f"{start},{length}"
            for start, length, size in zip(self.region.offset, self.region.shape, self.full_shape, strict=True)
        )
        return " ".join([*map(str, self.full_shape), ":".join(parts)])


def parse_slice_spec(text: str, shape: Sequence[int]) -> SliceSpec:
    """Parse the slice string of a tensor of global shape ``shape``.

    Raises:
        SliceError: The text is malformed, lies outside the full shape, or does not have the tensor's shape.
    """
    shape = tuple(shape)
    if not isinstance(text, str):
        raise SliceError(f"shape_and_slices entries must be str; got {type(text).__name__}")
    if not text:
        return SliceSpec(shape, Region.full(shape))
    *dims, slices = text.split(" ")
    try:
        full = tuple(_number(dim) for dim in dims)
        parts = slices.split(":") if slices else []
        if len(parts) != len(full):
            raise ValueError(f"{len(full)} dims and {len(parts)} slices")
        bounds = [(0, size) if part == "-" else _bounds(part) for part, size in zip(parts, full, strict=True)]
    except ValueError as error:
        raise SliceError(
            f"cannot read slice string {text!r}: {error}; expected the dims, then 'start,length' or '-' per dim "
            "joined by ':', as in '4 5 0,2:-'"
        ) from None
    for dim, ((start, length), size) in enumerate(zip(bounds, full, strict=True)):
        if start + length > size:
            raise SliceError(f"slice string {text!r} leaves dim {dim}; got [{start}, {start + length}), size {size}")
    region = Region(tuple(start for start, _ in bounds), tuple(length for _, length in bounds))
    if region.shape != shape:
        raise SliceError(f"slice string {text!r} does not fit its tensor; got shape {shape}, expected {region.shape}")
    return SliceSpec(full, region)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a number of elements")
    return int(text)


def _bounds(text: str) -> tuple[int, int]:
    start, comma, length = text.partition(",")
    if not comma:
        raise ValueError(f"{text!r} has no comma")
    return _number(start), _number(length)
