"""Pooling of images: ``avg_pool2d``, ``max_pool2d``, ``adaptive_avg_pool2d``, ``max_unpool2d``.

Batch and channels may be split; dims of space must be whole.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import batched, batched_images, num_space_dims

_aten = torch.ops.aten


@rule(
    _aten._adaptive_avg_pool2d.default,
    _aten._adaptive_avg_pool3d.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool3d.default,
)
def _average(call: Call) -> Rule | None:
    """Batch and channels may be split; linear, but for integers, which it rounds."""
    return batched_images(call, LINEAR if call.tensors[0].is_floating_point() else {})


@rule(
    _aten._adaptive_avg_pool2d_backward.default,
    _aten._adaptive_avg_pool3d_backward.default,
    _aten.avg_pool2d_backward.default,
    _aten.avg_pool3d_backward.default,
)
def _average_backward(call: Call) -> Rule | None:
    """Batch and channels may be split; linear in the gradient, and the images' values are not read."""
    return batched_images(call, LINEAR, shape_only_operands=[1])


@rule(
    _aten.adaptive_max_pool2d.default,
    _aten.adaptive_max_pool3d.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
    _aten.max_unpool2d.default,
    _aten.max_unpool3d.default,
)
def _maximum(call: Call) -> Rule | None:
    """Batch and channels may be split: indices count within the space of one image and channel."""
    return batched_images(call)


@rule(
    _aten.adaptive_max_pool2d_backward.default,
    _aten.adaptive_max_pool3d_backward.default,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.max_pool3d_with_indices_backward.default,
    _aten.fractional_max_pool2d_backward.default,
)
def _maximum_backward(call: Call) -> Rule | None:
    """Batch and channels may be split; linear in the gradient."""
    return batched_images(call, LINEAR)


@rule(_aten.fractional_max_pool2d.default, _aten.fractional_max_pool3d.default)
def _fractional_maximum(call: Call) -> Rule | None:
    """Batch and channels may be split; the random samples have dims N, C and one more."""
    space = num_space_dims(call.func)
    return batched(call, [space, 1]) if len(call.shapes[0]) == space + 2 else None
