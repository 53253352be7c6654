"""Calls of operators: arguments by name, the tensors among them, facts of the schema, metadata of the results.

PyTorch's meta kernels, which compute that metadata, get some strides wrong: `correct_strides` mends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.comm.torch_private import suggest_memory_format
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

DEVICE_DEPENDENT = frozenset(
    getattr(_aten, name).default
    for name in (
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "convolution",
        "pixel_shuffle",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad2d",
        "replication_pad3d",
    )
)
"""Operators whose results have strides that depend on the device, so only a fake tensor has them."""


def _as_pair(result: torch.Tensor, one: torch.Tensor, other: Any, *_: Any) -> torch.Tensor:
    """Return a result of an operator on the elements of two tensors."""
    del result
    return torch.eq(one, other)


def _as_image(result: torch.Tensor, image: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a tensor of the result's shape in the memory format of an image: contiguous, or with channels last."""
    return torch.empty(result.shape, memory_format=suggest_memory_format(image), device="meta")


def _as_normalized(result: torch.Tensor, image: torch.Tensor, *others: Any) -> torch.Tensor:
    """As `_as_image`, but dims of size 1 may have any strides where the image lies in one piece."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.ndim)
    if channels_last is None or image.is_contiguous() or not image.is_contiguous(memory_format=channels_last):
        return _as_image(result, image, *others)
    return torch.empty(result.shape, memory_format=channels_last, device="meta")


def _contiguous(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(result.shape, device="meta")


def _as_clone(result: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a result of an operator that writes to a clone of its first argument."""
    del result
    return tensor.clone()


def _as_rolled(result: torch.Tensor, tensor: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Return the parts of each dim joined by ``cat``, as the kernel joins them; ``cat`` keeps a memory format."""
    if not dims or not tensor.numel():
        return result
    for shift, dim in zip(shifts, dims, strict=True):
        first, last = tensor.tensor_split([-shift % tensor.shape[dim]], dim)
        tensor = torch.cat([last, first], dim)
    return tensor


def _as_indexed(result: torch.Tensor, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return a tensor with the strides that ``index`` really gives.

    Its kernel loops as a pointwise operator does, over the indices and the source, which has stride 0 along indexed
    dims. So run a pointwise operator on operands of these strides. Two indices are enough: a third index hardly ever
    has other strides.
    """
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    chosen = [index for index in indices if index is not None]
    if any(index.dtype in {torch.bool, torch.uint8} for index in chosen):
        return result
    others = [dim for dim in range(tensor.ndim) if dim not in dims]
    before = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    shape = torch.broadcast_shapes(*(index.shape for index in chosen))  # type: ignore[no-untyped-call]
    loops = [index.expand(shape).reshape([1] * before + [*shape] + [1] * (len(others) - before)) for index in chosen]
    steps = [tensor.stride(dim) for dim in others]
    steps[before:before] = [0] * len(shape)
    source = torch.empty_strided(result.shape, steps, dtype=torch.long, device="meta")
    return torch.add(source, *loops) if len(loops) == 1 else torch.addcmul(source, *loops[:2])


_CORRECTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((_aten.copysign.Tensor, _aten.floor_divide.default), _as_pair),
    **dict.fromkeys((_aten.div.Tensor_mode, _aten.native_dropout_backward.default), _as_pair),
    **dict.fromkeys(
        (
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
            _aten._batch_norm_with_update.default,
            _aten.native_batch_norm_backward.default,
            _aten.batch_norm_backward.default,
        ),
        _as_normalized,
    ),
    **dict.fromkeys(
        (
            _aten.max_unpool2d.default,
            _aten.max_unpool3d.default,
            _aten.channel_shuffle.default,
            _aten.reflection_pad3d.default,
            _aten.replication_pad3d.default,
        ),
        _as_image,
    ),
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor), _as_clone),
    _aten.index.Tensor: _as_indexed,
    _aten.roll.default: _as_rolled,
    **dict.fromkeys((_aten.nll_loss2d_forward.default, _aten.rrelu_with_noise.default), _contiguous),
}
"""By operator, a function of the first result and the arguments; it returns a tensor with the true strides."""


def correct_strides(func: Any, results: Any, args: Sequence[Any]) -> Any:
    """Return an operator's results on meta tensors with the strides that it gives on others.

    Args:
        func: The operator.
        results: Results of its meta kernel: one tensor, or several.
        args: Its positional arguments, with meta tensors.
    """
    correction = _CORRECTIONS.get(func)
    if correction is None:
        return results
    is_one = isinstance(results, torch.Tensor)
    first = results if is_one else results[0]
    stride = correction(first, *args).stride()
    corrected = torch.empty_strided(first.shape, stride, dtype=first.dtype, device="meta")
    return corrected if is_one else (corrected, *results[1:])


