"""Images: pooling (``avg_pool2d``, ``max_pool2d``), resizing (``upsample_bilinear2d``), sampling (``grid_sampler_2d``).

Batch and channels may be split (of ``grid_sampler_*`` and ``pixel_shuffle`` the batch); dims of space must be whole.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import functional_overloads, rule
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


# --- resizing and sampling -------------------------------------------------------------------------------------------


_UPSAMPLE = (
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)


@rule(*functional_overloads(*_UPSAMPLE))
def _upsample(call: Call) -> Rule | None:
    """Batch and channels may be split; linear, but for integers, which it rounds."""
    return batched_images(call, LINEAR if call.tensors[0].is_floating_point() else {})


@rule(*functional_overloads(*(f"{name}_backward" for name in _UPSAMPLE)))
def _upsample_backward(call: Call) -> Rule | None:
    """Batch and channels may be split; linear."""
    return batched_images(call, LINEAR, local_size_args=(("input_size", 0),))


@rule(_aten.pixel_shuffle.default, _aten.pixel_unshuffle.default)
def _pixel_shuffle(call: Call) -> Rule | None:
    """``(..., C, H, W)``: the leading dims may be split."""
    return batched(call, [3], passes=LINEAR)


@rule(
    *functional_overloads("grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward")
)
def _grid_sampler(call: Call) -> Rule | None:
    """The batch may be split."""
    # Without a batch the first dim holds the channels.
    is_batch = all(len(shape) > 2 for shape in call.shapes)
    return batched(call, [len(shape) - 1 for shape in call.shapes]) if is_batch else None
