"""Rule builders: the ways to write an operator's sharding rule, on one page.

A function under `dtckpt.dtensor.operators.registry.rule` gets a `Call` and returns its `Rule`, or None if there is no
rule for such arguments. Take the first of these builders that fits the operator:

================  =========================================  ===================================================
builder           the operator                               example
================  =========================================  ===================================================
`pointwise`       works element by element, and broadcasts   ``mul``: ``pointwise(call.shapes, BILINEAR)``
`same_dims`       gives one operand's dims back              ``clone``: ``same_dims(shape, any_reduction())``
`einsum`          is a product that letters can spell        ``mm``: ``einsum("mk,kn->mn", *call.shapes)``
`add_term`        adds a term to a product                   ``addmm``: ``add_term(term, einsum(...))``
`reduce_dims`     reduces dims, to size 1 or to nothing      ``amax``: ``reduce_dims(call, dim, keepdim=True,``
                                                             ``reduction="max")``
`along_dim`       works along its argument ``dim``           ``sort``: ``along_dim(call, num_results=2)``
`batched`         works on items, which are the last dims    ``linalg_qr``: ``batched(call, [2])``
`batched_images`  works on images, of dims N, C and space    ``avg_pool2d``: ``batched_images(call, LINEAR)``
`from_labels`     moves, drops or adds dims                  ``stack``: ``from_labels(call, DimLabels(``
                                                             ``[[0, 1], [0, 1]], [[None, 0, 1]]))``
`masked_lookup`   takes elements by index from a split dim   ``embedding``: ``masked_lookup(rule, 0, size, lookup)``
`Rule` itself     has dims of several factors                ``view``, attention
================  =========================================  ===================================================

``dataclasses.replace`` sets the fields of a rule for which its builder has no parameter, as ``local``. `wrap_dim`,
`unlabel_dims` and `drop_dim` help to write labels.

`batched` and `from_labels` run the operator on meta tensors to get the shapes of results from PyTorch. So a rule cannot
get shapes wrong, and PyTorch refuses wrong arguments with its own error before any data moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtckpt.comm.collectives import SIGNED
from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.pending_passes import can_reduce
from dtckpt.dtensor.operators.rule import BILINEAR, Dims, Factors, Passes, Rule, any_reduction

# --- elements -----------------------------------------------------------------------------------------------------


def pointwise(shapes: Sequence[Sequence[int]], passes: Passes | None = None) -> Rule | None:
    """Return the rule of an operator on elements, operands broadcast; None if the shapes cannot be broadcast.

    Args:
        shapes: Shape of every operand.
        passes: See `Rule`.
    """
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    sizes = []
    for column in zip(*padded, strict=True):
        wide = [size for size in column if size != 1]
        if len(set(wide)) > 1:
            return None
        sizes.append(wide[0] if wide else 1)
    operands = tuple(
        # A broadcast dim of size 1 has no factor: it stays whole while others that it meets are split.
        tuple((dim,) if size == sizes[dim] else () for dim, size in enumerate(shape) if dim >= rank - len(own))
        for own, shape in zip(shapes, padded, strict=True)
    )
    result = tuple((dim,) for dim in range(rank))
    return Rule(tuple(sizes), operands, (result,), passes=passes or {})


def same_dims(shape: Sequence[int], passes: Passes | None = None) -> Rule:
    """Return the rule of an operator on one operand whose result has the operand's dims.

    Args:
        shape: Shape of the operand.
        passes: See `Rule`.
    """
    factors = Factors()
    dims = factors.dims(shape)
    return Rule(factors.sizes, (dims,), (dims,), passes=passes or {})


# --- products -----------------------------------------------------------------------------------------------------


def einsum(text: str, *shapes: Sequence[int]) -> Rule | None:
    """Return the rule of a product that a text spells, such as ``"mk,kn->mn"``; None if the shapes do not fit it.

    A letter is a factor; the product sums over a letter that the result lacks. ``"..."`` stands for the same leading
    dims everywhere.

    Args:
        text: Dims of the operands and of the result.
        shapes: Shape of every operand.
    """
    left, _, result = text.partition("->")
    operands = left.split(",")
    paired = zip(shapes, operands, strict=True)
    # The text's own ``...`` is three characters long; it may stand for fewer dims.
    num_leading = max((len(shape) - len(letters) + 3 for shape, letters in paired if "..." in letters), default=0)
    leading = "".join(chr(0x100 + number) for number in range(num_leading))  # letters that no text has
    operands = [letters.replace("...", leading) for letters in operands]
    result = result.replace("...", leading)
    sizes: dict[str, int] = {}
    for letters, shape in zip(operands, shapes, strict=True):
        if len(letters) != len(shape):
            return None
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None
    numbers = {letter: number for number, letter in enumerate(sizes)}
    return Rule(
        sizes=tuple(sizes.values()),
        operands=tuple(tuple((numbers[letter],) for letter in letters) for letters in operands),
        results=(tuple((numbers[letter],) for letter in result),),
        contracted={numbers[letter]: "sum" for letter in sizes if letter not in result},
        passes=BILINEAR,
    )


def add_term(term: tuple[int, ...], product: Rule | None, position: int = 0) -> Rule | None:
    """Return the rule of a product to which a broadcast term is added; None if the term cannot be broadcast.

    Args:
        term: Shape of the term.
        product: Rule of the product alone, which is linear in each of its two operands.
        position: Number of the term among the operands.
    """
    if product is None:
        return None
    (result,), shape = product.results, product.shape(0)
    lead = len(shape) - len(term)
    if lead < 0 or any(size not in {1, shape[lead + dim]} for dim, size in enumerate(term)):
        return None
    dims: Dims = tuple(result[lead + dim] if size == shape[lead + dim] else () for dim, size in enumerate(term))
    operands = list(product.operands)
    operands.insert(position, dims)
    first, second = (number for number in range(3) if number != position)
    # A pending term passes only beside a pending operand: the sum of the terms then has the term once.
    passes: Passes = dict.fromkeys(("sum", "avg"), ((first, position), (second, position)))
    return replace(product, operands=tuple(operands), passes=passes, counted_once=frozenset({position}))


# --- dims that disappear, or must be whole ------------------------------------------------------------------------


def reduce_dims(
    call: Call,
    dim: int | Sequence[int] | None,
    *,
    keepdim: bool,
    reduction: str | None = None,
    passes: Passes | None = None,
    num_results: int = 1,
    local: Callable[..., Any] | None = None,
) -> Rule | None:
    """Return the rule of a reduction of the call's only operand over dims; None if it does not have these dims.

    Args:
        call: The call.
        dim: The dims that disappear; all for None and for none.
        keepdim: Whether they stay as dims of size 1.
        reduction: Reduction that the results wait for if an axis splits such a dim; None if these dims must be whole.
        passes: See `Rule`.
        num_results: Number of results, all of one shape.
        local: See `Rule`.
    """
    (shape,) = call.shapes
    reduced = reduced_dims(dim, len(shape))
    if reduced is None:
        return None
    factors = Factors()
    dims = factors.dims(shape)
    result = tuple(
        () if number in reduced else factor for number, factor in enumerate(dims) if keepdim or number not in reduced
    )
    # Neither contracted nor part of a result: no axis may split a factor of a dim that must be whole.
    # A tensor without dims has no factor, though 0 then counts as a dim to reduce.
    contracted = {} if reduction is None else dict.fromkeys((dims[one][0] for one in reduced if dims), reduction)
    return Rule(
        factors.sizes, (dims,), (result,) * num_results, contracted=contracted, passes=passes or {}, local=local
    )


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> frozenset[int] | None:
    """Return the dims that a reduction's argument names: all for None and for none; None if the tensor lacks one."""
    # PyTorch lets a tensor without dims be reduced along 0 and -1.
    named = [dim] if isinstance(dim, int) else list(dim or range(ndim))
    if not all(-max(ndim, 1) <= one < max(ndim, 1) for one in named):
        return None
    return frozenset(one % max(ndim, 1) for one in named)


