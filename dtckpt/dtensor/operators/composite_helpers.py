"""Helpers for composites: test whether a dim is split, carry out reductions, choose the dtype to accumulate in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dtckpt.dtensor.derived_layouts import gradient_layout
from dtckpt.dtensor.operators.operands import to_layouts

_HALVES = frozenset({torch.float16, torch.bfloat16})


def is_split(tensor: Any, dims: Iterable[int]) -> bool:
    """Whether an axis splits one of these dims."""
    axes = tensor._layout.split_axes
    return any(axes[dim] for dim in dims if -len(axes) <= dim < len(axes))


def are_replicated(*tensors: Any) -> bool:
    """Whether all of these tensors are replicated; None, for an argument that was not passed, counts as replicated."""
    return all(tensor is None or tensor._layout.is_fully_replicated() for tensor in tensors)


def reduce_pending(tensor: Any) -> Any:
    """Return a tensor with its pending reductions carried out, and otherwise in its layout.

    A composite that uses a tensor twice calls this first, else each use would reduce it.

    Collective: Over the mesh's clients, if reductions are pending.
    """
    return reduce_pending_all([tensor])[0]


def reduce_pending_all(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors, each as by `reduce_pending`, in one exchange. Collective: As there."""
    return to_layouts(tensors, [gradient_layout(one._layout) if one._layout.has_partial else None for one in tensors])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up elements of a dtype: float32 for float16 and bfloat16."""
    return torch.float32 if dtype in _HALVES else dtype


def cast(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a tensor in a dtype: the tensor itself if it has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype)
