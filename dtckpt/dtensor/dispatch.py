"""Operators on DTensors.

Only operators that work on each component alone and leave layout and shape as they are have an entry; any other is
refused with a message that says how to get at plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dtckpt.errors import OperatorError

if TYPE_CHECKING:
    from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

COMPONENTWISE = frozenset(
    {
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.zero_.default,
        _aten._to_copy.default,
    }
)
"""Operators that map each component to the result's component, whatever the layout."""


PAIRWISE = frozenset({_aten.add.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.copy_.default})
"""Operators on two DTensors of one layout that work component by component: what accumulating gradients needs."""


def dispatch(cls: type[DTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func``; ``cls`` is `DTensor`.

    Raises:
        OperatorError: There is no rule for the operator.
    """
    source = args[0] if args else None
    if func in PAIRWISE and isinstance(source, cls) and _are_alike(cls, args, kwargs):
        results = [func(*pair) for pair in zip(args[0].components, args[1].components, strict=True)]
        if func is not _aten.add.Tensor:
            return source
        return cls(results, source.layout, source.shape, torch.promote_types(args[0].dtype, args[1].dtype))
    if func not in COMPONENTWISE or not isinstance(source, cls):
        raise OperatorError(
            f"operator {func} has no rule for a DTensor; use to_local(), unpack() or full_tensor() and work on plain "
            "tensors"
        )
    results = [func(component, *args[1:], **kwargs) for component in source.components]
    if func is _aten.zero_.default:
        return source
    dtype = results[0].dtype if results else kwargs.get("dtype") or source.dtype
    return cls(results, source.layout, source.shape, dtype)


def _are_alike(cls: type[DTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments are two DTensors of one layout and shape: what gradients are when they add up."""
    if kwargs or len(args) != 2 or not all(isinstance(arg, cls) for arg in args):
        return False
    return bool(args[0].layout == args[1].layout and args[0].shape == args[1].shape)
