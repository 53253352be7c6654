"""Operators on memory: ``set_``, ``resize_``, ``as_strided``, ``resolve_conj``, writes to expanded tensors.

Storage offsets and strides describe the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators import view_tracking
from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, tensors_in
from dtckpt.dtensor.operators.operands import no_dispatch, to_replicated, write_into
from dtckpt.dtensor.operators.plans import ReplicationPlan, become
from dtckpt.dtensor.operators.registry import PLANNERS, before_autograd, composite
from dtckpt.dtensor.operators.view_tracking import alias_of, share_writes
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import OperatorError

_aten = torch.ops.aten


@composite(_aten.is_set_to.default)
def _is_set_to(self: DTensor, tensor: DTensor) -> Any:
    """Compare the global tensors, which have separate storages where they share no values."""
    with no_dispatch():
        return _aten.is_set_to.default(self, tensor)


@composite(_aten.set_.source_Tensor)
def _set(self: DTensor, source: DTensor) -> DTensor:
    """Give the tensor memory and layout of the source."""
    view_tracking.note_reshape(self, _aten.set_.source_Tensor)
    become(self, source)
    return self


@composite(_aten.resize_.default)
def _resize(self: DTensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    """A smaller tensor keeps its memory, with all that shares it; a larger one gets new memory.

    Raises:
        OperatorError: Others share the memory of a tensor that becomes larger.
    """
    resized = torch.empty(size, dtype=self.dtype, device="meta", memory_format=memory_format)
    nbytes = torch_private.storage_nbytes(self)
    if (self.storage_offset() + resized.numel()) * resized.itemsize <= nbytes:
        return self.as_strided_(size, resized.stride())
    if nbytes and self._writes is not None:
        raise OperatorError(
            f"resize_: got a DTensor of shape {tuple(self.shape)} whose memory other tensors share, expected room for "
            f"the shape {tuple(size)} in it; make a new tensor and copy the values"
        )
    become(self, _aten.resize.default(self, size, memory_format=memory_format))
    return self


# --- copies of lazy views --------------------------------------------------------------------------------------------
#
# PyTorch conjugates and negates views lazily, and some operators copy them. DTensors have no lazy bits: components of
# ``z.conj()`` are conjugated at once, and follow ``z`` (`view_tracking`). So the way in which a tracked view was made
# says whether the plain view would have such a bit.


def _lazy_bits(tensor: DTensor) -> tuple[bool, bool]:
    """Return whether the plain view would be conjugated lazily, and whether it would be negated lazily."""
    view = tensor._view
    if view is None:
        return False, False
    is_conj, is_neg = _lazy_bits(view.source)
    if view.func is _aten._conj.default:
        return not is_conj, is_neg
    if view.func is _aten._neg_view.default:
        return is_conj, not is_neg
    # PyTorch takes the imaginary parts of a lazily conjugated tensor by a lazy negation.
    of_real = view.source._view
    if view.func is _aten.select.int and of_real is not None and of_real.func is _aten.view_as_real.default:
        call = Call(view.func, view.args, view.kwargs)
        return False, is_conj and call["index"] == 1
    return is_conj, is_neg


@before_autograd(_aten.resolve_conj.default, _aten.resolve_neg.default)
def _resolve(operator: Operator, keys: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy where PyTorch makes one, else the tensor itself."""
    del keys
    if not isinstance(tensor, DTensor):
        return tensor
    is_conj, is_neg = _lazy_bits(tensor)
    return tensor.clone() if (is_conj if operator is _aten.resolve_conj.default else is_neg) else tensor


@before_autograd(_aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default)
def _split(operator: Operator, keys: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Split a copy where PyTorch does; the parts of other tensors share their memory."""
    is_copied = isinstance(tensor, DTensor) and any(_lazy_bits(tensor))
    return operator.redispatch(keys, tensor.clone() if is_copied else tensor, *args, **kwargs)


# --- writes to expanded tensors --------------------------------------------------------------------------------------
#
# Several elements of an expanded tensor are one in memory. PyTorch writes to the memory element by element, with a
# deprecation warning for some of these operators, and refuses all others. So every device does the same to the whole,
# and keeps its component.


def _write_of(func: Operator) -> Callable[..., Any]:
    """Return the composite of an operator that writes to its first argument; it declines unless this is expanded."""

    def write(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        memory = view_tracking.without_repeats(tensor)
        if memory is tensor:
            return NotImplemented
        view_tracking.validate_write(tensor, func, list(tensors_in(args)))
        # Bound: each device holds all of the memory meanwhile.
        (whole,) = to_replicated([memory], is_copied=True)
        others = to_replicated(list(tensors_in((*args, *kwargs.values()))))
        for number, component in enumerate(whole.components):
            local = replace_tensors(args, kwargs, [other.components[number] for other in others])
            func(component.expand(tensor.shape), *local[0], **local[1])
        write_into(whole, memory)
        if tensor._view is not None:
            view_tracking.write_through(tensor)
        view_tracking.count_write(tensor)
        return tensor

    write.__doc__ = "To an expanded tensor: every device writes to the whole, as PyTorch does to shared memory."
    return write


for _operator in (
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
):
    composite(_operator)(_write_of(_operator))


# --- views by storage offset and strides -----------------------------------------------------------------------------


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
