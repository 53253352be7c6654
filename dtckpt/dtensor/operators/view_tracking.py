"""View tracking: keep a view equal to its source where the two share no memory.

A view of a DTensor shares memory with its source if its components are views of the source's components. Some cannot
be: to flatten a matrix that is split by columns, values have to move between devices first. Such a view has separate
components and a `View`, which records how it was made::

    source  --- view operator, values moved --->  view           view._view = View(source, operator, args, count)
       |                                            |
       |  write to the source: its write            |  write to the view: `write_through`
       |  counter goes up                           |  writes the same values to the source
       v                                            v
    the view reads its components: the counter     the source has the new values, and the counter
    differs from ``count``, so `View.refresh`      goes up for the other views
    runs the operator again

If each component of the view follows from the source's component on the same device, as in a conjugate, clients
exchange no values. Then each client may decide for itself whether its components share memory: `View.local` is set.

Invariant: a source and all its views, tracked or not, share one write counter (`write_counter`).

After a write to the memory of a view and its base, autograd makes the view again: it calls the view operators on the
current base. So the base and the view must keep their shapes: `note_reshape` and `validate_write` refuse changes that
would give a view the gradient of other elements.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.derived_layouts import gradient_layout
from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, tensors_in
from dtckpt.dtensor.operators.operands import to_layouts, to_replicated, unshare, write_into
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor, spec_of, wrap_components
from dtckpt.dtensor.tensor_spec import intern_spec
from dtckpt.errors import OperatorError
from dtckpt.layout.layout import UNSHARDED, Layout

LocalView = Callable[[torch.Tensor, int], Any]
"""Takes a component and the number of its device; returns the view of it, or a copy if its strides allow no view."""


@dataclass(slots=True)
class View:
    """How a view was made from its source.

    Args:
        source: An alias of the source as it was then; the source itself may be reshaped in place later.
        func: The view operator.
        args: Its positional arguments, the source first.
        kwargs: Its arguments by name.
        number: Position of the view among the operator's results; None if it returns one tensor.
        count: State of the write counter when the view's components were computed.
        local: Makes a component of the view from one of the source; None if values move between devices.
    """

    source: DTensor
    func: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int | None
    count: int
    local: LocalView | None = None

    def of(self, tensor: Any, args: tuple[Any, ...] | None = None) -> Any:
        """Return the same view of another tensor."""
        return self.pick(self.func(tensor, *(args or self.args)[1:], **self.kwargs))

    def pick(self, results: Any) -> Any:
        """Return the view from the operator's results."""
        return results if self.number is None else results[self.number]

    def on(self, source: DTensor) -> View:
        """Return the same view of a copy of the source, which has the same values."""
        count = write_counter(source).count
        return replace(self, source=source, args=(source, *self.args[1:]), count=count)

    def refresh(self, tensor: DTensor) -> None:
        """Compute the components of the view again if the source was written to since.

        Collective: As the view operator.

        Args:
            tensor: The view.
        """
        _ = self.source.components  # The source may be a tracked view itself: this refreshes it first.
        count = write_counter(self.source).count
        if count != self.count:
            with torch.no_grad():
                again = self.of(self.source)
                again._view = None  # The fresh view must not be refreshed itself.
                tensor._components = to_layouts([again], [tensor._layout])[0].components
            self.count = count


Views = dict[int, "weakref.ref[DTensor]"]
"""Tensors by id, as long as they live."""


@dataclass(slots=True, eq=False)
class WriteCounter:
    """Counts the writes to the values that a source and all its views share.

    PyTorch's version counters do not serve: they miss writes to ``tensor.data``, and writes in inference mode.

    Attributes:
        count: How many writes there were.
        views: The views that autograd knows.
        reshaped: The views that got another shape in place.
    """

    count: int = 0
    views: Views = field(default_factory=dict)
    reshaped: Views = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[WriteCounter], tuple[()]]:
        """Pickle as a new counter, the same one for all tensors in a pickle that have the same counter."""
        return WriteCounter, ()


def write_counter(tensor: DTensor) -> WriteCounter:
    """Return the write counter of a tensor, the same object for all tensors that share values with it."""
    counter: WriteCounter | None = tensor._writes
    if counter is None:
        counter = tensor._writes = WriteCounter()
    return counter


def count_write(tensor: DTensor) -> None:
    """Tell the views of a tensor that its components were written to."""
    if tensor._writes is not None:
        tensor._writes.count += 1


def share_memory(one: DTensor, other: DTensor) -> bool:
    """Tell whether each component shares memory with one of another tensor, or has no memory."""
    return all(map(have_one_memory, one._components, other._components))


