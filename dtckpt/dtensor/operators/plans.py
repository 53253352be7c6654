"""Plans: how to run an operator on DTensors. `dispatch` makes one per kind of call, and reuses it.

=====================  =============================================================================================
`RulePlan`             redistribute the operands, run the operator on components
`WriteResultPlan`      compute the result by the functional operator, write it to the first argument or to ``out``
`CompositePlan`        call a function that does the operator's work by other operators
`ReplicationPlan`      run the operator on all of every operand
`InplaceViewPlan`      give a tensor other sizes and strides in place: ``squeeze_``, ``t_``
=====================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from typing_extensions import override

from dtckpt.comm import torch_private
from dtckpt.comm.torch_private import tree_leaves, tree_map_only
from dtckpt.dtensor.operators import view_tracking
from dtckpt.dtensor.operators.call import (
    Call,
    Operator,
    UnknownResultError,
    replace_tensors,
    run_on_meta,
    signature_of,
    tensors_in,
)
from dtckpt.dtensor.operators.operands import (
    no_dispatch,
    replicated_layout,
    to_layouts,
    to_replicated,
    unshare,
    write_into,
)
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.strategy import Choice
from dtckpt.dtensor.tensor import DTensor, with_stride, wrap_components
from dtckpt.dtensor.tensor_spec import Spec, contiguous_stride, intern_spec
from dtckpt.errors import ComponentError, LayoutError, OperatorError, capped
from dtckpt.layout.layout import Layout

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

_UNDECLARED_WRITES = ("running_mean", "running_var")
"""Arguments of batch normalization that operators write to although their schemas do not say so."""

_DETACH = torch.ops.aten.detach_.default
"""Changes no shape, although it is tagged as those operators that do."""

_trusts: ContextVar[bool] = ContextVar("trusts_plain_tensors", default=False)
_trusting_blocks: set[object] = set()
"""Open blocks of `trust_plain_tensors_in_all_threads`: autograd runs a GPU's backward pass in another thread."""


@contextmanager
def trust_plain_tensors() -> Iterator[None]:
    """Within this block, assume that plain tensors beside DTensors are equal on all clients, without a comparison."""
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)


@contextmanager
def trust_plain_tensors_in_all_threads() -> Iterator[None]:
    """As `trust_plain_tensors`, in all threads."""
    block = object()
    _trusting_blocks.add(block)
    try:
        yield
    finally:
        _trusting_blocks.remove(block)


def are_plain_tensors_trusted() -> bool:
    """Whether this thread takes plain tensors to be equal on all clients, without comparing them."""
    return bool(_trusting_blocks) or _trusts.get()


class Plan(Protocol):
    """How to run the calls of one operator with one kind of arguments; `dispatch` keeps it by the call's key."""

    route: str
    """``rule``, ``decomposition`` or ``replication``."""
    func: Operator
    """The operator."""
    calls: int
    """How often `dispatch` reused the plan; it adds these calls to the statistics later."""

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """Return the operator's result.

        Collective: Over the mesh's clients, unless operands and results stay in their layouts.

        Args:
            args: Positional arguments; every tensor among them is a DTensor.
            kwargs: Arguments by name.
            tensors: The tensors among all arguments, in order.
        """
        ...