Operator = Any
"""A ``torch._ops.OpOverload``."""


@dataclass(frozen=True)
class Signature:
    """Facts of an operator's schema.

    Args:
        names: Names of the arguments.
        defaults: Default values of the arguments, by name.
        written: Names of the arguments that the operator writes to.
        is_view: Whether the operator returns views of an argument.
        keeps_offset: Whether the results begin in their storages after the first argument does, as views do.
        returns_arguments: Whether the operator returns arguments, or views of them.
        is_inplace_view: Whether the operator gives its first argument other sizes and strides.
        returns_one_tensor: Whether the operator returns one tensor, and no list or tuple.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    written: tuple[str, ...]
    is_view: bool
    keeps_offset: bool
    returns_arguments: bool
    is_inplace_view: bool
    returns_one_tensor: bool


_UNDECLARED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Operators whose schemas promise copies, but whose results share memory with the source, so that writes reach it."""


_COPIES_OF_STORAGE = frozenset(
    {
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_scatter.default,
    }
)
"""Operators that copy the storage of their first argument, with all that lies between its elements."""


@cache  # bounded by the number of operators
def signature_of(func: Operator) -> Signature:
    """Return the facts of an operator's schema."""
    arguments = func._schema.arguments
    returns = func._schema.returns
    is_view = func in _UNDECLARED_VIEWS or any(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )
    return Signature(
        names=tuple(argument.name for argument in arguments),
        defaults={argument.name: argument.default_value for argument in arguments},
        written=tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write),
        is_view=is_view,
        keeps_offset=is_view or func in _COPIES_OF_STORAGE,
        returns_arguments=is_view or any(one.alias_info is not None for one in returns),
        is_inplace_view=torch.Tag.inplace_view in func.tags,
        returns_one_tensor=[str(one.type) for one in returns] == ["Tensor"],
    )


@dataclass(frozen=True)
class Call:
    """A call of an operator with at least one DTensor and no plain tensor.

    Rules read shapes, dtypes and arguments that are no tensors. Of a float they may only read whether it is zero or not
    finite: all other floats share one plan.
    """

    func: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def _bound(self) -> dict[str, Any]:
        signature = signature_of(self.func)
        return {**signature.defaults, **dict(zip(signature.names, self.args, strict=False)), **self.kwargs}

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its name, the default if it was not given."""
        return self._bound[name]

    def __contains__(self, name: str) -> bool:
        return name in self._bound

    def get(self, name: str) -> Any:
        """Return an argument by its name, None if this overload has no such argument."""
        return self._bound.get(name)

    @cached_property
    def tensors(self) -> list[DTensor]:
        """The tensors among the arguments, also from lists, in the order in which they were passed."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @cached_property
    def meta_results(self) -> list[torch.Tensor]:
        """The tensors among the results, as meta tensors: their global shapes, strides, storage offsets and dtypes.

        The operator would give these results on the global tensors, so they are the same on every client.

        Raises:
            UnknownResultError: PyTorch cannot tell them without computing the results.
        """
        try:
            return list(tensors_in([run_on_meta(self.func, self.args, self.kwargs, self.tensors)]))
        # Other errors are the operator's own about its arguments, and reach the caller before anything moves.
        # Errors of these classes reach the caller later, from the kernels of components. Some meta kernels raise them
        # for tensors without elements, where kernels do not: `native_group_norm_backward` divides by their size.
        except (NotImplementedError, TypeError, ZeroDivisionError) as error:
            raise UnknownResultError from error

    @property
    def keeps_zeros(self) -> bool:
        """Whether zero, times or divided by any of the numbers among the arguments, is zero."""
        is_division = "div" in self.func.name()
        numbers = numbers_in((*self.args, *self.kwargs.values()))
        # The difference of an infinity or a NaN with itself is NaN.
        return all(number - number == 0 and (number != 0 or not is_division) for number in numbers)

    def operands(self, /, **by_name: Any) -> tuple[Any, ...]:
        """Return values by argument name in the order of `tensors`, without values for an argument that is None.

        Args:
            by_name: A value for every tensor argument; for a list of tensors, a sequence of values.
        """
        ordered: list[Any] = []
        names = (*signature_of(self.func).names[: len(self.args)], *self.kwargs)
        for name in names:
            value = self[name]
            if isinstance(value, torch.Tensor):
                ordered.append(by_name[name])
            elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
                values = by_name[name]
                ordered += [one for one, item in zip(values, value, strict=True) if isinstance(item, torch.Tensor)]
        return tuple(ordered)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of `tensors`."""
        return [tuple(tensor.shape) for tensor in self.tensors]


class UnknownResultError(Exception):
    """PyTorch cannot tell the metadata of an operator's results: they depend on values, or there is no meta kernel."""