def have_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors share memory, as `share_memory`."""
    if one.is_meta or one.layout is not torch.strided or one.data_ptr() == other.data_ptr() or not one.numel():
        return True
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def share_writes(view: DTensor, source: DTensor, *, is_detached: bool = False) -> None:
    """Give a view the write counter and the storage of its source, whose values it shares.

    Args:
        view: The view.
        source: The source.
        is_detached: Whether autograd does not know the view.
    """
    counter = view._writes = write_counter(source)
    torch_private.set_storage(view, source)
    # Not of parameters, which are detached: PyTorch swaps the values of tensors that have no weak references.
    if torch.is_grad_enabled() and not is_detached:
        _remember(counter.views, view)


def track_view(view: DTensor, source: DTensor, call: Any, number: int | None, local: LocalView | None = None) -> None:
    """Record how a view was made, so that it follows its source.

    Args:
        view: The view, with separate components.
        source: The tensor that it is a view of.
        call: The call of the view operator.
        number: Which of the call's results the view is; None if there is one.
        local: See `View`.
    """
    share_writes(view, source)
    count = write_counter(source).count
    view._view = View(alias_of(source), call.func, call.args, call.kwargs, number, count, local)


def in_layout(tensor: DTensor, layout: Layout) -> DTensor:
    """Return a tensor in another layout; a write to either tensor reaches the other.

    Collective: As `redistribute`.
    """
    moved = redistribute(tensor, layout)
    track_view(moved, tensor, Call(_ALIAS, (tensor,), {}), None)
    return moved


# --- changes of shape in place ------------------------------------------------------------------------------------


def _remember(views: Views, view: DTensor) -> None:
    key = id(view)
    views[key] = weakref.ref(view, lambda _: views.pop(key, None))


def _live(views: Views) -> list[DTensor]:
    """Return the views that still exist."""
    return [view for reference in list(views.values()) if (view := reference()) is not None]


def note_reshape(tensor: DTensor, what: object) -> None:
    """Check that a tensor may get another shape in place, and note this change for a view.

    Args:
        tensor: The tensor, before it gets its new shape.
        what: The operator, for the error.

    Raises:
        OperatorError: Autograd may have to make views of the tensor, or the tensor itself, again.
    """
    counter = tensor._writes
    if counter is None:
        return
    dependent = [view for view in _live(counter.views) if view._base is tensor]
    if tensor._is_view():
        dependent.append(tensor)
    for view in dependent:
        # A view's own shape matters only when autograd makes the view again, after a write. Without gradient mode the
        # change of shape itself counts as one.
        if view.requires_grad and not (view is tensor and torch.is_grad_enabled()):
            raise OperatorError(
                f"operator {what}: got a DTensor of shape {tuple(tensor.shape)} on which a differentiable view of "
                f"shape {tuple(view.shape)} depends, expected one without such views: autograd would take the gradient "
                "of other elements; use the operator that returns a new tensor, or detach the view"
            )
        _remember(counter.reshaped, view)


def validate_write(tensor: DTensor, what: object, operands: Sequence[torch.Tensor] = ()) -> None:
    """Refuse a write to a tensor if a differentiable view of its memory got another shape in place, as by `transpose_`.

    Args:
        tensor: The tensor.
        what: The operator, for the error.
        operands: The tensors among its arguments. If an operand requires a gradient, the write makes all views
            differentiable.

    Raises:
        OperatorError: There is such a view: after the write, autograd would rebuild it in its former shape.
    """
    if tensor._writes is None or not tensor._writes.reshaped:
        return
    needs_grad = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    for view in _live(tensor._writes.reshaped):
        if needs_grad or view.requires_grad:
            raise OperatorError(
                f"operator {what}: writes to the memory of a differentiable view, of shape {tuple(view.shape)} now, "
                "that got another shape in place, or whose base did, and autograd would take the gradient of other "
                "elements; use the operator that returns a new tensor, as transpose for transpose_"
            )


def validate_memory(tensor: DTensor, what: object) -> None:
    """Check, as PyTorch does, that a tensor may be written to: no two elements share memory.

    Raises:
        OperatorError: Some dim was expanded.
    """
    if (
        tensor.numel()
        and 0 in tensor.stride()
        and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    ):
        raise OperatorError(
            f"operator {what}: more than one element of the written-to tensor refers to a single memory location; got "
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()}; clone() the tensor first"
        )


def validate_gradient(tensor: DTensor) -> None:
    """Check that a tensor may require a gradient from now on: as `validate_write`."""
    if tensor._writes is not None and any(view._base is tensor for view in _live(tensor._writes.reshaped)):
        raise OperatorError(
            f"requires_grad: got a DTensor of shape {tuple(tensor.shape)} that got its shape in place while views of "
            "it exist, and autograd would take the gradient of other elements; detach it first"
        )


# --- other tensors with the same memory ---------------------------------------------------------------------------


def alias_of(tensor: DTensor, offset: int | None = None) -> DTensor:
    """Return another DTensor with the same memory, layout and write counter.

    Args:
        tensor: The tensor.
        offset: The storage offset of the alias; default: the offset of the tensor.
    """
    unshare(tensor)
    offset = int(tensor.storage_offset()) if offset is None else offset
    alias = wrap_components(tensor.components, spec_of(tensor), tensor.device, offset=offset)
    # A copy: the alias and the tensor are refreshed separately, and each `View` counts for its own components.
    alias._view = None if tensor._view is None else replace(tensor._view)
    alias._writes = write_counter(tensor)
    torch_private.set_storage(alias, tensor)
    return alias


def become_alias(tensor: DTensor, source: DTensor) -> None:
    """Give a tensor components, layout and write counter of another tensor with the same shape and storage."""
    alias = alias_of(source)
    tensor._components, tensor._layout, tensor._spec = alias._components, alias._layout, None
    tensor._view, tensor._writes = alias._view, alias._writes


def differentiable_alias(tensor: DTensor) -> DTensor:
    """Return another DTensor with the same components and layout. Differentiable; no view to autograd."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        alias: DTensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return alias
    return _detached(tensor)


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        ctx.set_materialize_grads(False)  # torch would make plain zeros, which are no gradient of a DTensor
        ctx.layout = tensor._layout
        return _detached(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> DTensor | None:
        return None if gradient is None else redistribute(gradient, gradient_layout(ctx.layout))


def _detached(tensor: DTensor) -> DTensor:
    """Return the tensor without gradients: the same components, and the version counter that autograd checks."""
    alias: Any = tensor.detach()
    alias._components = tensor.components
    return alias  # type: ignore[no-any-return]


def write_through(tensor: DTensor) -> None:
    """Write the values of a tracked view to its source, and to that one's source, and so on.

    Collective: Over the mesh's clients, unless all devices hold everything.

    Args:
        tensor: The view.
    """
    view: View | None = tensor._view
    assert view is not None  # noqa: S101  (callers have asked)
    with torch.no_grad():
        if view.local is not None:
            _write_locally(tensor, view, view.local)
        elif view.func is _ALIAS:
            _write_all(tensor, view)
        elif view.func in _INDEX_VIEWS and view.source.ndim:
            _write_indices(tensor, view)
        else:
            _write_replicated(tensor, view)
    # The source is a tracked view too: its own source shares no memory with it.
    if view.source._view is not None:
        write_through(view.source)


def _write_locally(tensor: DTensor, view: View, local: LocalView) -> None:
    """Write a view that is made device by device: each device writes its component."""
    source = view.source
    unshare(source)
    for device, (component, value) in enumerate(zip(source.components, tensor._components, strict=True)):
        in_place = view.pick(local(component, device))
        if have_one_memory(in_place, component):
            _copy(in_place, value)
            continue
        # Of a contiguous copy there is a view, whatever the strides of the component allow.
        copy = component.clone(memory_format=torch.contiguous_format)
        _copy(view.pick(local(copy, device)), value)
        component.copy_(copy)


def _write_all(tensor: DTensor, view: View) -> None:
    """Write a view that has all elements of its source, in another layout."""
    # The source does not have the new values yet: a refresh from it would undo them, so there is none meanwhile.
    tensor._view = None
    write_into(tensor, view.source)
    tensor._view = view


_ALIAS = torch.ops.aten.alias.default

_INDEX_VIEWS = frozenset({torch.ops.aten.select.int, torch.ops.aten.slice.Tensor})
"""View operators that take some indices along one dim."""


def viewed_indices(call: Call, shape: Sequence[int]) -> range:
    """Return the indices along its dim that an operator of `_INDEX_VIEWS` takes from a tensor of this shape."""
    size = shape[call["dim"]]
    if call.func is torch.ops.aten.slice.Tensor:
        return range(size)[call["start"] : call["end"] : call["step"]]
    index = range(size)[call["index"]]
    return range(index, index + 1)


def intersect(indices: range, offset: int, count: int) -> tuple[slice, slice]:
    """Return where indices of a dim and one component of that dim meet: as slices of each.

    With indices 1, 4, 7, 10 and the component of the indices 3 to 7, the two meet in 4 and 7. So they share the second
    and third of the indices, ``1:3``, which stand in the component at ``1:5:3``.

    Args:
        indices: Global indices, ascending.
        offset: Global index at which the component begins.
        count: Size of the component's dim.
    """
    # How many of the indices lie below each end of the component: ceil((end - start) / step), within 0 and all.
    first, last = (
        min(max(0, -((indices.start - end) // indices.step)), len(indices)) for end in (offset, offset + count)
    )
    if first >= last:
        return slice(0, 0), slice(0, 0)
    common = indices[first:last]
    return slice(first, last), slice(common.start - offset, common[-1] - offset + 1, common.step)


def _write_indices(tensor: DTensor, view: View) -> None:
    """Write a view of some indices along a dim: each device writes the indices in its component of the source.

    The view is moved to the source's layout, but whole along that dim; so no device needs more of the source.
    """
    source, call = view.source, Call(view.func, view.args, view.kwargs)
    layout, shape = source._layout, tuple(source.shape)
    before = (slice(None),) * (call["dim"] % len(shape))
    specs: list[Any] = list(layout.sharding_specs)
    is_select = view.func is torch.ops.aten.select.int
    specs[len(before) : len(before) + 1] = [] if is_select else [UNSHARDED]
    # As in `_write_all`: no refresh before the source has the new values.
    tensor._view = None
    (moved,) = to_layouts([tensor], [Layout(specs, layout.mesh, layout.partial)])
    values = moved.components
    tensor._view = view
    unshare(source)
    for device, component, value in zip(layout.mesh.local_device_ids(), source.components, values, strict=True):
        region = layout.region(device, shape)
        in_view, in_component = intersect(
            viewed_indices(call, shape), region.offset[len(before)], region.shape[len(before)]
        )
        with_dim = value.unsqueeze(len(before)) if is_select else value
        _copy(component[(*before, in_component)], with_dim[(*before, in_view)])


def _write_replicated(tensor: DTensor, view: View) -> None:
    """Write a view of any kind: every device writes all of it to all of the source, and keeps its component."""
    target, shape = without_repeats(view.source), tuple(view.source.shape)
    # Bound: each device holds all of the source meanwhile. The inverse of an arbitrary view is not known, but a view of
    # a copy can be written to.
    (source,) = to_replicated([target], is_copied=True)
    # As in `_write_all`: no refresh before the source has the new values.
    tensor._view = None
    (moved,) = to_replicated([tensor])
    values = moved.components
    tensor._view = view
    others = list(tensors_in((*view.args[1:], *view.kwargs.values())))
    for number, component in enumerate(source.components):
        local_others = [other.components[number] for other in to_replicated(others)]
        args, kwargs = replace_tensors(view.args[1:], view.kwargs, local_others)
        _copy(view.pick(view.func(component.expand(shape), *args, **kwargs)), values[number])
    write_into(source, target)


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a component; of elements that are one in memory, the first that has changed counts."""
    repeated = [dim for dim, step in enumerate(target.stride()) if step == 0 and target.shape[dim] > 1]
    if not repeated or not target.numel():
        target.copy_(values)
        return
    memory = target[tuple(slice(0, 1) if dim in repeated else slice(None) for dim in range(target.ndim))]
    size = math.prod(target.shape[dim] for dim in repeated)
    # (repeats, elements of the memory)
    each = values.movedim(repeated, list(range(len(repeated)))).reshape(size, -1)
    before = memory.reshape(1, -1)
    has_changed = each != before
    first = each.gather(0, has_changed.to(torch.uint8).argmax(0, keepdim=True))
    memory.copy_(torch.where(has_changed.any(0), first, before).reshape(memory.shape))


def without_repeats(tensor: DTensor) -> DTensor:
    """Return the view of a tensor that has each element of its memory once: index 0 along dims that were expanded."""
    specs = tensor._layout.sharding_specs
    # Memory where several elements are one cannot be copied into. A dim that an axis splits keeps its size, from which
    # the components' regions follow.
    dims = [
        dim
        for dim, stride in enumerate(tensor.stride())
        if stride == 0 and tensor.shape[dim] and specs[dim] == UNSHARDED
    ]
    if not dims:
        return tensor
    index = tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(tensor.ndim))
    components = [component[index] for component in tensor.components]
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(tensor.shape))
    spec = intern_spec(tensor._layout, shape, tensor.stride(), tensor.dtype)
    return wrap_components(components, spec, tensor.device)
