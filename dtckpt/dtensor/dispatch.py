"""Operators on DTensors.

Only operators that work on each component alone and leave layout and shape as they are have an entry; any other is
refused with a message that says how to get at plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from dtckpt.errors import DtckptError, LayoutError, OperatorError, capped
from dtckpt.placement import validate_reductions

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


_NEW_EMPTY = frozenset({_aten.new_empty.default, _aten.new_empty_strided.default})


def dispatch(cls: type[DTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func``; ``cls`` is `DTensor`.

    Raises:
        OperatorError: There is no rule for the operator, or a plain tensor stands beside a DTensor.
        LayoutError: DTensors are on different meshes, an operator in place would change layout or shape, or a
            conversion leaves reductions pending that the dtype does not have.
    """
    source = args[0] if args else None
    if func in PAIRWISE and isinstance(source, cls) and _are_alike(cls, args, kwargs):
        results = [func(*pair) for pair in zip(args[0].components, args[1].components, strict=True)]
        if func is not _aten.add.Tensor:
            return source
        return cls(results, source.layout, source.shape, torch.promote_types(args[0].dtype, args[1].dtype))
    if func in _NEW_EMPTY and isinstance(source, cls) and tuple(args[1]) == source.shape:
        # How autograd begins the gradient of a leaf, and torch.distributed.checkpoint what it saves in the background.
        func, args = _aten.empty_like.default, args[:1]
    if func not in COMPONENTWISE or not isinstance(source, cls):
        raise _refusal(cls, func, args, kwargs)
    if source.layout.partial:
        validate_reductions(source.layout.partial, kwargs.get("dtype") or source.dtype)
    results = [func(component, *args[1:], **kwargs) for component in source.components]
    if func is _aten.zero_.default:
        return source
    dtype = results[0].dtype if results else kwargs.get("dtype") or source.dtype
    return cls(results, source.layout, source.shape, dtype, device=kwargs.get("device") or source.device)


def _are_alike(cls: type[DTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments are two DTensors of one layout and shape: what gradients are when they add up."""
    if kwargs or len(args) != 2 or not all(isinstance(arg, cls) for arg in args):
        return False
    return bool(args[0].layout == args[1].layout and args[0].shape == args[1].shape)


def _refusal(
    cls: type[DTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DtckptError:
    """Return what is wrong with a call, or that there is no rule."""
    from dtckpt.dtensor.tensor import described

    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, cls)]
    if len({tensor.device_mesh for tensor in ours}) > 1:
        layouts = dict.fromkeys(described(tensor.layout) for tensor in ours)
        return LayoutError(
            f"operator {func}: got DTensors on different meshes ({capped(layouts)}), expected one mesh; redistribute "
            "moves a DTensor to another mesh"
        )
    plain = [tensor for tensor in tensors if not isinstance(tensor, cls) and tensor.ndim]
    if plain:
        return OperatorError(
            f"operator {func}: got a plain tensor of shape {tuple(plain[0].shape)} beside a DTensor, expected DTensors "
            "only; distribute_tensor and DTensor.from_local make them, to_local and full_tensor give plain tensors"
        )
    if func in PAIRWISE and func is not _aten.add.Tensor and len(ours) == 2:
        own, other = ((tuple(tensor.shape), described(tensor.layout)) for tensor in ours)
        return LayoutError(
            f"operator {func} works in place, so layout and shape stay; got an operand of shape {other[0]} in "
            f"{other[1]}, expected shape {own[0]} in {own[1]}; redistribute the operand"
        )
    what = "works in place and has" if func._schema.is_mutable else "has"  # type: ignore[attr-defined]
    return OperatorError(
        f"operator {func} {what} no rule for a DTensor; use to_local(), unpack() or full_tensor() and work on plain "
        "tensors"
    )
