"""Plans: what is done for a call, decided once per operator, specs and arguments, and then kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from dtckpt.dtensor.operators import view_tracking
from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, signature_of, tensors_in
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
from dtckpt.dtensor.operators.tensor_spec import Spec, global_stride, intern_spec, wrap_components
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import LayoutError
from dtckpt.layout.layout import Layout

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

_UNDECLARED_WRITES = ("running_mean", "running_var")
"""What operators write to though their signatures do not say so."""

_trusts: ContextVar[bool] = ContextVar("is_trusted", default=False)
_trusting_blocks: set[object] = set()
"""Blocks in which every thread trusts: autograd has threads of its own for what lies on cards."""


@contextmanager
def trust_plain_tensors() -> Iterator[None]:
    """Take plain tensors beside DTensors for the same on every client, in a context, without comparing them."""
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)


@contextmanager
def trust_plain_tensors_in_all_threads() -> Iterator[None]:
    """As `trust_plain_tensors`, for all threads."""
    block = object()
    _trusting_blocks.add(block)
    try:
        yield
    finally:
        _trusting_blocks.remove(block)


def are_plain_tensors_trusted() -> bool:
    """Whether plain tensors are taken for the same on every client."""
    return bool(_trusting_blocks) or _trusts.get()


class Plan(Protocol):
    """What is done for a call."""

    route: str
    """``rule``, ``decomposition`` or ``replication``."""
    func: Operator
    """What it was made for."""
    calls: int
    """How often it was run again."""

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """Return the operator's result.

        Args:
            args: The arguments; no tensor among them is plain.
            kwargs: Arguments by name.
            tensors: The tensors among the arguments, in order.
        """
        ...


class RulePlan:
    """Bring the operands into the chosen layouts, and have each device work on its pieces."""

    route = "rule"
    calls = 0

    def __init__(self, call: Call, rule: Rule, choice: Choice) -> None:
        signature = signature_of(call.func)
        self.func = call.func
        self._local: Callable[..., Any] = rule.local or call.func._op  # which its Python wrapper but calls
        self._operands = choice.operands
        self._results = choice.results
        self._shapes = [rule.shape(number) for number in range(len(rule.results))]
        self._specs: list[Spec | None] = [None] * len(rule.results)
        self._moves = any(layout is not None for layout in choice.operands)
        self._is_view = signature.is_view
        self._examples = _views_on_meta(call) if self._is_view else []
        self._is_in_place = bool(signature.written)
        self._is_copying, self._may_copy = rule.makes_copy, rule.local is not None
        self._sized = [
            (_argument_key(call, name), self._sizes_of(call, result)) for name, result in rule.local_size_args
        ]
        self._offsets = self._offsets_of(call) if rule.takes_offsets else None
        self._places = self._places_of(call)
        self._is_one = [str(one.type) for one in call.func._schema.returns] == ["Tensor"]

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        if self._places is not None and len(tensors[0]._components) == 1:
            local = list(args)
            for place in self._places:
                local[place] = local[place]._components[0]
            made = self._local(*local, **kwargs)
            return self._wrap(0, (made,)) if self._is_one else self._wrapped((made,))
        return self._run(args, kwargs, tensors)

    def _places_of(self, call: Call) -> tuple[int, ...] | None:
        """Return where the tensors stand if all that there is to do is to run the operator on components."""
        places = tuple(place for place, value in enumerate(call.args) if isinstance(value, torch.Tensor))
        has_more = self._moves or self._is_view or self._is_in_place or self._sized or self._offsets is not None
        return places if not has_more and len(places) == len(call.tensors) else None

    def _sizes_of(self, call: Call, result: int) -> list[list[int]]:
        """Return the shape of every local piece of a result."""
        devices = call.tensors[0]._layout.mesh.local_device_ids()
        return [list(self._results[result].region(device, self._shapes[result]).shape) for device in devices]

    def _run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        if self._is_view:
            unshare(tensors[0])
        if self._is_in_place:
            for written in tensors_in(args[:1]):
                unshare(written)
        moved = to_layouts(tensors, self._operands) if self._moves else tensors
        parts = [tensor.components for tensor in moved]
        if not parts[0]:
            return (
                args[0]
                if self._is_in_place
                else results_without_devices(self.func, args, kwargs, tensors, self._results)
            )
        made = []
        for number in range(len(parts[0])):
            local_args, local_kwargs = replace_tensors(args, kwargs, [part[number] for part in parts])
            for place, sizes in self._sized:
                (local_args if isinstance(place, int) else local_kwargs)[place] = sizes[number]  # type: ignore[index]
            if self._offsets is not None:
                local_kwargs["offsets"] = self._offsets[number]
            made.append(self._local(*local_args, **local_kwargs))
        if self._is_in_place:
            return self._after_writing(args, kwargs)
        results = self._wrapped(made)
        if self._is_view:
            self._note_views(results, Call(self.func, tuple(args), kwargs), tensors[0])
        return results

    def _after_writing(self, args: Args, kwargs: Kwargs) -> Any:
        """Have what was written reach what it is a view of; return what the operator returns."""
        del kwargs
        return finish_write(args[0])

    def _offsets_of(self, call: Call) -> list[list[tuple[int, ...]]]:
        """Return where the operands' pieces begin, by local device and operand."""
        layouts = [wanted or tensor._layout for wanted, tensor in zip(self._operands, call.tensors, strict=True)]
        devices = call.tensors[0]._layout.mesh.local_device_ids()
        placed = list(zip(layouts, call.shapes, strict=True))
        return [[layout.region(device, shape).offset for layout, shape in placed] for device in devices]

    def _wrapped(self, made: Sequence[Any]) -> Any:
        first = made[0]
        if isinstance(first, torch.Tensor):
            return self._wrap(0, made)
        numbers = iter(range(len(self._results)))
        found = [
            self._wrap(next(numbers), [one[place] for one in made]) if isinstance(item, torch.Tensor) else item
            for place, item in enumerate(first)
        ]
        return found if isinstance(first, list) else tuple(found)

    def _wrap(self, number: int, components: Sequence[torch.Tensor]) -> DTensor:
        known = self._specs[number]
        if known is None or known.dtype is not components[0].dtype:
            shape = self._shapes[number]
            stride = global_stride(self._examples[number] if self._examples else components[0], shape)
            known = self._specs[number] = intern_spec(self._results[number], shape, stride, components[0].dtype)
        return wrap_components(components, known)

    def _note_views(self, results: Any, call: Call, source: DTensor) -> None:
        is_own = source._view is None and self._operands[0] is None and not self._is_copying
        for number, result in enumerate([results] if isinstance(results, DTensor) else results):
            is_shared = is_own and (not self._may_copy or _share_memory(result.components[0], source.components[0]))
            if is_shared:
                result._writes = view_tracking.write_counter(source)
            else:
                view_tracking.track_view(result, source, call, None if result is results else number)


