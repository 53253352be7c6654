"""Random numbers: ``normal_``, ``uniform_``, ``rand_like``, ``bernoulli``, ``multinomial``, ``poisson``.

An element depends on the key of the call and on its global index, not on the layout: see `dtckpt.dtensor.random`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor import random
from dtckpt.dtensor.operators.call import Call, Operator, run_on_meta, signature_of, tensors_in
from dtckpt.dtensor.operators.operands import to_layouts, unshare, write_into
from dtckpt.dtensor.operators.plans import ReplicationPlan, finish_write
from dtckpt.dtensor.operators.registry import composite, functional_overloads, rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import pointwise
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import RandomParameterError
from dtckpt.layout.layout import Layout

_aten = torch.ops.aten


def refill(
    tensor: Any, kind: str, generator: torch.Generator | None = None, *, known_key: int | None = None, **params: Any
) -> Any:
    """Fill a tensor with random numbers, in its own layout, and return it.

    Collective: At some calls, see `random.agreed_key`. Over the mesh's clients, if the tensor has pending reductions,
    or is a view whose values had to move.

    Args:
        tensor: The DTensor to fill.
        kind: The distribution, see `random.DISTRIBUTIONS`.
        generator: The generator that the key is drawn from; by default torch's CPU generator.
        known_key: The key, if it was drawn before.
        params: Parameters of the distribution; ``p`` may be a tensor of the same shape.
    """
    layout, mesh, shape = tensor._layout, tensor.device_mesh, tuple(tensor.shape)
    key = random.agreed_key(mesh, generator) if known_key is None else known_key
    base = Layout(layout.sharding_specs, mesh) if layout.has_partial else layout
    unshare(tensor)
    components = [torch.empty_like(one) for one in tensor.components] if layout.has_partial else tensor.components
    chance = params.pop("p", None)
    chances: Any = [chance] * len(components)
    if isinstance(chance, DTensor):
        chances = to_layouts([chance], [base])[0].components
    for device, component, local_chance in zip(mesh.local_device_ids(), components, chances, strict=True):
        if local_chance is not None:
            params["p"] = local_chance
        random.fill(kind, component, base.region(device, shape), shape, key, **params)
    if layout.has_partial:
        write_into(DTensor(components, base, shape, tensor.dtype, device=tensor.device), tensor)
    finish_write(tensor)
    return tensor


_IN_PLACE: Mapping[Operator, tuple[str, Mapping[str, str]]] = {
    _aten.bernoulli_.float: ("bernoulli", {"p": "p"}),
    _aten.cauchy_.default: ("cauchy", {"median": "median", "sigma": "sigma"}),
    _aten.exponential_.default: ("exponential", {"lambd": "lambd"}),
    _aten.geometric_.default: ("geometric", {"p": "p"}),
    _aten.log_normal_.default: ("log_normal", {"mean": "mean", "std": "std"}),
    _aten.normal_.default: ("normal", {"mean": "mean", "std": "std"}),
    _aten.random_.default: ("integers", {}),
    _aten.random_.to: ("integers", {"high": "to"}),
    getattr(_aten.random_, "from"): ("integers", {"low": "from", "high": "to"}),
    _aten.uniform_.default: ("uniform", {"low": "from", "high": "to"}),
}
"""By operator: the distribution, and for each of its parameters the name of the operator's argument."""

_LIKE = {"rand_like": "uniform", "randn_like": "normal", "randint_like": "integers"}
"""By name of an operator that returns a new tensor like the operand: the distribution."""


