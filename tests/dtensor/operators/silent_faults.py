"""Calls that another runtime computes wrongly without an error, on a mesh that may span several clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import dtckpt
from dtckpt import Mesh, Partial, Placement, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import DTensor, distribute_tensor, init_device_mesh

S0, S1, WHOLE, SUM = Shard(0), Shard(1), Replicate(), Partial("sum")
DEVICES = 4


def line() -> Mesh:
    """Return a mesh of four devices: of this process, or of four clients."""
    return init_device_mesh("cpu", (DEVICES,)) if dtckpt.num_clients() > 1 else abstract_mesh({"x": DEVICES})


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Call:
    """A call, its arguments, and where they lie.

    Args:
        name: Name in reports.
        function: Takes the tensors.
        tensors: Plain tensors; gradients of floating-point tensors are compared if ``has_gradient``.
        placements: Of each tensor, on a mesh of one axis.
        has_gradient: Whether there is a gradient to compare.
    """

    name: str
    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    placements: tuple[Placement, ...]
    has_gradient: bool = True


def results_of(call: Call, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the result and the gradients of a call."""
    result = call.function(*tensors)
    if not call.has_gradient:
        return [result]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    weights = numbers(*result.shape, seed=9)
    if isinstance(result, DTensor):
        weights = distribute_tensor(weights, result.device_mesh, [Replicate()])
    return [result, *torch.autograd.grad(result, inputs, weights, allow_unused=True)]


