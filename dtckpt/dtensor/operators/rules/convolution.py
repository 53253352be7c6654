"""Images: convolutions, pooling (``max_pool2d``), resizing (``upsample_bilinear2d``), ``im2col``, ``grid_sampler_2d``.

Batch and channels may be split (of ``grid_sampler_*`` and ``pixel_shuffle`` the batch); dims of space must be whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import composite, functional_overloads, rule
from dtckpt.dtensor.operators.rule import LINEAR, Dims, Factors, Passes, Rule
from dtckpt.dtensor.operators.rule_builders import batched, batched_images, num_space_dims, result_shapes

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Channels:
    """Factors of a convolution: the batch, the groups of channels, and in each group the input and output channels.

    ::

        images   (batch, groups * inputs, space)
        weight   (groups * outputs, inputs, space)         transposed: (groups * inputs, outputs, space)
        result   (batch, groups * outputs, space)          waits for a sum if ``inputs`` is sharded
    """

    factors: Factors
    batch: tuple[int, ...]
    groups: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, images: Sequence[int], weight: Sequence[int], groups: int, *, is_transposed: bool) -> _Channels | None:
        """Return the factors for shapes; None if these do not fit each other."""
        num_inputs, num_outputs = (weight[0], weight[1] * groups) if is_transposed else (weight[1] * groups, weight[0])
        if len(images) != len(weight) or images[1] != num_inputs or 0 in (*images, *weight):
            return None
        if num_inputs % groups or num_outputs % groups:
            return None
        factors = Factors()

        def factor(size: int) -> tuple[int, ...]:
            # A factor of size 1 would keep the dim from being a single factor, which may be split unevenly.
            return (factors.new(size),) if size > 1 else ()

        batch = (factors.new(images[0]),)
        return cls(factors, batch, factor(groups), factor(num_inputs // groups), factor(num_outputs // groups))

    def images(self, shape: Sequence[int]) -> Dims:
        """Return the dims of the images that go in."""
        return (self.batch, self.groups + self.inputs, *self.factors.dims(shape[2:]))

    def results(self, shape: Sequence[int]) -> Dims:
        """Return the dims of the images that come out."""
        return (self.batch, self.groups + self.outputs, *self.factors.dims(shape[2:]))

    def weight(self, shape: Sequence[int], *, is_transposed: bool) -> Dims:
        space = self.factors.dims(shape[2:])
        return (
            (self.groups + self.inputs, self.outputs, *space)
            if is_transposed
            else (self.groups + self.outputs, self.inputs, *space)
        )

    def rule(
        self, operands: tuple[Dims, ...], result: Dims, *, contracted: tuple[int, ...], passes: Passes, **more: Any
    ) -> Rule:
        splittable = {*self.batch, *self.groups, *self.inputs, *self.outputs}
        return Rule(
            self.factors.sizes,
            operands,
            (result,),
            contracted=dict.fromkeys(contracted, "sum"),
            whole=frozenset(range(len(self.factors.sizes))) - splittable,
            nonempty_pieces=frozenset(splittable),
            passes=passes,
            **more,
        )


@rule(_aten.convolution.default)
def _convolution(call: Call) -> Rule | None:
    """Batch and channels may be split; if input channels are, the result waits for a sum."""
    images, weight, *bias = call.shapes
    is_transposed, groups = call["transposed"], call["groups"]
    channels = _Channels.of(images, weight, groups, is_transposed=is_transposed)
    if channels is None:
        return None
    result = channels.results(result_shapes(call)[0])
    terms: tuple[Dims, ...] = (((channels.groups + channels.outputs),),) if bias else ()
    linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return channels.rule(
        (channels.images(images), channels.weight(weight, is_transposed=is_transposed), *terms),
        result,
        contracted=channels.inputs,
        passes={"sum": linear, "avg": linear},
        counted_once=frozenset({2} if bias else ()),
        local=_with_own_groups(images[1], groups),
    )


def _with_own_groups(num_channels: int, groups: int) -> Any:
    """Return the operator with the number of groups that a component has; None if there is one group."""
    if groups == 1:
        return None

    def run(images: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        return _aten.convolution.default(images, weight, *args[:-1], math.ceil(groups * images.shape[1] / num_channels))

    return run


@composite(_aten.convolution_backward.default)
def _convolution_backward(grad_output, input, weight, bias_sizes, *args):  # type: ignore[no-untyped-def]  # noqa: ARG001  (a signature of PyTorch)
    """Each gradient by itself, as the three wait for different reductions."""
    *options, output_mask = args
    if sum(output_mask) < 2 and not output_mask[2]:
        return NotImplemented
    gradients: list[torch.Tensor | None] = [None, None, None]
    for number in range(2):
        if output_mask[number]:
            mask = [number == 0, number == 1, False]
            gradients[number] = _aten.convolution_backward.default(grad_output, input, weight, None, *options, mask)[
                number
            ]
    if output_mask[2]:
        gradients[2] = grad_output.sum([dim for dim in range(grad_output.ndim) if dim != 1])
    return tuple(gradients)


@rule(_aten.convolution_backward.default)
def _one_gradient(call: Call) -> Rule | None:
    """One gradient: for the images it is a sum over output channels, for the weight a sum over the batch."""
    grad, images, weight = call.shapes
    is_transposed, groups = call["transposed"], call["groups"]
    channels = _Channels.of(images, weight, groups, is_transposed=is_transposed)
    is_of_images, is_of_weight, is_of_bias = call["output_mask"]
    if channels is None or is_of_bias or is_of_images == is_of_weight:
        return None
    operands = (
        channels.results(grad),
        channels.images(images),
        channels.weight(weight, is_transposed=is_transposed),
    )
    skipped = 1 if is_of_images else 2
    linear = ((0,), (3 - skipped,))
    return channels.rule(
        operands,
        operands[skipped],
        contracted=channels.outputs if is_of_images else channels.batch,
        passes={"sum": linear, "avg": linear},
        shape_only_operands=frozenset({skipped}),
        local=_gradient_with_own_groups(images[1], groups),
    )


def _gradient_with_own_groups(num_channels: int, groups: int) -> Any:
    """As `_with_own_groups`, for the gradient."""
    if groups == 1:
        return None

    def run(grad: torch.Tensor, images: torch.Tensor, *args: Any) -> Any:
        own = math.ceil(groups * images.shape[1] / num_channels)
        return _aten.convolution_backward.default(grad, images, *args[:-2], own, args[-1])

    return run


@rule(_aten.im2col.default, _aten.col2im.default)
def _columns(call: Call) -> Rule | None:
    """``fold`` and ``unfold``: the batch may be split; linear."""
    (shape,) = call.shapes
    # Columns have as many dims with a batch as images have without one.
    is_batch = len(shape) == (4 if call.func is _aten.im2col.default else 3)
    return batched(call, [len(shape) - 1], passes=LINEAR) if is_batch else None


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
