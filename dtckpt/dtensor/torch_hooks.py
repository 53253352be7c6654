"""Where PyTorch asks what a tensor or a mesh is by lists and classes of its own: there it is told of ours.

Importing this puts functions of ours in the place of a few of PyTorch's. Each does what that one does for all else.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch
from torch.distributed import _functional_collectives
from torch.optim.optimizer import _foreach_supported_types as _optimizers_types
from torch.testing import _comparison
from torch.utils._foreach_utils import _foreach_supported_types as _gradients_types

from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.mesh import Mesh

_input_mask = torch.masked._ops._input_mask
_pair: Any = _comparison.TensorLikePair
_check_supported = _pair._check_supported

_UNWRAP = "_unwrap_dtensor_for_comparison"
"""PyTorch 2.11 lacks this function, and compares DTensors by operators, as it compares those in lists."""
_unwrapped: Any = getattr(_comparison, _UNWRAP, None)

_RESOLVE = "_resolve_group" if hasattr(_functional_collectives, "_resolve_group") else "_resolve_group_name"
"""Functional collectives find their group through this function. PyTorch 2.11 calls it by the older name."""
_resolve_group: Any = getattr(_functional_collectives, _RESOLVE)


@wraps(_input_mask)
def _mask_of(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002  (PyTorch's name)
    """Return the mask of functions in ``torch.masked``, which ask whether ``layout`` is in a set of PyTorch's own."""
    # Nothing but the shape counts of a tensor that is not sparse.
    asked = torch.empty(input.shape, device="meta") if isinstance(input, DTensor) else input
    made: torch.Tensor = _input_mask(asked, *args, **kwargs)
    return made


def _local_ones(actual: Any, expected: Any) -> tuple[Any, Any]:
    """Let ``torch.testing`` compare DTensors as it does PyTorch's: equal placements and meshes, close components.

    Raises:
        AssertionError: Placements or meshes differ.
        TypeError: One of the two is a DTensor, the other one not.
    """
    are_ours = isinstance(actual, DTensor), isinstance(expected, DTensor)
    if not any(are_ours):
        return _unwrapped(actual, expected)  # type: ignore[no-any-return]
    if not all(are_ours):
        raise TypeError(
            "a DTensor and what is none cannot be compared: take full_tensor() for the whole, to_local() for this "
            "client's part"
        )
    if actual.layout != expected.layout:
        raise AssertionError(f"layouts of DTensors do not match: {actual.layout} != {expected.layout}")
    return actual.components, expected.components


@wraps(_check_supported)
def _check_layout(pair: Any, tensor: torch.Tensor, *, id: Any) -> None:  # noqa: A002  (PyTorch's name)
    """Let ``torch.testing`` compare DTensors in lists and dicts, too: by operators, which are collective."""
    if not isinstance(tensor, DTensor):
        _check_supported(pair, tensor, id=id)


@wraps(_resolve_group)
def _group_of(group: Any, *args: Any, **kwargs: Any) -> Any:
    """Let functional collectives run over a mesh with one axis, or over ``(mesh, axis)``: bodies of `local_map` do."""
    if isinstance(group, Mesh):
        group = group.get_group()
    elif isinstance(group, tuple) and group and isinstance(group[0], Mesh):
        group = group[0].get_group(*group[1:])
    return _resolve_group(group, *args, **kwargs)


def install() -> None:
    """Put the functions in their places, and DTensors among what optimizers step through in lists."""
    torch.masked._ops._input_mask = _mask_of
    # What has been imported from there has a name of its own.
    comparing: tuple[Any, ...] = _comparison, sys.modules.get("torch.testing._internal.common_utils")
    for module in comparing:
        if hasattr(module, _UNWRAP):
            setattr(module, _UNWRAP, _local_ones)
    _pair._check_supported = _check_layout
    setattr(_functional_collectives, _RESOLVE, _group_of)
    known_types: tuple[list[Any], ...] = (_optimizers_types, _gradients_types)
    for known in known_types:
        if DTensor not in known:
            known.append(DTensor)
