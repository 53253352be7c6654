"""`RecordedTensor`: stands for a tensor of a checkpoint while a loader runs, and notes which part goes where.

::

    loader                               recorded
    weight.narrow(0, 64, 64)             a view: rows 64..128 of the checkpoint's tensor
    parameter.data.narrow(0, 0, 64)      a view of the live parameter
        .copy_(that view)                box (64..128, all) -> this memory; nothing is copied

A recorded tensor has a shape, strides and an offset, but no elements. A copy of a tensor that is no view is noted, too,
so that its target is known. Functions that need elements raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.errors import DtckptError
from dtckpt.layout.region import Region

VIEWS = frozenset(
    {"__getitem__", "chunk", "data", "detach", "flatten", "movedim", "mT", "narrow", "permute", "reshape", "select"}
    | {"split", "squeeze", "swapaxes", "swapdims", "T", "t", "tensor_split", "transpose", "unbind", "unflatten"}
    | {"unsqueeze", "view", "view_as"}
)
"""Functions and attributes that return views, if they return memory of the same storage."""
FACTS = frozenset(
    {"__len__", "device", "dim", "dtype", "element_size", "is_contiguous", "is_cpu", "is_cuda", "is_floating_point"}
    | {"is_meta", "itemsize"}
    | {"layout", "names", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "storage_offset"}
    | {"stride", "untyped_storage"}
)
"""Functions and attributes that tell no elements."""


class NotRecordedError(DtckptError):
    """A loader does something that is no copy of a view."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCopy:
    """A copy that a loader would have made.

    Args:
        source: The copied tensor, without elements.
        target: The memory that it goes to.
    """

    source: torch.Tensor
    target: torch.Tensor


@dataclass(slots=True, eq=False)
class Recording:
    """The copies that a loader makes of a tensor of a checkpoint.

    Args:
        copies: The copies of it, and of tensors that are made of it.
        reason: Why these are no copies of its views; empty: they are.
    """

    copies: list[RecordedCopy] = field(default_factory=list)
    reason: str = ""


class RecordedTensor(torch.Tensor):
    """A tensor of a checkpoint, or a tensor that was made of it, without elements.

    Attributes:
        recording: The recording, which all tensors that are made of a tensor share.
    """

    recording: Recording

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> RecordedTensor:
        """Return a tensor of a checkpoint."""
        return _recorded(torch.empty(tuple(shape), dtype=dtype, device="meta"), Recording())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Follow a view, and note a copy.

        Raises:
            NotRecordedError: Elements are needed, or memory is written in another way than by a copy.
        """
        name = _name_of(func)
        source = args[1:2] if name == "copy_" else args[2:3] if name == "__setitem__" else ()
        if source and isinstance(source[0], cls) and not isinstance(args[0], cls):
            return _note_copy(name, args, source[0])
        tensors = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        own = next(each for each in tensors if isinstance(each, cls))
        if func.__name__ == "__set__" or any(
            each.device.type != "meta" for each in tensors if not isinstance(each, cls)
        ):
            raise NotRecordedError(f"a loader writes or mixes it with other memory, by {name}")
        if name == "contiguous":
            return own  # only a copy into a parameter looks at the order of the elements
        if name not in VIEWS | FACTS:
            own.recording.reason = own.recording.reason or f"a loader makes other elements of it, by {name}"
        try:
            with torch_private.no_torch_function_subclass():
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            raise NotRecordedError(f"a loader needs its elements, for {name}") from error
        return (
            result
            if name in FACTS
            else torch_private.tree_map_only(torch.Tensor, lambda each: _made_of(own, each, name), result)
        )


def _name_of(func: Callable[..., Any]) -> str:
    name: str = func.__name__
    return func.__self__.__name__ if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _note_copy(name: str, args: tuple[Any, ...], source: RecordedTensor) -> torch.Tensor | None:
    target: torch.Tensor = args[0]
    memory, recording = target, source.recording
    if name == "__setitem__":
        memory = target[args[1]]
        if memory.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
            recording.reason, memory = "a loader writes it to elements that are no box", target
    with torch_private.no_torch_function_subclass():
        recording.copies.append(RecordedCopy(source.as_subclass(torch.Tensor), memory))
    return target if name == "copy_" else None


def _recorded(memory: torch.Tensor, recording: Recording) -> RecordedTensor:
    with torch_private.no_torch_function_subclass():
        result: RecordedTensor = torch_private.make_subclass(RecordedTensor, memory)
    result.recording = recording
    return result


def _made_of(source: RecordedTensor, result: torch.Tensor, name: str) -> RecordedTensor:
    with torch_private.no_torch_function_subclass():
        is_view = (
            result.dtype == source.dtype
            and result.untyped_storage()._cdata == source.untyped_storage()._cdata  # it has no address
        )
    if not is_view:
        source.recording.reason = source.recording.reason or f"a loader makes another tensor of it, by {name}"
    return _recorded(result, source.recording)


@dataclass(frozen=True, slots=True)
class BoxView:
    """A view of a tensor that is a box of it, with its dims in another order.

    Args:
        region: The box.
        order: The dims of the box that are longer than 1, in the order of the view.
        shape: The shape of the view.
    """

    region: Region
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, box: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor with the elements of the box."""
        short = [dim for dim in range(box.ndim) if dim not in self.order]
        return box.permute(*short, *self.order).reshape(self.shape)


def box_of_view(view: torch.Tensor, shape: Sequence[int]) -> BoxView | None:
    """Return the box of which a strided view of a whole tensor of some shape consists; None if it is no box.

    >>> box_of_view(torch.empty(4, 6)[1:3].t(), (4, 6))
    BoxView(region=Region(offset=(1, 0), shape=(2, 6)), order=(1, 0), shape=(6, 2))
    """
    shape, seen = tuple(shape), tuple(view.shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if 0 in shape or 0 in seen:
        return None
    if view.numel() == math.prod(shape) and view.is_contiguous():
        return BoxView(Region.full(shape), tuple(dim for dim, size in enumerate(shape) if size > 1), seen)
    dim_of = {stride: dim for dim, (stride, size) in enumerate(zip(strides, shape, strict=True)) if size > 1}
    sizes, order = [1] * len(shape), list[int]()
    for stride, size in zip(view.stride(), seen, strict=True):
        if size == 1:
            continue
        dim = dim_of.get(stride)
        if dim is None or dim in order:
            return None
        order.append(dim)
        sizes[dim] = size
    starts = [view.storage_offset() // stride % size for stride, size in zip(strides, shape, strict=True)]
    if any(start + size > whole for start, size, whole in zip(starts, sizes, shape, strict=True)):
        return None
    return BoxView(Region(tuple(starts), tuple(sizes)), tuple(order), seen)
