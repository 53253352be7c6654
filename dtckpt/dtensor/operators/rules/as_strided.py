"""``as_strided``, ``as_strided_scatter``: views by storage offset and strides, which are those of the global tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.plans import ReplicationPlan
from dtckpt.dtensor.operators.registry import PLANNERS
from dtckpt.dtensor.operators.view_tracking import alias_of, share_writes
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import OperatorError


class AsStridedPlan(ReplicationPlan):
    """Replicate the tensor, with the strides of the global tensor, and view that; only its own elements can be viewed.

    PyTorch's operator reads all of a storage. A DTensor that is a view of some elements of another does not have the
    others' values.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call, _view)

    @override
    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        call, tensor = Call(self.func, tuple(args), kwargs), tensors[0]
        shift = _shift_of(call, tensor)
        # Components need not begin where the tensor does in its storage: so count from the beginning of each.
        source = alias_of(tensor, offset=0)
        view = super().run((source, call["size"], call["stride"], shift), {}, [source])
        result = alias_of(view, offset=int(tensor.storage_offset()) + shift)
        share_writes(result, view)
        return result


class AsStridedScatterPlan(ReplicationPlan):
    """Replicate the tensors, the first with the strides of the global tensor, and copy it with other elements."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, _scatter)

    @override
    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        call, tensor = Call(self.func, tuple(args), kwargs), tensors[0]
        result = super().run((*args[:2], call["size"], call["stride"], _shift_of(call, tensor)), {}, tensors)
        return alias_of(result, offset=int(tensor.storage_offset()))


def _shift_of(call: Call, tensor: DTensor) -> int:
    """Return how many elements after a tensor a view of its storage begins.

    Raises:
        OperatorError: The view has elements that the tensor has not.
    """
    size, stride, start = call["size"], call["stride"], int(tensor.storage_offset())
    offset: int = start if call["storage_offset"] is None else call["storage_offset"]
    if not _has_elements(tensor, size, stride, offset - start):
        raise OperatorError(
            f"operator {call.func}: got size {tuple(size)}, stride {tuple(stride)} and storage offset {offset}, "
            f"expected a view of elements of the DTensor, of shape {tuple(tensor.shape)}, stride {tensor.stride()} "
            f"and storage offset {start}"
        )
    return offset - start


def _view(component: torch.Tensor, size: Sequence[int], stride: Sequence[int], shift: int) -> torch.Tensor:
    return component.as_strided(tuple(size), tuple(stride), component.storage_offset() + shift)


def _scatter(
    component: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], shift: int
) -> torch.Tensor:
    offset = component.storage_offset() + shift
    return torch.as_strided_scatter(component, source, tuple(size), tuple(stride), offset)


def _has_elements(tensor: DTensor, size: Sequence[int], stride: Sequence[int], shift: int) -> bool:
    """Whether a tensor has all elements of a view of its storage that begins ``shift`` elements after it."""
    if 0 in size:
        return True
    span, end = _span(tensor.shape, tensor.stride()), shift + _span(size, stride)
    if min(shift, *stride, 0) < 0 or end > span:
        return False
    elements = torch.zeros(span, dtype=torch.bool)
    elements.as_strided(tuple(tensor.shape), tensor.stride()).fill_(True)
    return bool(elements.as_strided(tuple(size), tuple(stride), shift).all())


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of a storage lie from the first to the last one of a view."""
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) if 0 not in size else 0


PLANNERS[torch.ops.aten.as_strided.default] = AsStridedPlan
PLANNERS[torch.ops.aten.as_strided_scatter.default] = AsStridedScatterPlan