def _views_on_meta(call: Call) -> list[torch.Tensor]:
    """Return results on no device: a piece's strides may leave open which dim comes first, and the whole's do not."""
    try:
        return list(tensors_in([run_on_meta(call.func, call.args, call.kwargs, call.tensors)]))
    except RuntimeError:
        return []  # a view that the whole's strides would not allow, and the pieces' do


def _argument_key(call: Call, name: str) -> int | str:
    """Return where an argument stands: its position, or its name."""
    number = signature_of(call.func).names.index(name)
    return number if number < len(call.args) else name


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors share memory, as far as they have any."""
    if one.is_meta or one.data_ptr() == other.data_ptr() or not one.numel():
        return True
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def finish_write(tensor: Any) -> Any:
    """Have what was written to a tensor, or to each of a list, reach what it is a view of."""
    for one in tensors_in([tensor]):
        if one._view is not None:
            view_tracking.write_through(one)
        if one._writes is not None:
            one._writes[0] += 1
    return tensor


def run_on_meta(func: Operator, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
    """Return the operator's result as to shapes and dtypes; raises what it raises for such arguments."""
    made = [
        torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
        for tensor in tensors
    ]
    meta_args, meta_kwargs = replace_tensors(args, kwargs, made)
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    return func(*meta_args, **meta_kwargs)


