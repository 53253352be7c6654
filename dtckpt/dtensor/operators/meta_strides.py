"""Strides that PyTorch's meta kernels get wrong: they follow another device, or a kernel that works in another way.

`dtckpt.dtensor.operators.call.run_on_meta` runs meta kernels for the metadata of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtckpt.comm.torch_private import suggest_memory_format

_aten = torch.ops.aten

DEVICE_DEPENDENT = frozenset(
    getattr(_aten, name).default
    for name in (
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "convolution",
        "pixel_shuffle",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad2d",
        "replication_pad3d",
    )
)
"""Operators the strides of whose results depend on the device, so that a fake tensor has to tell them."""


def _as_pair(result: torch.Tensor, one: torch.Tensor, other: Any, *_: Any) -> torch.Tensor:
    """Return a result of an operator on the elements of two tensors."""
    del result
    return torch.eq(one, other)


def _as_image(result: torch.Tensor, image: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a tensor of the result's shape in the memory format of an image: contiguous, or with channels last."""
    return torch.empty(result.shape, memory_format=suggest_memory_format(image), device="meta")


def _as_normalized(result: torch.Tensor, image: torch.Tensor, *others: Any) -> torch.Tensor:
    """As `_as_image`, but dims of size 1 may have any strides where the image lies in one piece."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.ndim)
    if channels_last is None or image.is_contiguous() or not image.is_contiguous(memory_format=channels_last):
        return _as_image(result, image, *others)
    return torch.empty(result.shape, memory_format=channels_last, device="meta")


def _contiguous(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(result.shape, device="meta")


def _as_clone(result: torch.Tensor, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a result of an operator that writes to a clone of its first argument."""
    del result
    return tensor.clone()


def _as_rolled(result: torch.Tensor, tensor: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Return the parts of each dim joined by ``cat``, as the kernel joins them; ``cat`` keeps a memory format."""
    if not dims or not tensor.numel():
        return result
    for shift, dim in zip(shifts, dims, strict=True):
        first, last = tensor.tensor_split([-shift % tensor.shape[dim]], dim)
        tensor = torch.cat([last, first], dim)
    return tensor


def _as_indexed(result: torch.Tensor, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the result of the kernel's loop over the indices and the tensor, in which an indexed dim has stride 0.

    All pointwise operators use this loop. More than two indices hardly ever have different strides.
    """
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    chosen = [index for index in indices if index is not None]
    if any(index.dtype in {torch.bool, torch.uint8} for index in chosen):
        return result
    others = [dim for dim in range(tensor.ndim) if dim not in dims]
    before = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    shape = torch.broadcast_shapes(*(index.shape for index in chosen))  # type: ignore[no-untyped-call]
    loops = [index.expand(shape).reshape([1] * before + [*shape] + [1] * (len(others) - before)) for index in chosen]
    steps = [tensor.stride(dim) for dim in others]
    steps[before:before] = [0] * len(shape)
    source = torch.empty_strided(result.shape, steps, dtype=torch.long, device="meta")
    return torch.add(source, *loops) if len(loops) == 1 else torch.addcmul(source, *loops[:2])


_CORRECTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((_aten.copysign.Tensor, _aten.floor_divide.default), _as_pair),
    **dict.fromkeys((_aten.div.Tensor_mode, _aten.native_dropout_backward.default), _as_pair),
    **dict.fromkeys(
        (
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
            _aten._batch_norm_with_update.default,
            _aten.native_batch_norm_backward.default,
            _aten.batch_norm_backward.default,
        ),
        _as_normalized,
    ),
    **dict.fromkeys(
        (
            _aten.max_unpool2d.default,
            _aten.max_unpool3d.default,
            _aten.channel_shuffle.default,
            _aten.reflection_pad3d.default,
            _aten.replication_pad3d.default,
        ),
        _as_image,
    ),
    **dict.fromkeys((_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor), _as_clone),
    _aten.index.Tensor: _as_indexed,
    _aten.roll.default: _as_rolled,
    **dict.fromkeys((_aten.nll_loss2d_forward.default, _aten.rrelu_with_noise.default), _contiguous),
}
"""By operator, a function of the first result and the arguments; it returns a tensor with the true strides."""


def correct(func: Any, results: Any, args: Sequence[Any]) -> Any:
    """Return an operator's results on meta tensors with the strides that it gives on others.

    Args:
        func: The operator.
        results: Results of its meta kernel: one tensor, or several.
        args: Its positional arguments, with meta tensors.
    """
    correction = _CORRECTIONS.get(func)
    if correction is None:
        return results
    is_one = isinstance(results, torch.Tensor)
    first = results if is_one else results[0]
    stride = correction(first, *args).stride()
    corrected = torch.empty_strided(first.shape, stride, dtype=first.dtype, device="meta")
    return corrected if is_one else (corrected, *results[1:])