def along_dim(
    call: Call, *, num_operands: int = 1, num_results: int = 1, passes: Passes | None = None, size: int | None = None
) -> Rule | None:
    """Return the rule of an operator that works along the dim of its argument ``dim``, which must be whole.

    Args:
        call: The call; its operands are of one shape.
        num_operands: Number of operands.
        num_results: Number of results, of the operands' shape too.
        passes: See `Rule`.
        size: Size of the results' dim, if it differs, as in ``topk``.
    """
    shape, dim = call.shapes[0], call["dim"]
    if not -len(shape) <= dim < len(shape) or any(other != shape for other in call.shapes):
        return None
    factors = Factors()
    dims = factors.dims(shape)
    result = list(dims)
    if size is not None:
        result[dim] = (factors.new(size),)
    return Rule(
        factors.sizes,
        (dims,) * num_operands,
        (tuple(result),) * num_results,
        whole=frozenset((*dims[dim], *result[dim])),
        passes=passes or {},
    )


# --- batches ------------------------------------------------------------------------------------------------------


def batched(
    call: Call,
    item_ndims: Sequence[int],
    *,
    passes: Passes | None = None,
    shape_only_operands: Collection[int] = (),
    local_size_args: tuple[tuple[str, int], ...] = (),
) -> Rule | None:
    """Return the rule of an operator that treats all items of a batch in the same way; None if the batches do not fit.

    The batch is the leading dims, which are broadcast and may be split. An item is the last dims, which must be whole.

    Args:
        call: The call.
        item_ndims: Number of an item's dims, for every operand.
        passes: See `Rule`.
        shape_only_operands: See `Rule`.
        local_size_args: See `Rule`.
    """
    if len(item_ndims) != len(call.tensors) or any(
        len(shape) < ndim for shape, ndim in zip(call.shapes, item_ndims, strict=True)
    ):
        return None
    batch = pointwise([shape[: len(shape) - ndim] for shape, ndim in zip(call.shapes, item_ndims, strict=True)])
    if batch is None:
        return None
    sizes = list(batch.sizes)

    def with_item(dims: Dims, shape: Sequence[int]) -> Dims:
        # New factors for each tensor: an item's dims have nothing in common with the dims of other tensors.
        more = range(len(sizes), len(sizes) + len(shape) - len(dims))
        sizes.extend(shape[len(dims) :])
        return (*dims, *((number,) for number in more))

    operands = tuple(with_item(dims, shape) for dims, shape in zip(batch.operands, call.shapes, strict=True))
    shapes = result_shapes(call)
    # A result whose first dims are not the batch has mixed the items.
    if any(shape[: len(batch.sizes)] != batch.sizes for shape in shapes):
        return None
    results = tuple(with_item(batch.results[0], shape) for shape in shapes)
    return replace(
        batch,
        sizes=tuple(sizes),
        operands=operands,
        results=results,
        whole=frozenset(range(len(batch.sizes), len(sizes))),
        # Many kernels refuse tensors without elements.
        nonempty_pieces=frozenset(range(len(batch.sizes))),
        passes=passes or {},
        shape_only_operands=frozenset(shape_only_operands),
        local_size_args=local_size_args,
    )


