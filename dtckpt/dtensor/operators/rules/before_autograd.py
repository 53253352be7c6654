"""Operators that run here before autograd and before PyTorch decomposes them: ``tensor_split``, ``one_hot``, ``sgn``.

PyTorch's own decompositions of some read or write memory that a DTensor does not have, or give other strides. Of others
PyTorch makes the gradient of zeros from the shape alone, as a plain tensor: ``sgn``, ``copysign``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Operator, functional_of, replace_tensors, run_on_meta, tensors_in
from dtckpt.dtensor.operators.plain_tensors import gradient_to_dtensor, to_dtensors
from dtckpt.dtensor.operators.plans import WriteResultPlan
from dtckpt.dtensor.operators.registry import PLANNERS, before_autograd
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

_RANK: Any = _aten.linalg_matrix_rank
_RANKS = [getattr(_RANK, name) for name in _RANK.overloads()]
_WRITING = [_aten.matmul.out, _aten.linalg_matmul.out, *(one for one in _RANKS if one._schema.is_mutable)]


@before_autograd(*(one for one in _RANKS if not one._schema.is_mutable))
def _rank(operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """For an empty batch, PyTorch returns the ranks as a plain tensor; here they are a DTensor."""
    del keys
    first = args[0]
    if first.numel() or not isinstance(first, DTensor):
        return operator.decompose(*args, **kwargs)
    ranks = run_on_meta(operator, args, kwargs, list(tensors_in((*args, *kwargs.values()))))
    return first.new_zeros(ranks.shape, dtype=ranks.dtype)


@before_autograd(*_WRITING)
def _write(operator: Operator, keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
    """Compute the result, then write it into ``out``.

    PyTorch returns ranks without writing them, and writes products through strides that ``out`` may not have.

    Raises:
        RuntimeError: Autograd would have to follow.
    """
    del keys
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((*args, out)))
    if needs_grad and operator not in _RANKS:
        raise RuntimeError(
            f"{operator}: functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    with torch.no_grad():
        DTensor._dispatch(operator, args, {**kwargs, "out": out})
    return out


PLANNERS |= {one: lambda call: WriteResultPlan(call, functional_of(call.func)) for one in _WRITING}


@before_autograd(_aten.tensor_split.tensor_indices_or_sections)
def _split(operator: Operator, keys: Any, tensor: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    """PyTorch reads the indices from memory; here all clients read the global values.

    Collective: As `DTensor.full_tensor` of the indices.
    """
    del keys
    if isinstance(indices, DTensor):
        indices = indices.full_tensor()
    elif isinstance(tensor, DTensor):
        to_dtensors([indices], tensor.device_mesh)  # which compares them
    return operator.decompose(tensor, indices, dim)


@before_autograd(_aten.vander.default)
def _vander(operator: Operator, keys: Any, x: torch.Tensor, N: int | None = None, increasing: bool = False) -> Any:
    """PyTorch writes the powers into a plain tensor; here they are a DTensor."""
    del operator, keys
    count = x.shape[0] if N is None else N
    x = x.to(torch.promote_types(x.dtype, torch.int64))
    factors = x.unsqueeze(-1).expand(*x.shape, max(count - 1, 0))
    powers = torch.cat([x.new_ones(*x.shape, min(count, 1)), factors], -1).cumprod(-1)
    return powers if increasing else powers.flip(1)


@before_autograd(_aten.one_hot.default)
def _one_hot(operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch compares the classes of tensors like ours, which keeps their strides; where it writes, it does not."""
    del keys
    return operator.decompose(*args, **kwargs).contiguous()


# --- gradients of zeros ----------------------------------------------------------------------------------------------
#
# A hook on the operand makes a DTensor of such a gradient. ``cat`` makes them for empty tensors, and ``repeat`` for a
# repeat count of 0.

_KINDS = "Scalar", "Tensor"


@before_autograd(
    _aten.copysign.Tensor,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.nextafter.default,
    _aten.normal.Tensor_Tensor,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.sgn.default,
)
def _with_dtensor_gradients(operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn plain gradients into DTensors on the mesh of the operand."""
    hooked = map(_hooked, tensors_in((*args, *kwargs.values())))
    new_args, new_kwargs = replace_tensors(args, kwargs, list(hooked))
    return operator.redispatch(keys, *new_args, **new_kwargs)


@before_autograd(
    *(getattr(getattr(_aten, f"{name}_"), kind) for name in ("eq", "ge", "gt", "le", "lt", "ne") for kind in _KINDS),
    _aten.copysign_.Scalar,
    _aten.copysign_.Tensor,
    _aten.nextafter_.default,
    _aten.sgn_.default,
)
def _in_place(operator: Operator, keys: Any, tensor: torch.Tensor, *others: Any) -> Any:
    """As `_with_dtensor_gradients`; the written tensor has no alias, so a hook of its node turns its gradient."""
    if isinstance(tensor, DTensor) and tensor.grad_fn is not None and torch.is_grad_enabled():
        mesh = tensor.device_mesh
        tensor.grad_fn.register_prehook(
            lambda gradients: tuple(each if each is None else gradient_to_dtensor(each, mesh) for each in gradients)
        )
    return operator.redispatch(keys, tensor, *map(_hooked, others))


@before_autograd(_aten.cat.default)
def _cat(operator: Operator, keys: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """As `_with_dtensor_gradients`, where there are tensors of shape (0,), which may be joined to any others."""
    if any(not len(tensor) for tensor in tensors if tensor.ndim == 1):
        tensors = list(map(_hooked, tensors))
    return operator.redispatch(keys, tensors, dim)


@before_autograd(_aten.repeat.default)
def _repeat(operator: Operator, keys: Any, tensor: torch.Tensor, repeats: Sequence[int]) -> Any:
    """As `_with_dtensor_gradients`, where the result has no elements."""
    return operator.redispatch(keys, tensor if all(repeats) else _hooked(tensor), repeats)


def _hooked(tensor: Any) -> Any:
    """Return an alias of a DTensor with a hook that makes its gradient a DTensor; return anything else unchanged."""
    if not (isinstance(tensor, DTensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    mesh = tensor.device_mesh
    alias = tensor.view_as(tensor)
    alias.register_hook(lambda gradient: gradient_to_dtensor(gradient, mesh))  # type: ignore[no-untyped-call]  # as torch left it
    return alias