def faults_of(call: Call) -> list[str]:
    """Return in what a call on DTensors differs from the same on plain tensors."""

    def ready(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.requires_grad_(call.has_gradient and tensor.is_floating_point())

    wanted = results_of(call, [ready(tensor.clone()) for tensor in call.tensors])
    mesh = line()
    placed = zip(call.tensors, call.placements, strict=True)
    got = results_of(
        call, [ready(distribute_tensor(tensor.clone(), mesh, [placement])) for tensor, placement in placed]
    )
    return [
        f"{call.name}, result {place}: got {one}, expected {want}"
        for place, (one, want) in enumerate(zip(map(plain, got), map(plain, wanted), strict=True))
        if not are_equal(one, want)
    ]


def plain(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def are_equal(one: Any, want: Any) -> bool:
    if want is None:
        return one is None
    if not isinstance(want, torch.Tensor):
        return type(one) is type(want) and abs(one - want) < 1e-4
    same = isinstance(one, torch.Tensor) and one.shape == want.shape and one.dtype == want.dtype
    return same and torch.allclose(one, want.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)


# --- the calls ----------------------------------------------------------------------------------------------------

LOSSES = {
    "mse": functional.mse_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "bce": lambda one, other: functional.binary_cross_entropy(one.sigmoid(), other.sigmoid()),
    "bce with logits": lambda one, other: functional.binary_cross_entropy_with_logits(one, other.sigmoid()),
    "soft margin": lambda one, other: functional.soft_margin_loss(one, other.detach().sign()),
    "l1": functional.l1_loss,
    "poisson": lambda one, other: functional.poisson_nll_loss(one, other.exp()),
}
"""Means over uneven shards, some of them empty."""

CONVOLUTIONS = {
    "conv1d": (functional.conv1d, numbers(2, 3, 8), numbers(4, 3, 3, seed=2)),
    "conv2d": (functional.conv2d, numbers(2, 3, 6, 8), numbers(4, 3, 3, 3, seed=2)),
    "conv3d": (functional.conv3d, numbers(2, 3, 5, 6, 7), numbers(4, 3, 3, 3, 3, seed=2)),
    "conv_transpose1d": (functional.conv_transpose1d, numbers(2, 3, 8), numbers(3, 4, 3, seed=2)),
    "conv_transpose2d": (functional.conv_transpose2d, numbers(2, 3, 6, 8), numbers(3, 4, 3, 3, seed=2)),
}


def losses() -> list[Call]:
    return [
        Call(f"{name} of {rows}", function, (numbers(rows, 3), numbers(rows, 3, seed=2)), (placement, placement))
        for name, function in LOSSES.items()
        for rows in (2, 5)
        for placement in (S0, S1)
    ]


def convolutions() -> list[Call]:
    calls = []
    for name, (function, inputs, weight) in CONVOLUTIONS.items():
        bias = numbers(4, seed=3)
        for label, placements in {
            "weight sharded": (WHOLE, S0, WHOLE),
            "batch sharded": (S0, WHOLE, WHOLE),
            "width sharded": (Shard(inputs.ndim - 1), WHOLE, WHOLE),
            "inputs partial": (SUM, WHOLE, WHOLE),
            "all partial": (SUM, SUM, SUM),
        }.items():
            calls.append(Call(f"{name}, {label}", function, (inputs, weight, bias), placements))
            calls.append(Call(f"{name}, {label}, no bias", function, (inputs, weight), placements[:2]))
    return calls


def matmuls() -> list[Call]:
    vector, matrix = numbers(5), numbers(5, 6, seed=2)
    calls = []
    for one in (S0, WHOLE, SUM):
        for other in (S0, S1, WHOLE, SUM):
            calls.append(Call(f"vector {one} @ matrix {other}", torch.matmul, (vector, matrix), (one, other)))
            calls.append(Call(f"matrix {other} @ vector {one}", torch.matmul, (matrix.T, vector), (other, one)))
    return calls


def quantiles() -> list[Call]:
    return [
        Call(f"{name} of {placement}, dim {dim}", make(dim), (numbers(5, 6),), (placement,))
        for placement in (S0, S1, WHOLE, SUM)
        for dim in (None, 0, 1)
        for name, make in {
            "quantile": lambda dim: lambda values: torch.quantile(values, 0.4, dim),
            "nanquantile": lambda dim: lambda values: torch.nanquantile(values, 0.4, dim),
        }.items()
    ]


def squeezed(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    assert copy.squeeze_(0) is copy
    return copy


def in_place() -> list[Call]:
    return [
        *(Call(f"squeeze_ of {each}", squeezed, (numbers(1, 5),), (each,)) for each in (S0, S1, WHOLE, SUM)),
        *(
            Call(f"fill_ of {each}", lambda x: x.clone().fill_(42), (numbers(5, 3),), (each,), False)
            for each in (S0, WHOLE, SUM)
        ),
        *(Call(f"relu_ of {each}", lambda x: x.clone().relu_(), (numbers(5, 3),), (each,)) for each in (S0, SUM)),
        *(
            Call(f"{name} of {each}", function, (numbers(5, 3),), (each,))
            for each in (S0, WHOLE, SUM)
            for name, function in {
                "scalar add": lambda x: x + 3,
                "scalar add_": lambda x: x.clone().add_(3),
                "scalar times": lambda x: 2 * x - 1,
            }.items()
        ),
    ]


def histograms() -> list[Call]:
    return [
        Call(
            f"histc of {bins} bins, {each}",
            lambda x, bins=bins: torch.histc(x, bins, -2, 2),
            (numbers(7),),
            (each,),
            False,
        )
        for each in (WHOLE, S0, SUM)
        for bins in (100, 4, 10)
    ]


def scatters() -> list[Call]:
    index = torch.randint(5, (5, 3), generator=torch.Generator().manual_seed(4))
    unique = torch.stack([torch.tensor([3, 0, 4, 1, 2]).roll(column) for column in range(3)], 1)
    calls = []
    for each in (S0, S1, WHOLE, SUM):
        tensors = (numbers(5, 3), numbers(5, 3, seed=2))
        calls += [
            Call(
                f"scatter_add, {each}",
                lambda x, src, at: x.scatter_add(0, at, src),
                (*tensors, index),
                (each, each, kept(each)),
            ),
            Call(
                f"scatter, {each}",
                lambda x, src, at: x.scatter(0, at, src),
                (*tensors, unique),
                (each, each, kept(each)),
            ),
            Call(f"gather, {each}", lambda x, at: x.gather(0, at), (tensors[0], index), (each, kept(each))),
        ]
    return calls


def kept(placement: Placement) -> Placement:
    """Return where an index lies that goes with a tensor."""
    return placement if isinstance(placement, Shard) else WHOLE


def ties() -> list[Call]:
    row = torch.tensor([1.0, 7.0, 2.0, 7.0, 0.0])
    return [
        Call(f"{name} of ties, {each}", function, (row,), (each,))
        for each in (S0, WHOLE, SUM)
        for name, function in {
            "amax": lambda x: x.amax(0),
            "amin": lambda x: (-x).amin(0),
            "max": torch.max,
        }.items()
    ]


def attention() -> list[Call]:
    def attend(inputs: torch.Tensor, project: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        mixed, _ = functional.multi_head_attention_forward(
            inputs, inputs, inputs, 6, 2, project, None, None, None, False, 0.0, out, None, need_weights=False
        )
        return mixed

    def cosine(one: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cosine_embedding_loss(one, other, target)

    tensors = (numbers(5, 3, 6), numbers(18, 6, seed=2), numbers(6, 6, seed=3))
    pair = (numbers(3, 8), numbers(3, 8, seed=2), torch.tensor([1, -1, 1]))
    return [
        *(
            Call(f"multi head attention, inputs {each}, weights {weights}", attend, tensors, (each, weights, weights))
            for each in (S0, S1, Shard(2), SUM, WHOLE)
            for weights in (S0, S1, WHOLE)
        ),
        *(
            Call(f"cosine embedding, {each}", cosine, pair, (each, each, kept_row(each)))
            for each in (S0, S1, SUM, WHOLE)
        ),
    ]


def kept_row(placement: Placement) -> Placement:
    return S0 if placement == S0 else WHOLE


def numbers_out() -> list[Call]:
    tensors = {"five rows": numbers(5, 3), "empty shards": numbers(2, 3)}
    functions = {
        "item of a sum": lambda x: x.sum().item(),
        "float of a norm": lambda x: float(x.norm()),
        "bool of any": lambda x: bool((x > 0.5).any()),
        "bool of all": lambda x: bool((x > -9).all()),
        "item of max": lambda x: x.max().item(),
        "int of a count": lambda x: int((x > 0).sum()),
        "item of mean": lambda x: x.mean().item(),
        "equal": lambda x: torch.equal(x, x + 0.0),
        "unequal": lambda x: torch.equal(x, x + (x == x.max())),
        "allclose": lambda x: torch.allclose(x, x + 1e-9),
        "tolist": lambda x: sum(x.sum(1).tolist()),
    }
    return [
        Call(f"{name}, {label}, {each}", function, (tensor,), (each,), False)
        for name, function in functions.items()
        for label, tensor in tensors.items()
        for each in (S0, S1, SUM, WHOLE)
    ]


def empty_shards() -> list[Call]:
    functions = {
        "max": torch.max,
        "min": torch.min,
        "amax": lambda x: x.amax(0),
        "amin": lambda x: x.amin(0),
        "max of a dim": lambda x: x.max(0).values,
        "median of a dim": lambda x: x.median(0).values,
        "logsumexp": lambda x: x.logsumexp(0),
        "softmax": lambda x: x.softmax(0),
        "mean": lambda x: x.mean(0),
        "var": lambda x: x.var(0),
        "cumsum": lambda x: x.cumsum(0),
        "prod": lambda x: x.prod(0),
    }
    places = {"argmax": torch.argmax, "argmin": torch.argmin}
    places |= {"argmax of a dim": lambda x: x.argmax(0), "index of max": lambda x: x.max(0).indices}
    return [
        Call(f"{name} of {shape}, {each}", function, (numbers(*shape),), (each,), name in functions)
        for name, function in (functions | places).items()
        for shape in ((2,), (2, 2), (5, 1))
        for each in (S0, Shard(len(shape) - 1), SUM)
    ]


def views() -> list[Call]:
    functions = {
        "flatten": lambda x: x.flatten(),
        "reshape": lambda x: x.reshape(3, 10),
        "unflatten": lambda x: x.unflatten(1, (2, 3)),
        "unbind": lambda x: torch.stack([row * 2 for row in x.unbind(0)], 1),
        "negative step": lambda x: x.flip(0)[1::2],
        "masked": lambda x: x[x > 0] * 2,
        "index": lambda x: x[torch.tensor([3, 0, 3])],
        "nonzero": lambda x: x * (x > 0).nonzero().sum(),
        "tril": lambda x: x.tril(),
        "pad": lambda x: functional.pad(x, (1, 2, 2, 1)),
        "roll": lambda x: x.roll(2, 0),
    }
    return [
        Call(f"{name}, {each}", function, (numbers(5, 6),), (each,))
        for name, function in functions.items()
        for each in (S0, S1, SUM, WHOLE)
    ]


def conjugates() -> list[Call]:
    """What PyTorch keeps as a mark on a tensor, and works out later, or forgets."""
    functions = {
        "conj": lambda x: x.conj().resolve_conj(),
        "times its conj": lambda x: x * x.conj(),
        "sum of conj": lambda x: x.conj().sum(),
        "exp of conj": lambda x: x.conj().exp(),
        "imag of conj": lambda x: x.conj().imag + 0,
        "adjoint product": lambda x: x.mH @ x,
        "cat with conj": lambda x: torch.cat([x.conj(), x]),
        "polar": lambda x: torch.polar(x.abs(), x.angle()) * 2,
    }
    values = torch.complex(numbers(5, 3), numbers(5, 3, seed=2))
    return [
        Call(f"{name}, {each}", function, (values,), (each,), False)
        for name, function in functions.items()
        for each in (S0, S1, SUM, WHOLE)
    ] + [
        Call(
            f"polar with gradients, {each}",
            lambda x, y: torch.polar(x, y).real,
            (numbers(5, 3), numbers(5, 3)),
            (each, each),
        )
        for each in (S0, S1, SUM, WHOLE)
    ]


GROUPS: dict[str, Callable[[], list[Call]]] = {
    each.__name__: each
    for each in (
        losses,
        convolutions,
        matmuls,
        quantiles,
        in_place,
        histograms,
        scatters,
        ties,
        attention,
        numbers_out,
        empty_shards,
        views,
        conjugates,
    )
}


def faults_of_group(name: str) -> list[str]:
    """Return the faults in a group of calls, in all clients' order of the calls."""
    found = []
    for call in GROUPS[name]():
        try:
            found += faults_of(call)
        except Exception as error:
            found.append(f"{call.name}: {type(error).__name__}: {error}")
    return found