def batched_images(
    call: Call,
    passes: Passes | None = None,
    *,
    shape_only_operands: Collection[int] = (),
    local_size_args: tuple[tuple[str, int], ...] = (),
) -> Rule | None:
    """Return the rule of an operator on images of dims (N, C, space) or (C, space): N and C may be split.

    Args:
        call: The call; every operand is an image.
        passes: See `Rule`.
        shape_only_operands: See `Rule`.
        local_size_args: See `Rule`.
    """
    return batched(
        call,
        [num_space_dims(call.func)] * len(call.tensors),
        passes=passes,
        shape_only_operands=shape_only_operands,
        local_size_args=local_size_args,
    )


def num_space_dims(func: Operator) -> int:
    """Return the number of dims of space, which the names of operators on images tell: 2 for ``avg_pool2d``."""
    match = re.search(r"(\d)d(?:_|$)", func._schema.name)
    assert match is not None  # noqa: S101  (callers pass such operators only)
    return int(match[1])


# --- labels -------------------------------------------------------------------------------------------------------

Labels = Sequence[Hashable | None]
"""A label for every dim of a tensor; None for a dim that matches no other dim and must be whole."""


@dataclass(frozen=True, slots=True)
class DimLabels:
    """Labels of the dims of a call, as letters in einsum.

    Dims with one label are sharded together: they are one factor of the `Rule`.

    Args:
        operands: Labels of every operand's dims.
        results: Labels of every result's dims.
        whole: Labels that no axis may split.
        broadcast: Labels whose dims of size 1 are broadcast.
        contracted: By label, a reduction. If a mesh axis splits the dims of this label, results that lack the label are
            Partial with this reduction.
    """

    operands: Sequence[Labels]
    results: Sequence[Labels]
    whole: Collection[Hashable] = ()
    broadcast: Collection[Hashable] = ()
    contracted: Mapping[Hashable, str] = field(default_factory=dict)