class RulePlan(Plan):
    """Redistribute the operands to the chosen layouts, then run the operator on each device's component.

    ::

        operands (DTensors)  ->  to_layouts  ->  per local device: local(components)  ->  results (DTensors)
                                 only if         with the local sizes and offsets
                                 `_moves`        that the rule asks for

    Invariant: ``__init__`` computes everything that depends only on the kind of the call; `run` adds the tensors.
    """

    route = "rule"
    calls = 0

    def __init__(self, call: Call, rule: Rule, choice: Choice) -> None:
        signature = signature_of(call.func)
        self.func = call.func
        # The Python wrapper of the operator calls ``_op``; without the wrapper a call is faster.
        self._local: Callable[..., Any] = rule.local or call.func._op
        self._operands = choice.operands
        self._results = choice.results
        self._shapes = [rule.shape(number) for number in range(len(rule.results))]
        self._specs: list[Spec | None] = [None] * len(rule.results)
        self._moves = any(layout is not None for layout in choice.operands)
        self._is_view, self._keeps_offset = signature.is_view, signature.keeps_offset
        self._is_in_place = bool(signature.written)
        if not self._is_in_place:
            self._strides = strides_of_results(call, self._shapes)
            # Where the results begin after the operand that they view.
            self._shifts = [nbytes_before(one) for one in _meta_results(call, self._shapes)] or [0] * len(self._shapes)
        self._makes_copy, self._may_copy = rule.makes_copy, rule.local is not None
        # Whether a view's component follows from the source's component on the same device.
        self._is_local = bool(self._operands) and self._operands[0] is None and not rule.takes_offsets
        # Arguments that name sizes of the result, as in ``expand``: each device gets the sizes of its component.
        self._local_sizes = [
            (_argument_key(call, name), self._component_shapes(call, result)) for name, result in rule.local_size_args
        ]
        self._offsets = self._offsets_by_device(call) if rule.takes_offsets else None
        self._tensor_positions = self._positions_if_simple(call)
        self._returns_one_tensor = signature.returns_one_tensor

    @override
    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        # The fast path: one local device, and the components of the operands as they are.
        if self._tensor_positions is not None and len(tensors[0]._components) == 1:
            local_args = list(args)
            for position in self._tensor_positions:
                local_args[position] = local_args[position]._components[0]
            output = self._local(*local_args, **kwargs)
            return self._wrap(0, (output,)) if self._returns_one_tensor else self._wrap_all((output,))
        return self._run(args, kwargs, tensors)

    def _positions_if_simple(self, call: Call) -> tuple[int, ...] | None:
        """Return the positions of the tensors if the plan only runs the operator on components, else None."""
        positions = tuple(position for position, value in enumerate(call.args) if isinstance(value, torch.Tensor))
        does_more = (
            self._moves or self._keeps_offset or self._is_in_place or self._local_sizes or self._offsets is not None
        )
        # Tensors in lists, or passed by name, are not among the positions.
        return positions if not does_more and len(positions) == len(call.tensors) else None

    def _component_shapes(self, call: Call, result: int) -> list[list[int]]:
        """Return the shape of a result's component on every local device."""
        devices = call.tensors[0]._layout.mesh.local_device_ids()
        return [list(self._results[result].region(device, self._shapes[result]).shape) for device in devices]

    def _run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        # Each device is about to write to its component, or to hand out a view that a program may write through.
        if self._is_view:
            unshare(tensors[0])
        if self._is_in_place:
            for target in tensors_in(args[:1]):
                prepare_write(target, self.func, tensors)
        operands = to_layouts(tensors, self._operands) if self._moves else tensors
        components = [operand.components for operand in operands]
        if not components[0]:
            if self._is_in_place:
                return args[0]
            return results_without_devices(self.func, args, kwargs, tensors, self._results)
        if self._is_in_place:
            # The choice kept the layout of the first operand: its own components are written to.
            self._write_on_devices(components, args, kwargs)
            return self._after_writing(args, kwargs)
        outputs = [
            self._run_on_device(self._local, device, [of_operand[device] for of_operand in components], args, kwargs)
            for device in range(len(components[0]))
        ]
        results = self._wrap_all(outputs, nbytes_before(tensors[0]) if self._keeps_offset else 0)
        if self._is_view:
            self._track_views(results, args, kwargs, tensors[0])
        return results

    def _write_on_devices(self, components: Sequence[Sequence[torch.Tensor]], args: Args, kwargs: Kwargs) -> None:
        """Run the operator on all devices, even after one fails: it may have written, and copies must stay equal."""
        error = None
        for device in range(len(components[0])):
            try:
                self._run_on_device(self._local, device, [each[device] for each in components], args, kwargs)
            except RuntimeError as failure:
                error = error or failure
        if error is not None:
            finish_write(args[0])
            raise error

    def _run_on_device(
        self, function: Callable[..., Any], device: int, components: Sequence[torch.Tensor], args: Args, kwargs: Kwargs
    ) -> Any:
        """Call a function with a device's components in place of the operands, and its sizes and offsets."""
        local_args, local_kwargs = replace_tensors(args, kwargs, components)
        for key, shapes in self._local_sizes:
            (local_args if isinstance(key, int) else local_kwargs)[key] = shapes[device]  # type: ignore[index]
        if self._offsets is not None:
            local_kwargs["offsets"] = self._offsets[device]
        return function(*local_args, **local_kwargs)

    def _after_writing(self, args: Args, kwargs: Kwargs) -> Any:
        """Finish the write to the first argument; return the operator's result."""
        del kwargs
        return finish_write(args[0])

    def _offsets_by_device(self, call: Call) -> list[list[tuple[int, ...]]]:
        """Return the global index at which components begin, by local device and operand."""
        layouts = [target or tensor._layout for target, tensor in zip(self._operands, call.tensors, strict=True)]
        devices = call.tensors[0]._layout.mesh.local_device_ids()
        operands = list(zip(layouts, call.shapes, strict=True))
        return [[layout.region(device, shape).offset for layout, shape in operands] for device in devices]

    def _wrap_all(self, outputs: Sequence[Any], start: int = 0) -> Any:
        """Return the results as DTensors.

        Args:
            outputs: Results of the operator on every local device.
            start: Where the first operand begins in its storage, in bytes, if the results begin after it.
        """
        first = outputs[0]
        if isinstance(first, torch.Tensor):
            return self._wrap(0, outputs, start)
        # Numbers of the rule's results leave out values that are no tensors, such as None and numbers.
        numbers = iter(range(len(self._results)))
        results = [
            self._wrap(next(numbers), [output[position] for output in outputs], start)
            if isinstance(item, torch.Tensor)
            else item
            for position, item in enumerate(first)
        ]
        return results if isinstance(first, list) else tuple(results)

    def _wrap(self, number: int, components: Sequence[torch.Tensor], start: int = 0) -> DTensor:
        result_spec = self._specs[number]
        # The dtype of a result may depend on the default dtype, which is not part of the plan's key.
        if result_spec is None or result_spec.dtype is not components[0].dtype:
            result_spec = intern_spec(
                self._results[number], self._shapes[number], self._strides[number], components[0].dtype
            )
            self._specs[number] = result_spec
        if not self._keeps_offset:
            return wrap_components(components, result_spec)
        offset = _offset_of(self.func, start + self._shifts[number], result_spec.dtype)
        return wrap_components(components, result_spec, offset=offset)

    def _track_views(self, results: Any, args: Args, kwargs: Kwargs, source: DTensor) -> None:
        """Let views share writes with their source: by shared memory if there is any, else by `view_tracking`."""
        may_share = self._is_local and not self._makes_copy and source._view is None
        for number, result in enumerate([results] if isinstance(results, DTensor) else results):
            # A component may be a copy, if its strides do not allow the view. Clients may differ in this, because they
            # exchange nothing for such a view.
            if may_share and (not self._may_copy or view_tracking.share_memory(result, source)):
                view_tracking.share_writes(result, source, is_detached=self.func is torch.ops.aten.detach.default)
                continue
            call = Call(self.func, tuple(args), kwargs)
            local = self._local_view(args, kwargs) if self._is_local else None
            view_tracking.track_view(result, source, call, None if result is results else number, local)

    def _local_view(self, args: Args, kwargs: Kwargs) -> view_tracking.LocalView:
        """Return the function that views a component of the source as the plan's operator does."""
        # Of a function that copies, the operator itself gives the view that can be written through.
        function = self.func if self._makes_copy else self._local
        return lambda component, device: self._run_on_device(function, device, [component], args, kwargs)


