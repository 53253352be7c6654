"""Resizing and sampling of images: ``upsample_bilinear2d``, ``grid_sampler_2d``, ``pixel_shuffle``.

The batch may be split, and for ``upsample_*`` the channels too; dims of space must be whole.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import functional_overloads, rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import batched, batched_images

_aten = torch.ops.aten

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
    # Without a batch the first dim is that of channels.
    is_batch = all(len(shape) > 2 for shape in call.shapes)
    return batched(call, [len(shape) - 1 for shape in call.shapes]) if is_batch else None