def from_labels(
    call: Call,
    labels: DimLabels,
    *,
    passes: Passes | None = None,
    local_size_args: tuple[tuple[str, int], ...] = (),
    local: Callable[..., Any] | None = None,
) -> Rule | None:
    """Return the rule that labels of dims spell; None if there are more or fewer labels than dims.

    Dims that have one label but differ in size must be whole.

    Args:
        call: The call.
        labels: Labels of its operands' and results' dims.
        passes: See `Rule`.
        local_size_args: See `Rule`.
        local: See `Rule`.
    """
    shapes = [*call.shapes, *result_shapes(call)]
    names = [*labels.operands, *labels.results]
    if [len(one) for one in names] != [len(shape) for shape in shapes]:
        return None
    sizes: dict[Hashable, set[int]] = {}
    for row, shape in zip(names, shapes, strict=True):
        for name, size in zip(row, shape, strict=True):
            if name is not None and not (name in labels.broadcast and size == 1):
                sizes.setdefault(name, set()).add(size)
    factors = Factors()
    # A label gets its factor only if all its dims have one size; broadcast dims of size 1 do not count.
    numbers = {name: factors.new(next(iter(of_name))) for name, of_name in sizes.items() if len(of_name) == 1}

    def factors_of(name: Hashable | None, size: int) -> tuple[int, ...]:
        if name in numbers and factors.sizes[numbers[name]] == size:
            return (numbers[name],)
        # No other dim has this factor, so that no axis may split it.
        return () if size == 1 else (factors.new(size),)

    dims = [
        tuple(factors_of(name, size) for name, size in zip(row, shape, strict=True))
        for row, shape in zip(names, shapes, strict=True)
    ]
    return Rule(
        factors.sizes,
        tuple(dims[: len(labels.operands)]),
        tuple(dims[len(labels.operands) :]),
        contracted={numbers[name]: reduction for name, reduction in labels.contracted.items() if name in numbers},
        whole=frozenset(numbers[name] for name in labels.whole if name in numbers),
        passes=passes or {},
        local_size_args=local_size_args,
        local=local,
    )


def wrap_dim(dim: int, ndim: int) -> int:
    """Return a dim that may be counted from the end; PyTorch refuses those out of range later, on meta tensors."""
    return dim % max(ndim, 1)


def wrap_dims(dims: int | Sequence[int], ndim: int) -> frozenset[int]:
    """Return dims, each as `wrap_dim` does."""
    return frozenset(wrap_dim(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims))


def unlabel_dims(dims: int | Collection[int], ndim: int) -> list[int | None]:
    """Return labels of a tensor's dims, which are their numbers, with None for these: (1, 3) gives [0, None, 2]."""
    unlabelled = {dims} if isinstance(dims, int) else dims
    return [None if dim in unlabelled else dim for dim in range(ndim)]


def drop_dim(dim: int, ndim: int) -> list[int]:
    """Return labels of a tensor's dims, which are their numbers, less one dim: (1, 3) gives [0, 2]."""
    return [one for one in range(ndim) if one != dim]


# --- indices ------------------------------------------------------------------------------------------------------

Lookup = Callable[..., torch.Tensor]
"""Takes a component, where it begins, the global size and the operator's other arguments: see `masked_lookup`."""


LOOKUP_PASSES: Passes = {op: groups for op, groups in any_reduction().items() if op != "product"}
"""A lookup moves elements. A product of the zeros beside them might be 0.0 and not -0.0: see `neutral_term`."""


def completed_by_sum(call: Call, dim: Hashable) -> dict[Hashable, str]:
    """Return the reduction that completes a lookup in a split dim of the call's first operand; empty if no sum can.

    Args:
        call: The call.
        dim: Label of the dim.
    """
    dtype = call.tensors[0].dtype
    return {dim: "sum"} if can_reduce("sum", dtype) and dtype != torch.bool else {}


def masked_lookup(unmasked: Rule | None, dim: int, size: int, lookup: Lookup) -> Rule | None:
    """Return a rule by which each device takes its component's elements, and -0.0 for all others.

    Every reduction but a product may stay pending.

    Args:
        unmasked: The rule; its ``contracted`` is `completed_by_sum`. None stays None.
        dim: The dim of the first operand that the indices go into.
        size: Global size of that dim.
        lookup: The function that each device runs. Its arguments are the component, the global index at which the
            component begins along ``dim``, the global size, and the operator's other arguments.
    """
    if unmasked is None:
        return None

    def local(component: torch.Tensor, *args: Any, offsets: Sequence[tuple[int, ...]], **kwargs: Any) -> torch.Tensor:
        # Of wide unsigned integers many kernels are missing, and the signed ones have the same bits.
        table = component.view(SIGNED.get(component.dtype, component.dtype))
        # The plan says where each operand's component begins; the table is the first operand.
        return lookup(table, offsets[0][dim], size, *args, **kwargs).view(component.dtype)

    # A table that moves has a gradient of its size, which moves back; the strategy counts both.
    return replace(unmasked, local=local, takes_offsets=True, costly_to_move=frozenset({0}), passes=LOOKUP_PASSES)


# --- shapes of results --------------------------------------------------------------------------------------------


def result_shapes(call: Call) -> list[tuple[int, ...]]:
    """Return the global shapes of a call's results. Errors: as `Call.meta_results`."""
    return [tuple(result.shape) for result in call.meta_results]