def results_without_devices(
    func: Operator, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor], layouts: Sequence[Layout] = ()
) -> Any:
    """Return an operator's results on a client that has no device in the mesh.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Arguments by name.
        tensors: The tensors among the arguments.
        layouts: Of the results that are tensors; replicated, if there are none.
    """
    known = iter(layouts)

    def wrap(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        layout = next(known, None) or replicated_layout(tensors[0].device_mesh, one.ndim)
        return DTensor([], layout, one.shape, one.dtype, device=tensors[0].device)

    made = run_on_meta(func, args, kwargs, tensors)
    return wrap(made) if isinstance(made, torch.Tensor) else type(made)(map(wrap, made))


class CompositePlan:
    """Do what the operator does by others."""

    route = "decomposition"
    calls = 0

    def __init__(self, func: Operator, function: Callable[..., Any]) -> None:
        self.func = func
        self.function = function

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        del tensors
        with trust_plain_tensors():
            return self.function(*args, **kwargs)


class WriteResultPlan:
    """Compute what an operator writes, and write it to its first argument or to ``out``, in the layout that it has."""

    route = "rule"
    calls = 0

    def __init__(self, call: Call, functional: Operator) -> None:
        signature = signature_of(call.func)
        self.func = call.func
        self._functional = functional
        self._written = signature.written
        arguments = functional._schema.arguments
        self._given = [one.name for one in arguments if not one.kwarg_only]
        self._named = [one.name for one in arguments if one.kwarg_only]

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        call = Call(self.func, tuple(args), kwargs)
        targets = list(tensors_in([call[name] for name in self._written]))
        made = self._functional(*(call[name] for name in self._given), **{name: call[name] for name in self._named})
        for target, value in zip(targets, tensors_in([made]), strict=True):
            if tuple(value.shape) != tuple(target.shape):
                self._resize(target, value, args, kwargs, tensors)
                continue
            if not torch.can_cast(value.dtype, target.dtype):
                raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
            with torch.no_grad():
                write_into(value, target)
            finish_write(target)
        count = len(self.func._schema.returns)
        if count and isinstance(call[self._written[0]], torch.Tensor):
            return targets[0] if count == 1 else tuple(targets[:count])
        return call[self._written[0]] if count else None

    def _resize(self, target: DTensor, value: DTensor, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> None:
        """Give a tensor of no elements, passed as ``out``, shape, layout and values of the result.

        Raises:
            LayoutError: It has elements, or is not for results alone.
        """
        is_out = self._written[0] != signature_of(self.func).names[0]
        if not is_out:
            run_on_meta(self.func, args, kwargs, tensors)  # which may say it better
        if not is_out or target.numel() or target.dtype != value.dtype:
            raise LayoutError(
                f"operator {self.func} writes to a DTensor of shape {tuple(target.shape)}, and shape stays; got a "
                f"result of shape {tuple(value.shape)} and {value.dtype}"
            )
        with no_dispatch():
            target.resize_(value.shape)
        target._components, target._layout, target._spec, target._view = value.components, value._layout, None, None


class ReplicationPlan:
    """Have every device that holds a piece work on the whole of all operands.

    Args:
        call: The call.
        local: What each device runs instead of the operator, with the same arguments.
    """

    route = "replication"
    calls = 0

    def __init__(self, call: Call, local: Callable[..., Any] | None = None) -> None:
        self.func = call.func
        self._local = local or call.func
        self._signature = signature_of(call.func)

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        call = Call(self.func, tuple(args), kwargs)
        names = [name for name in _UNDECLARED_WRITES if name in self._signature.names]
        written = list(tensors_in([call[name] for name in (*self._signature.written, *names)]))
        for tensor in written or (tensors[:1] if self._signature.is_view else ()):
            unshare(tensor)
        whole = to_replicated(tensors)
        for number, tensor in enumerate(tensors):
            if whole[number] is not tensor and any(tensor is one for one in written):
                whole[number] = to_replicated([tensor], is_copied=True)[0]
        if not whole[0].components:
            if self._signature.written:
                return call[self._signature.written[0]]
            return results_without_devices(self.func, args, kwargs, tensors)
        made = []
        for number in range(len(whole[0].components)):
            parts = [tensor.components[number] for tensor in whole]
            local_args, local_kwargs = replace_tensors(args, kwargs, parts)
            made.append(self._local(*local_args, **local_kwargs))
        for tensor, copy in zip(tensors, whole, strict=True):
            if any(tensor is one for one in written):
                if copy is not tensor:
                    write_into(copy, tensor)
                finish_write(tensor)
        return self._wrapped(made, call, tensors, whole)

    def _wrapped(self, made: Sequence[Any], call: Call, tensors: Sequence[DTensor], whole: Sequence[DTensor]) -> Any:
        """Return results: those that are an argument as that, those that share its memory as views of it."""
        first = made[0]
        if isinstance(first, torch.Tensor):
            return self._wrap(made, None, call, tensors, whole)
        if isinstance(first, list | tuple):
            found = [
                self._wrap([one[place] for one in made], place, call, tensors, whole)
                if isinstance(item, torch.Tensor)
                else item
                for place, item in enumerate(first)
            ]
            return found if isinstance(first, list) else tuple(found)
        return first

    def _wrap(
        self,
        components: Sequence[torch.Tensor],
        place: int | None,
        call: Call,
        tensors: Sequence[DTensor],
        whole: Sequence[DTensor],
    ) -> DTensor:
        first = components[0]
        for tensor, copy in zip(tensors, whole, strict=True):
            if first is copy.components[0]:
                return tensor
        shape = tuple(first.shape)
        layout = replicated_layout(tensors[0].device_mesh, len(shape))
        stride = tuple(first.stride()) if first.layout is torch.strided else ()
        made = (
            wrap_components(components, intern_spec(layout, shape, stride, first.dtype))
            if first.layout is torch.strided
            else DTensor(components, layout, shape, first.dtype)
        )
        if self._signature.is_view and first.layout is torch.strided:
            source, copy = tensors[0], whole[0]
            is_own = copy is source and source._view is None
            if is_own and _share_memory(first, copy.components[0]):
                made._writes = view_tracking.write_counter(source)
            else:
                view_tracking.track_view(made, source, call, place)
        return made


class InplaceViewPlan:
    """Change in place how a tensor's own sizes and strides read its values, as ``squeeze_`` does."""

    route = "rule"
    calls = 0

    def __init__(self, call: Call, functional: Operator) -> None:
        self.func = call.func
        self._functional = functional

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """As `Plan.run`."""
        tensor = tensors[0]
        with torch.no_grad():
            made = self._functional(view_tracking.alias_of(tensor), *args[1:], **kwargs)
        with no_dispatch():
            self.func(*args, **kwargs)
        tensor._components, tensor._layout, tensor._spec = made.components, made._layout, None
        tensor._view, tensor._writes = made._view, made._writes
        return tensor


def layouts_of(tensors: Sequence[DTensor]) -> list[Layout]:
    """Return the tensors' layouts."""
    return [tensor._layout for tensor in tensors]