def _register_in_place(func: Operator, kind: str, names: Mapping[str, str]) -> None:
    @composite(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        """All dims may be split: an element depends on the key and on its global index."""
        call = Call(func, args, kwargs)
        return refill(args[0], kind, call["generator"], **{name: call[argument] for name, argument in names.items()})

    packet = getattr(_aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    functional = getattr(packet, func._overloadname, None)
    if functional is not None:

        @composite(functional)
        def make(*args: Any, **kwargs: Any) -> Any:
            """All dims may be split: an element depends on the key and on its global index."""
            return func(torch.empty_like(args[0]), *args[1:], **kwargs)


def _register_like(func: Operator, kind: str) -> None:
    bounds = [argument.name for argument in func._schema.arguments if argument.name in ("low", "high")]
    options = ("dtype", "layout", "device", "pin_memory", "memory_format")

    @composite(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        """All dims may be split: an element depends on the key and on its global index."""
        call = Call(func, args, kwargs)
        tensor = torch.empty_like(args[0], **{name: call[name] for name in options if call[name] is not None})
        # A bound may be a tensor of one element.
        return refill(tensor, kind, kwargs.get("generator"), **{name: int(call[name]) for name in bounds})


for _func, (_kind, _names) in _IN_PLACE.items():
    _register_in_place(_func, _kind, _names)
# By name, as older releases of PyTorch lack the overloads with a generator.
for _name, _kind in _LIKE.items():
    for _func in functional_overloads(_name):
        _register_like(_func, _kind)


@composite(_aten.normal_functional.default)
def _normal(input: Any, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    return torch.empty_like(input).normal_(mean, std, generator=generator)


@composite(_aten.bernoulli_.Tensor)
def _bernoulli_(input: Any, p: Any, *, generator: Any = None) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    chances = p if p.shape == input.shape else p.expand(input.shape)
    return refill(input, "bernoulli", generator, p=chances if chances.is_floating_point() else chances.float())


@composite(_aten.bernoulli.default)
def _bernoulli(input: Any, *, generator: Any = None) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    return refill(torch.empty_like(input), "bernoulli", generator, p=input)


@composite(_aten.bernoulli.Tensor)
def _bernoulli_of(input: Any, p: Any, *, generator: Any = None) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    return _bernoulli_(torch.empty_like(input), p, generator=generator)


@composite(_aten.bernoulli.p)
def _bernoulli_by(input: Any, p: Any, *, generator: Any = None) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    return refill(torch.empty_like(input), "bernoulli", generator, p=p)


@composite(_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor)
def _normal_around(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """Mean, deviation, or both have an element each."""
    if isinstance(std, torch.Tensor):
        _require_all(std >= 0, "normal expects all elements of std >= 0.0")
    like = mean + std if isinstance(std, torch.Tensor) else mean
    return refill(torch.empty_like(like), "normal", generator) * std + mean


def _require_all(are_right: Any, expected: str) -> None:
    """Refuse parameters of which some element is wrong.

    Collective: Over the mesh's clients, unless the components lie on GPUs.

    Args:
        are_right: A DTensor of bools without pending reductions.
        expected: The text of the error.

    Raises:
        RandomParameterError: An element is False, on a CPU; on a GPU, an assertion of the GPU fails later.
    """
    if are_right.is_cuda:
        # The host need not wait, and a graph can capture it. Each client looks at its own elements.
        for component in are_right.components:
            torch_private.assert_async(component.all(), expected)
    elif not are_right.is_meta and not bool(are_right.all()):
        raise RandomParameterError(expected)


# --- random slopes ------------------------------------------------------------------------------------------------


@composite(*functional_overloads("rrelu_with_noise_functional"))
def _leaky(
    input: Any,
    noise: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: Any = False,
    generator: Any = None,
) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    if not training:
        return torch.where(input <= 0, input * ((lower + upper) / 2), input), noise.clone()
    slopes = refill(torch.empty_like(input), "uniform", generator, low=lower, high=upper)
    noise = torch.where(input <= 0, slopes, torch.ones_like(slopes))
    return input * noise, noise


@composite(_aten.rrelu_with_noise.default)
def _leaky_noting(input: Any, noise: Any, *args: Any, **kwargs: Any) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    result, slopes = _leaky(input, noise, *args, **kwargs)
    noise.copy_(slopes)
    return result


@composite(_aten.rrelu_with_noise_.default)
def _leaky_(input: Any, noise: Any, *args: Any, **kwargs: Any) -> Any:
    """All dims may be split: an element depends on the key and on its global index."""
    return input.copy_(_leaky_noting(input, noise, *args, **kwargs))


@rule(_aten.rrelu_with_noise_backward.default)
def _leaky_backward(call: Call) -> Rule | None:
    return pointwise(call.shapes)


# --- by replication: each device draws all numbers, from one seed -------------------------------------------------


def _by_replication(func: Operator) -> Callable[..., Any]:
    """Register an operator by replication, and return the function: every device draws all numbers, from one seed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        """Every device draws all numbers, from one seed."""
        call = Call(func, args, kwargs)
        names = [name for name in signature_of(func).names if name != "generator"]
        key = random.agreed_key(call.tensors[0].device_mesh, call["generator"])

        def local(*local_args: Any) -> Any:
            device = next(tensors_in(local_args)).device
            generator = None if device.type == "meta" else torch.Generator(device).manual_seed(key)
            return func(*local_args, generator=generator)

        return ReplicationPlan(call, local).run([call[name] for name in names], {}, call.tensors)

    return composite(func)(run)


for _func in (
    _aten._sample_dirichlet.default,
    _aten._standard_gamma.default,
    _aten.binomial.default,
    _aten.poisson.default,
):
    _by_replication(_func)

_replicated_multinomial = _by_replication(_aten.multinomial.default)


@composite(_aten.multinomial.default)
def _multinomial(weights: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Without replacement, dims other than the last stay split.

    Each weight draws a time from the exponential distribution with that rate; the earliest come first. A weight is then
    first with a probability in proportion to it.
    """
    if replacement and num_samples > 1:
        return _replicated_multinomial(weights, num_samples, replacement, generator=generator)
    run_on_meta(_aten.multinomial.default, (weights, num_samples, replacement), {}, [weights])
    are_rates = (weights >= 0) & (weights < float("inf"))
    _require_all(are_rates, "probability tensor contains either `inf`, `nan` or element < 0")
    _require_all(weights.sum(-1) > 0, "invalid multinomial distribution (sum of probabilities <= 0)")
    times = refill(torch.empty_like(weights), "exponential", generator)
    return torch.topk(weights / times, num_samples, dim=-1).indices


# --- dropout ---------------------------------------------------------------------------------------------------------


@composite(_aten.native_dropout.default)
def _dropout(input: Any, p: Any, train: Any) -> Any:
    """All dims may be split: the mask is drawn in the input's layout."""
    mask = torch.empty_like(input, dtype=torch.bool)
    if train is False or p == 0:
        return input.clone(), mask.fill_(True)
    refill(mask, "bernoulli", p=1 - p)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


@composite(_aten._fused_dropout.default)
def _fused_dropout(input: Any, p: Any, generator: Any = None) -> Any:
    """As ``native_dropout``, but ``p`` is the chance that an element stays."""
    mask = refill(torch.empty_like(input, dtype=torch.uint8), "bernoulli", generator, p=p)
    return input * mask * (1 / p if p else 0.0), mask


@rule(_aten.native_dropout_backward.default, _aten._masked_scale.default)
def _dropout_backward(call: Call) -> Rule | None:
    """All dims may be split; linear in the gradient."""
    return pointwise(call.shapes, LINEAR)
