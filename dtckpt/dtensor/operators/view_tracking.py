"""Views whose components are no views of their source's: the values had to move first.

Such a view remembers how it was made. It is made again when the source has been written to since, and what is written
to the view is written to the source; so it shares values with the source as any view does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, tensors_in
from dtckpt.dtensor.operators.operands import to_layouts, to_replicated, unshare, write_into
from dtckpt.dtensor.operators.tensor_spec import spec_of, wrap_components
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import UNSHARDED, Layout


@dataclass(slots=True)
class View:
    """How a view was made.

    Args:
        source: Another DTensor that is what the tensor was when it was viewed; that one may be reshaped in place.
        func: The operator.
        args: Its arguments, ``source`` first.
        kwargs: Its arguments by name.
        number: Which of the results the view is; None if there is one.
        count: Of writes to the source when the components were made.
    """

    source: DTensor
    func: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int | None
    count: int

    def of(self, tensor: Any, args: tuple[Any, ...] | None = None) -> Any:
        """Return the view of another tensor."""
        made = self.func(tensor, *(args or self.args)[1:], **self.kwargs)
        return made if self.number is None else made[self.number]

    def refresh(self, tensor: DTensor) -> None:
        """Make the view, ``tensor``, again if the source was written to since. Collective: As its operator."""
        _ = self.source.components  # which may have to be made again itself
        (count,) = write_counter(self.source)
        if count != self.count:
            with torch.no_grad():
                again = self.of(self.source)
                again._view = None  # it is up to date, and must not be made again itself
                tensor._components = to_layouts([again], [tensor._layout])[0].components
            self.count = count


def write_counter(tensor: DTensor) -> list[int]:
    """Return how often a tensor, and all that share values with it, were written to: one list of theirs, of one number.

    PyTorch's versions will not do: what is written to ``tensor.data``, or in inference mode, does not count there.
    """
    if tensor._writes is None:
        tensor._writes = [0]
    return tensor._writes


def track_view(view: DTensor, source: DTensor, call: Any, number: int | None) -> None:
    """Note how a view was made."""
    view._writes = write_counter(source)
    view._view = View(alias_of(source), call.func, call.args, call.kwargs, number, view._writes[0])


def alias_of(tensor: DTensor) -> DTensor:
    """Return another DTensor with the same memory and layout, which follows what the tensor does."""
    unshare(tensor)
    alias = wrap_components(tensor.components, spec_of(tensor), tensor.device)
    alias._view = None if tensor._view is None else replace(tensor._view)
    alias._writes = write_counter(tensor)
    return alias


def write_through(tensor: DTensor) -> None:
    """Write a view's values to its source. Collective: Over the mesh's clients, unless all hold everything."""
    view = tensor._view
    assert view is not None  # noqa: S101  (else nobody calls this)
    with torch.no_grad():
        if view.func in _INDEX_VIEWS and view.source.ndim:
            _write_indices(tensor, view)
        else:
            _write_replicated(tensor, view)
    if view.source._view is not None:
        write_through(view.source)


_INDEX_VIEWS = frozenset({torch.ops.aten.select.int, torch.ops.aten.slice.Tensor})
"""Views of some places along a dim."""


def viewed_indices(call: Call, shape: Sequence[int]) -> range:
    """Return the places along its dim that such a view of a tensor of this shape has."""
    size = shape[call["dim"]]
    if call.func is torch.ops.aten.slice.Tensor:
        return range(size)[call["start"] : call["end"] : call["step"]]
    place = range(size)[call["index"]]
    return range(place, place + 1)


def intersect(places: range, offset: int, count: int) -> tuple[slice, slice]:
    """Return which of the places are in a piece of a dim, and where in the piece these are."""
    first, last = (min(max(0, -((places.start - end) // places.step)), len(places)) for end in (offset, offset + count))
    if first >= last:
        return slice(0, 0), slice(0, 0)
    here = places[first:last]
    return slice(first, last), slice(here.start - offset, here[-1] - offset + 1, here.step)


def _write_indices(tensor: DTensor, view: View) -> None:
    """Have each device write what its piece of the source has of the view's places."""
    source, call = view.source, Call(view.func, view.args, view.kwargs)
    layout, shape = source._layout, tuple(source.shape)
    before = (slice(None),) * (call["dim"] % len(shape))
    specs: list[Any] = list(layout.sharding_specs)
    is_one = view.func is torch.ops.aten.select.int
    specs[len(before) : len(before) + 1] = [] if is_one else [UNSHARDED]
    # What was written has yet to reach the source, so that the view must not be made again from that.
    tensor._view = None
    (value,) = to_layouts([tensor], [Layout(specs, layout.mesh, layout.partial)])
    values = value.components
    tensor._view = view
    unshare(source)
    for device, piece, given in zip(layout.mesh.local_device_ids(), source.components, values, strict=True):
        region = layout.region(device, shape)
        there, here = intersect(viewed_indices(call, shape), region.offset[len(before)], region.shape[len(before)])
        wide = given.unsqueeze(len(before)) if is_one else given
        piece[(*before, here)] = wide[(*before, there)]


def _write_replicated(tensor: DTensor, view: View) -> None:
    """Have each device write all of the view to all of the source, and keep its piece."""
    (whole,) = to_replicated([view.source], is_copied=True)
    # What was written has yet to reach the source, so that the view must not be made again from that.
    tensor._view = None
    (value,) = to_replicated([tensor])
    values = value.components
    tensor._view = view
    others = list(tensors_in((*view.args[1:], *view.kwargs.values())))
    for number, component in enumerate(whole.components):
        local = [other.components[number] for other in to_replicated(others)]
        args, kwargs = replace_tensors(view.args[1:], view.kwargs, local)
        made = view.func(component, *args, **kwargs)
        (made if view.number is None else made[view.number]).copy_(values[number])
    write_into(whole, view.source)