def strides_of_results(call: Call, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the strides that an operator gives its results on the global tensors.

    Components need not show these strides, and components of different clients may show different ones.
    """
    on_meta = _meta_results(call, shapes)
    return [one.stride() for one in on_meta] if on_meta else [contiguous_stride(shape) for shape in shapes]


def _meta_results(call: Call, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return `Call.meta_results`; none if PyTorch cannot tell them, or leaves out some."""
    with suppress(UnknownResultError):
        if [tuple(one.shape) for one in call.meta_results] == list(shapes):
            return call.meta_results
    return []


def nbytes_before(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _offset_of(func: Operator, nbytes: int, dtype: torch.dtype) -> int:
    """Return the storage offset of a view that begins so many bytes into its storage.

    Raises:
        OperatorError: No element of its dtype begins there.
    """
    offset, rest = divmod(nbytes, dtype.itemsize)
    if rest:
        raise OperatorError(
            f"operator {func}: got a view that begins {nbytes} bytes into its storage, expected a multiple of "
            f"{dtype.itemsize}, the size of {dtype}"
        )
    return offset


def _argument_key(call: Call, name: str) -> int | str:
    """Return the position of an argument, or its name if the caller may only pass it by name."""
    number = signature_of(call.func).names.index(name)
    return number if number < len(call.args) else name


def prepare_write(tensor: DTensor, func: Operator, operands: Sequence[DTensor]) -> None:
    """Make a tensor ready for a write to its components. Arguments and errors: as `view_tracking.validate_write`."""
    view_tracking.validate_memory(tensor, func)
    view_tracking.validate_write(tensor, func, operands)
    unshare(tensor)


def finish_write(tensor: Any) -> Any:
    """Make a write to components visible to views and sources, and return the tensor.

    Collective: Over the mesh's clients, if the tensor is a view whose values had to move.

    Args:
        tensor: The DTensor, or a list of DTensors, that was written to.
    """
    for one in tensors_in([tensor]):
        if one._view is not None:
            view_tracking.write_through(one)
        view_tracking.count_write(one)
    return tensor


def results_without_devices(
    func: Operator, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor], layouts: Sequence[Layout] = ()
) -> Any:
    """Return an operator's results on a client that has no device in the mesh: DTensors without components.

    Args:
        func: The operator.
        args: Positional arguments.
        kwargs: Arguments by name.
        tensors: The tensors among all arguments, in order.
        layouts: Layouts of the results that are tensors; those beyond the last are replicated.

    Raises:
        ComponentError: The operator returns a number, which only clients of the mesh can know.
    """
    returns = func._schema.returns
    if returns and not any("Tensor" in str(one.type) for one in returns):
        mesh = tensors[0].device_mesh
        raise ComponentError(
            f"operator {func}: got a call on a client that has no device in mesh {mesh.name!r} {mesh.axis_sizes} of "
            f"clients {capped(mesh.clients)}, expected one of these, as the result is no tensor but a value"
        )
    # Such a client must not skip the call: the next operators need its results, which are DTensors, too.
    remaining = iter(layouts)

    def wrap(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        layout = next(remaining, None) or replicated_layout(tensors[0].device_mesh, result.ndim)
        spec = intern_spec(layout, tuple(result.shape), result.stride(), result.dtype)
        return wrap_components([], spec, tensors[0].device)

    results = run_on_meta(func, args, kwargs, tensors)
    return wrap(results) if isinstance(results, torch.Tensor) else type(results)(map(wrap, results))


class CompositePlan(Plan):
    """Call a function that does the operator's work by other operators; see `registry.composite`."""

    route = "decomposition"
    calls = 0

    def __init__(self, func: Operator, function: Callable[..., Any]) -> None:
        self.func = func
        self.function = function
        self._strides: list[tuple[int, ...]] | None = None

    @override
    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        del tensors
        # Plain tensors that the function makes follow from its arguments, so they are equal on all clients. A
        # comparison would take a collective for each.
        with trust_plain_tensors():
            results = self.function(*args, **kwargs)
        if self._strides is None and results is not NotImplemented:
            self._strides = self._strides_of_new_results(Call(self.func, tuple(args), kwargs), results)
        if not self._strides:
            return results
        strides = iter(self._strides)
        return tree_map_only(DTensor, lambda result: with_stride(result, next(strides)), results)

    def _strides_of_new_results(self, call: Call, results: Any) -> list[tuple[int, ...]]:
        """Return the strides that the operator itself gives its results; none if these are not new, or not known."""
        # PyTorch's decompositions call the same operators as for plain tensors, and so give the same strides.
        if signature_of(self.func).returns_arguments or self.function == self.func.decompose:
            return []
        found = [result for result in tree_leaves(results) if isinstance(result, DTensor)]
        # The function has succeeded: an error comes from a meta kernel that needs values.
        with suppress(UnknownResultError, RuntimeError):
            if len(call.meta_results) == len(found):
                pairs = zip(call.meta_results, found, strict=True)
                # Statistics that were not computed may be empty.
                return [(meta if meta.shape == one.shape else one).stride() for meta, one in pairs]
        return []


def become(tensor: DTensor, source: DTensor) -> None:
    """Give a tensor the shape, strides, storage, layout and components of another one."""
    # On the wrapper, which has no values: it changes the sizes and strides that PyTorch sees.
    with no_dispatch():
        torch.ops.aten.set_.source_Tensor(tensor, source)
    view_tracking.become_alias(tensor, source)


class WriteResultPlan(Plan):
    """Compute an operator's result, and write it to the first argument or to ``out``, whose layout stays.

    The plan serves all operators with ``out``, and in-place operators whose rule would change the layout of the first
    argument.
    """

    route = "rule"
    calls = 0

    def __init__(self, call: Call, functional: Operator) -> None:
        signature = signature_of(call.func)
        self.func = call.func
        self._functional = functional
        self._written = signature.written
        self._is_out = signature.written[0] != signature.names[0]
        arguments = functional._schema.arguments
        self._positional = [one.name for one in arguments if not one.kwarg_only]
        self._by_name = [one.name for one in arguments if one.kwarg_only]

    @override
    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        call = Call(self.func, tuple(args), kwargs)
        targets = list(tensors_in([call[name] for name in self._written]))
        for target in targets:
            view_tracking.validate_memory(target, self.func)
            view_tracking.validate_write(target, self.func, tensors)
        result = self._functional(
            *(call[name] for name in self._positional), **{name: call[name] for name in self._by_name}
        )
        for target, value in zip(targets, tensors_in([result]), strict=True):
            is_same_shape = tuple(value.shape) == tuple(target.shape)
            # Only an ``out`` tensor without memory may change its shape.
            if not is_same_shape and (not self._is_out or torch_private.storage_nbytes(target)):
                if not self._is_out:
                    run_on_meta(self.func, args, kwargs, tensors)  # PyTorch's own error, if it has one
                raise _shape_error(self.func, target, value)
            if value.dtype != target.dtype and not self._is_out and torch.Tag.pointwise in self._functional.tags:
                # PyTorch's own error, if it has one for these dtypes, as `abs_` for complex numbers.
                ones = [torch.ones((1,) * tensor.ndim, dtype=tensor.dtype) for tensor in tensors]
                plain_args, plain_kwargs = replace_tensors(args, kwargs, ones)
                self.func(*plain_args, **plain_kwargs)
            if not torch.can_cast(value.dtype, target.dtype):
                raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
            if not is_same_shape:
                become(target, value.to(target.dtype))
                continue
            with torch.no_grad():
                write_into(value, target)
            finish_write(target)
        # As PyTorch, return the arguments that were written to, and not the result.
        count = len(self.func._schema.returns)
        if count and isinstance(call[self._written[0]], torch.Tensor):
            return targets[0] if count == 1 else tuple(targets[:count])
        return call[self._written[0]] if count else None


def _shape_error(func: Operator, target: DTensor, value: torch.Tensor) -> LayoutError:
    return LayoutError(
        f"operator {func} writes to a DTensor of shape {tuple(target.shape)}, and shape stays; got a result of shape "
        f"{tuple(value.shape)} and {value.dtype}"
    )


class ReplicationPlan(Plan):
    """Replicate all operands, and run the operator on all of them on every device that holds a component.

    Args:
        call: The call.
        local: Function that each device runs instead of the operator, with the same arguments.
    """

    route = "replication"
    calls = 0

    def __init__(self, call: Call, local: Callable[..., Any] | None = None) -> None:
        self.func = call.func
        self._local = local or call.func
        self._signature = signature_of(call.func)

    @override
    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        call = Call(self.func, tuple(args), kwargs)
        names = [name for name in _UNDECLARED_WRITES if name in self._signature.names]
        targets = list(tensors_in([call[name] for name in (*self._signature.written, *names)]))
        for tensor in targets:
            prepare_write(tensor, self.func, tensors)
        if self._signature.is_view and not targets:
            unshare(tensors[0])
        # Bound: every device needs memory for all of every operand; therefore rules come first.
        operands = to_replicated(tensors)
        for number, tensor in enumerate(tensors):
            if operands[number] is not tensor and any(tensor is target for target in targets):
                operands[number] = to_replicated([tensor], is_copied=True)[0]
        if not operands[0].components:
            if self._signature.written:
                return call[self._signature.written[0]]
            return results_without_devices(self.func, args, kwargs, tensors)
        outputs = []
        for device in range(len(operands[0].components)):
            components = [operand.components[device] for operand in operands]
            local_args, local_kwargs = replace_tensors(args, kwargs, components)
            outputs.append(self._local(*local_args, **local_kwargs))
        for tensor, operand in zip(tensors, operands, strict=True):
            if any(tensor is target for target in targets):
                self._write_back(operand, tensor)
        return self._wrap_all(outputs, call, tensors, operands)

    def _write_back(self, operand: DTensor, target: DTensor) -> None:
        """Bring a replicated copy of a target, to which every device has written, back to the target's layout."""
        written = operand._components[0]
        if written.shape != target.shape:
            if torch_private.storage_nbytes(target):
                raise _shape_error(self.func, target, written)
            layout = replicated_layout(target.device_mesh, written.ndim)
            spec = intern_spec(layout, tuple(written.shape), written.stride(), written.dtype)
            become(target, wrap_components(operand._components, spec))
            return
        if operand is not target:
            write_into(operand, target)
        finish_write(target)

    def _wrap_all(
        self, outputs: Sequence[Any], call: Call, tensors: Sequence[DTensor], operands: Sequence[DTensor]
    ) -> Any:
        """Return the results as DTensors.

        Args:
            outputs: Results of the operator on every local device.
            call: The call.
            tensors: The tensors among its arguments.
            operands: These tensors, replicated.
        """
        first = outputs[0]
        if isinstance(first, torch.Tensor):
            return self._wrap(outputs, None, call, tensors, operands)
        if isinstance(first, list | tuple):
            results = [
                self._wrap([output[number] for output in outputs], number, call, tensors, operands)
                if isinstance(item, torch.Tensor)
                else item
                for number, item in enumerate(first)
            ]
            return results if isinstance(first, list) else tuple(results)
        return first

    def _wrap(
        self,
        components: Sequence[torch.Tensor],
        number: int | None,
        call: Call,
        tensors: Sequence[DTensor],
        operands: Sequence[DTensor],
    ) -> DTensor:
        """Return one result: an argument if it is that argument, a tracked view if it is a view of one."""
        first = components[0]
        # In-place operators return their argument: the caller gets the very DTensor that it passed.
        for tensor, operand in zip(tensors, operands, strict=True):
            if first is operand.components[0]:
                return tensor
        shape = tuple(first.shape)
        layout = replicated_layout(tensors[0].device_mesh, len(shape))
        # A sparse result has no strides, and so no spec.
        if first.layout is not torch.strided:
            return DTensor(components, layout, shape, first.dtype)
        spec = intern_spec(layout, shape, first.stride(), first.dtype)
        if not self._signature.is_view:
            return wrap_components(components, spec)
        source, operand = tensors[0], operands[0]
        shift = nbytes_before(first) - nbytes_before(operand.components[0])
        offset = _offset_of(self.func, nbytes_before(source) + shift, first.dtype)
        result = wrap_components(components, spec, offset=offset)
        # Of a source that was redistributed, the result is a view of a copy.
        if source._view is None and view_tracking.share_memory(result, source):
            view_tracking.share_writes(result, source)
        else:
            view_tracking.track_view(result, source, call, number)
        return result


class InplaceViewPlan(Plan):
    """Give a tensor in place the sizes and strides of a view of it, as ``squeeze_`` and ``t_`` do."""

    route = "rule"
    calls = 0

    def __init__(self, call: Call, functional: Operator) -> None:
        self.func = call.func
        self._functional = functional

    @override
    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        tensor = tensors[0]
        if self.func is not _DETACH:
            view_tracking.note_reshape(tensor, self.func)
        # The view is one of an alias: the tensor itself becomes the view, and must not be its own source.
        with torch.no_grad():
            view = self._functional(view_tracking.alias_of(tensor), *args[1:], **kwargs)
        become(tensor, view)
        return tensor


# Lazy conjugation: ``tensor.mH`` of a plain complex tensor only sets a bit, which PyTorch resolves before the next
# kernel. Within ``__torch_dispatch__`` it does not: a kernel that calls other kernels, as ``linalg_pinv`` does, would
# compute with the wrong values. So components, which never have such bits, are computed with under
# `torch_private.resolve_lazy_bits`.
class LazyBitsPlan(Plan):
    """Run another plan, which has complex operands, so that its kernels see conjugate and negative bits."""

    calls = 0

    def __init__(self, plan: Plan) -> None:
        self.func, self.route = plan.func, plan.route
        self._plan = plan

    @override
    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
        with torch_private.resolve_lazy_bits():
            result = self._plan.run(args, kwargs, tensors)
            for tensor in tensors_in([result]):
                # Without this, the bits of a result would be lost in calls that have no complex operand.
                if isinstance(tensor, DTensor) and any(each.is_conj() or each.is_neg() for each in tensor._components):
                    tensor._components = tuple(each.resolve_conj().resolve_neg() for each in tensor._components)
        return result
