"""Hooks into PyTorch: replace the few of its functions that accept only its own DTensors and meshes.

`install` replaces these functions. Each replacement also accepts DTensors or meshes of this library, and calls
PyTorch's function for all other values. `install` also adds `DTensor` to PyTorch's lists of the tensor types that
optimizers update together.

`follow_torch_logs` has the log ``dtckpt.dtensor`` follow the setting ``TORCH_LOGS="dtensor"``, or
`torch._logging.set_logs`. ``+dtensor`` (debug) shows which way each operator runs, the layouts chosen for it, and each
redistribution; ``dtensor`` (info) shows which operators have no rule. The settings ``all`` and ``distributed`` include
it. The lines go to the handlers of PyTorch's log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from dtckpt.comm.torch_private import (
    RESOLVE_GROUP,
    comparison,
    foreach_types_of_gradients,
    foreach_types_of_optimizers,
    functional_collectives,
    masked_ops,
    to_dlpack,
)
from dtckpt.dtensor.tensor import DTensor, without_memory
from dtckpt.dtensor.torch_compile import keep_from_tracing, traced
from dtckpt.layout.mesh import Mesh

_input_mask = masked_ops._input_mask
_pair: Any = comparison.TensorLikePair
_check_supported = _pair._check_supported

_encode: Any = torch.nn.TransformerEncoder.forward

_add_param_group = torch.optim.Optimizer.add_param_group
_IS_FOR_BOTH = "_is_for_plain_tensors_and_dtensors"
"""Attribute of the steps that `_step_of_both` returns."""

_UNWRAP = "_unwrap_dtensor_for_comparison"
"""PyTorch 2.11 lacks this function, and compares all DTensors by operators; others so compare DTensors in lists."""
_unwrapped: Any = getattr(comparison, _UNWRAP, None)

_flatten_parameters: Any = torch.nn.RNNBase.flatten_parameters

_resolve_group: Any = getattr(functional_collectives, RESOLVE_GROUP)


@wraps(_input_mask)
def _mask_of(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002  (PyTorch's name)
    """Return the mask of functions in ``torch.masked``, which look ``layout`` up in a set of PyTorch's layouts."""
    # Of a tensor that is not sparse, only the shape counts.
    dense = torch.empty(input.shape, device="meta") if isinstance(input, DTensor) else input
    mask: torch.Tensor = _input_mask(dense, *args, **kwargs)
    return mask


def _unwrap_for_comparison(actual: Any, expected: Any) -> tuple[Any, Any]:
    """Let ``torch.testing`` compare DTensors as it does PyTorch's: equal placements and meshes, close components.

    Raises:
        AssertionError: Placements or meshes differ.
        TypeError: Only the first or only the second value is a DTensor.
    """
    are_dtensors = isinstance(actual, DTensor), isinstance(expected, DTensor)
    if not any(are_dtensors):
        return _unwrapped(actual, expected)  # type: ignore[no-any-return]
    if not all(are_dtensors):
        raise TypeError(
            "a DTensor and a plain tensor cannot be compared: take full_tensor() for the whole, to_local() for this "
            "client's part"
        )
    if actual.layout != expected.layout:
        raise AssertionError(f"layouts of DTensors do not match: {actual.layout} != {expected.layout}")
    return actual.components, expected.components


@wraps(_check_supported)
def _check_supported_layout(pair: Any, tensor: torch.Tensor, *, id: Any) -> None:  # noqa: A002  (PyTorch's name)
    """Let ``torch.testing`` compare DTensors in lists and dicts too: by operators, which are collective."""
    if not isinstance(tensor, DTensor):
        _check_supported(pair, tensor, id=id)


@wraps(_resolve_group)
def _resolve_mesh(group: Any, *args: Any, **kwargs: Any) -> Any:
    """Let functional collectives run over a mesh of one axis or over ``(mesh, axis)``, for functions of `local_map`."""
    if isinstance(group, Mesh):
        group = group.get_group()
    elif isinstance(group, tuple) and group and isinstance(group[0], Mesh):
        group = group[0].get_group(*group[1:])
    return _resolve_group(group, *args, **kwargs)


@traced
@wraps(_encode)
def _encode_padded(
    encoder: torch.nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """Encode sequences; without nested tensors if they, their padding or the parameters are DTensors."""
    values = (src, src_key_padding_mask, next(encoder.parameters(), None))
    if src_key_padding_mask is None or not any(isinstance(one, DTensor) for one in values):
        return _encode(encoder, src, mask, src_key_padding_mask, is_causal)  # type: ignore[no-any-return]  # private
    return _encode_without_nesting(encoder, src, mask, src_key_padding_mask, is_causal)


def _encode_without_nesting(
    encoder: torch.nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None,
    padding: torch.Tensor,
    is_causal: bool | None,
) -> torch.Tensor:
    """Return the result of ``TransformerEncoder.forward``, also where PyTorch's has nested tensors between its layers.

    Nested tensors lack the padding, which is zero in the result.
    """
    # Without the attribute ``use_nested_tensor`` PyTorch's function passes the mask to the layers.
    encoded = _encode(SimpleNamespace(layers=encoder.layers, norm=None), src, mask, padding, is_causal)
    padded = padding != 0
    if mask is None and _would_nest(encoder, src, padded):
        encoded = encoded.masked_fill(padded[..., None], 0.0)
    return encoded if encoder.norm is None else encoder.norm(encoded)  # type: ignore[no-any-return]


def _would_nest(encoder: torch.nn.TransformerEncoder, src: torch.Tensor, padded: torch.Tensor) -> bool:
    """Whether PyTorch would make nested tensors of plain sequences: the conditions of its function, on the same values.

    Collective: As `bool` of a DTensor.
    """
    first = encoder.layers[0]
    is_fast = torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)
    if not is_fast or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in (src, *first.parameters())):
        return False
    has_gaps = padded[:, :-1].logical_and(padded[:, 1:].logical_not()).any()
    return not (getattr(encoder, "mask_check", True) and bool(has_gaps))