def run_on_meta(func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor]) -> Any:
    """Run an operator on meta tensors: return results with metadata alone, or raise the operator's error.

    Args:
        func: The operator.
        args: Positional arguments.
        kwargs: Arguments by name.
        tensors: The tensors among all arguments, in order.
    """
    if "device" not in kwargs and (ones := _small_ones(func, tensors)):
        with suppress(RuntimeError):  # The dtype may have no kernel; for wrong arguments the meta kernel raises.
            plain_args, plain_kwargs = replace_tensors(args, kwargs, ones)
            return func(*plain_args, **plain_kwargs)
    if func in DEVICE_DEPENDENT:
        with torch_private.FakeTensorMode():
            fake_args, _ = _with_empty_tensors(args, kwargs, tensors, tensors[0].device)
            return correct_strides(func, func(*fake_args), fake_args)
    meta_args, meta_kwargs = _with_empty_tensors(args, kwargs, tensors, torch.device("meta"))
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    results = correct_strides(func, func(*meta_args, **meta_kwargs), meta_args)
    if any(tensor.numel() for tensor in (*tensors, *tensors_in([results]))):
        return results
    # Without elements the operator itself costs nothing. Its strides are right; some meta kernels' strides are not.
    plain_args, plain_kwargs = _with_empty_tensors(args, kwargs, tensors, torch.device("cpu"))
    return func(*plain_args, **{**plain_kwargs, **{name: torch.device("cpu") for name in kwargs if name == "device"}})


_SMALL = 1 << 12
"""Up to so many elements of a result, an operator on elements runs itself, which is faster than its meta kernel."""


def _small_ones(func: Operator, tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """Return plain tensors in place of the operands of an operator on elements; none if they or the result are large.

    The tensors hold ones, for which each such operator has a result. Its strides are exact, also in dims of size 1.
    """
    tags = func.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or func._schema.is_mutable:
        return []
    spans = [_span(tensor) for tensor in tensors]
    with suppress(RuntimeError):  # The shapes cannot be broadcast.
        shape: torch.Size = torch.broadcast_shapes(*(one.shape for one in tensors))  # type: ignore[no-untyped-call]
        if max(*spans, shape.numel()) <= _SMALL:
            return [
                torch.ones(span, dtype=tensor.dtype).as_strided(tuple(tensor.shape), tensor.stride())
                for span, tensor in zip(spans, tensors, strict=True)
            ]
    return []


def _span(tensor: DTensor) -> int:
    """Return how many elements of its storage lie from a tensor's first to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def _with_empty_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[DTensor], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with plain tensors of the same shapes, strides and dtypes, which begin their storages."""
    empty = [
        torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
        for tensor in tensors
    ]
    return replace_tensors(args, kwargs, empty)


def tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors among arguments, also from lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def raise_versions(func: Operator, written: Iterable[torch.Tensor]) -> None:
    """Raise the version counters of tensors that an operator has written to below autograd, if PyTorch does not.

    PyTorch raises the counter of a tensor that is an argument itself. For tensors in lists it leaves this to the
    operators, and the operators of fused steps do not.
    """
    if func.name().startswith("aten::_foreach_"):
        torch.autograd.graph.increment_version(list(written))


def numbers_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the numbers among arguments, also from lists."""
    for value in values:
        if isinstance(value, int | float | complex):
            yield value
        elif isinstance(value, list | tuple):
            yield from numbers_in(value)


def _replace(value: Any, tensors: Iterator[Any]) -> Any:
    """Return an argument with each of its tensors replaced by the next one of an iterator."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        return [_replace(item, tensors) for item in value]
    return value


def replace_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with their tensors replaced by others, in the order of `tensors_in`."""
    remaining = iter(tensors)
    positional = [_replace(value, remaining) for value in args]
    return positional, {name: _replace(value, remaining) for name, value in kwargs.items()}


@cache  # bounded by the number of operators
def functional_of(func: Operator) -> Operator | None:
    """Return the functional variant of an operator that writes to an argument: ``add`` for ``add_``; else None."""
    schema = func._schema
    base = schema.name.removeprefix("aten::")
    if not schema.name.startswith("aten::"):
        return None
    writes_out = any(one.is_out for one in schema.arguments)
    name = base if writes_out else base.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (name == base and not writes_out):
        return None
    inputs = [(one.name, str(one.type)) for one in schema.arguments if not one.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = [(one.name, str(one.type)) for one in candidate._schema.arguments]
        if arguments == inputs and not candidate._schema.is_mutable:
            return candidate
    return None