@wraps(to_dlpack)
def _to_capsule(tensor: torch.Tensor) -> Any:
    """Return the capsule of a plain tensor's memory; for a DTensor, PyTorch would return a capsule without memory."""
    if isinstance(tensor, DTensor):
        raise without_memory("DLPack")
    return to_dlpack(tensor)


@wraps(_flatten_parameters)
def _flatten_plain_parameters(module: torch.nn.RNNBase) -> None:
    """Bring the weights of a recurrent module into one piece of memory, which is for plain tensors alone."""
    if not any(isinstance(weight, DTensor) for weight in module._flat_weights):
        _flatten_parameters(module)


@wraps(_add_param_group)
def _add_parameters(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Add parameters to an optimizer; with the first DTensor, replace the step of its class by `_step_of_both`."""
    _add_param_group(optimizer, param_group)
    kind = type(optimizer)
    if not hasattr(kind.step, _IS_FOR_BOTH) and any(isinstance(one, DTensor) for one in param_group["params"]):
        kind.step = _step_of_both(kind.step)  # type: ignore[method-assign]


def _step_of_both(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of an optimizer's class that `torch.compile` traces for plain tensors alone.

    In a step on DTensors it would trace PyTorch's calls for each parameter, and find nothing to compile.
    """

    @wraps(step)
    def run(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        if any(isinstance(one, DTensor) for one in parameters):
            return _call_untraced(step, optimizer, *args, **kwargs)
        return step(optimizer, *args, **kwargs)

    setattr(run, _IS_FOR_BOTH, True)
    keep_from_tracing([run], with_callees=False)
    return run


def _call_untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def install() -> None:
    """Replace PyTorch's functions, and add DTensors to the types that optimizers update together (foreach)."""
    masked_ops._input_mask = _mask_of
    # Modules that imported the function by name have their own reference to it.
    comparing: tuple[Any, ...] = comparison, sys.modules.get("torch.testing._internal.common_utils")
    for module in comparing:
        if hasattr(module, _UNWRAP):
            setattr(module, _UNWRAP, _unwrap_for_comparison)
    _pair._check_supported = _check_supported_layout
    setattr(functional_collectives, RESOLVE_GROUP, _resolve_mesh)
    torch.nn.TransformerEncoder.forward = _encode_padded  # type: ignore[assignment, method-assign]
    namespaces: tuple[Any, ...] = torch, torch.utils.dlpack
    for namespace in namespaces:
        namespace.to_dlpack = _to_capsule
    torch.nn.RNNBase.flatten_parameters = _flatten_plain_parameters  # type: ignore[assignment, method-assign]
    torch.optim.Optimizer.add_param_group = _add_parameters  # type: ignore[assignment, method-assign]
    foreach_types: tuple[list[Any], ...] = (foreach_types_of_optimizers, foreach_types_of_gradients)
    for types in foreach_types:
        if DTensor not in types:
            types.append(DTensor)


# --- logs ------------------------------------------------------------------------------------------------------


_OURS = logging.getLogger("dtckpt.dtensor")
_TORCHS: Any = logging.getLogger("torch.distributed.tensor")
"""PyTorch sets the level of this logger, among others, by the setting ``dtensor``."""
_LEVELS = [_TORCHS, *map(logging.getLogger, ("torch.distributed", "torch"))]
"""The logger and its parents, whose levels hold if it has none: the settings ``distributed`` and ``all``."""


class _Forwarder(logging.Handler):
    """Passes records to the handlers of PyTorch's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        _TORCHS.handle(record)


_FORWARDER = _Forwarder()


def _followed(set_level: Callable[[int | str], None]) -> Callable[[int | str], None]:
    """Return the method ``setLevel`` of a logger of PyTorch's, after which the log here follows."""

    def set_and_follow(level: int | str) -> None:
        set_level(level)
        _follow()

    return set_and_follow


def _follow() -> None:
    level = next((logger.level for logger in _LEVELS if logger.level != logging.NOTSET), logging.WARNING)
    # PyTorch sets WARNING, then NOTSET, on loggers that are off. A level that the program has set here then stays.
    if level < logging.WARNING:
        _OURS.addHandler(_FORWARDER)
        _OURS.setLevel(level)
    elif _FORWARDER in _OURS.handlers:
        _OURS.removeHandler(_FORWARDER)
        _OURS.setLevel(logging.NOTSET)


def follow_torch_logs() -> None:
    """Have the log of DTensors follow PyTorch's setting, now and whenever it changes."""
    for logger in _LEVELS:
        logger.setLevel = _followed(logger.setLevel)
    _follow()
