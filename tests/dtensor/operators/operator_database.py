"""Run every operator of PyTorch's OpInfo database on DTensors, and compare the results with plain tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from support.shares import share
from torch.utils._pytree import tree_flatten

from .arrangements import ARRANGEMENTS, Arrangement, Placed, Plain
from .operator_samples import SEED, UNDETERMINED, Sample, operators, samples_of, seed_everything

FORWARD, BACKWARD, IN_PLACE, OUT = "forward", "backward", "in place", "out"
DIRECTIONS = (FORWARD, BACKWARD, IN_PLACE, OUT)
RIGHT, ERROR = "right", "error"
MAX_TEXT = 400
RELATIVE = {
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-7,
    torch.complex32: 1e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-7,
}
"""Relative tolerance, by dtype: float32 is added up in another order, by operators that add up twice."""


@dataclass(frozen=True)
class Scale:
    """How much of an operator is tried.

    Args:
        samples: How many of an operator's samples.
        arrangements: In how many arrangements the first sample is tried, the second, and so on; the last number counts
            for all that follow.
        share: How many trials of each form of an operator a run makes, each day others; None makes all.
    """

    samples: int
    arrangements: tuple[int, ...]
    share: int | None = None

    def trials(
        self, form: Form, num_samples: int, among: Sequence[Arrangement], name: str
    ) -> Sequence[tuple[int, Arrangement]]:
        """Return the samples of a form and the arrangement that each is tried in."""
        # A method is the same operator with another spelling: one sample is enough.
        numbers = range(min(num_samples, 1) if form.name == "method" else num_samples)
        every = [(number, each) for number in numbers for each in self._arrangements(number, among, name, form)]
        return every if self.share is None else share(every, self.share, f"{name} {form.name} {form.direction}")

    def _arrangements(self, number: int, among: Sequence[Arrangement], name: str, form: Form) -> Sequence[Arrangement]:
        """Return the arrangements of a sample; operators and samples begin at different ones."""
        count = self.arrangements[min(number, len(self.arrangements) - 1)]
        count = count if form.direction in (FORWARD, BACKWARD) else (count + 1) // 2
        start = sum(name.encode()) + 3 * number
        return [among[(start + index) % len(among)] for index in range(min(count, len(among)))]


FULL = Scale(6, (len(ARRANGEMENTS), 5, 3))
QUICK = replace(FULL, share=3)


@dataclass(frozen=True)
class Outcome:
    """What became of one call in one arrangement."""

    operator: str
    direction: str
    form: str
    sample: int
    arrangement: str
    verdict: str
    """``right``, ``wrong value``, ``wrong shape``, ``wrong strides``, ``wrong dtype``, ``wrong kind`` or ``error``."""
    text: str = ""


class WrongResult(Exception):
    """A result is not what plain tensors give."""

    def __init__(self, verdict: str, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True)
class Form:
    """One way of calling an operator."""

    direction: str
    name: str
    call: Callable[..., Any]
    run: Callable[[Form, Sample, Arrangement, Any], Any]
    """Calls it on the sample as an arrangement has it; the last argument is what `extra_input_of` makes."""


@dataclass(frozen=True)
class Expected:
    """What plain tensors give."""

    results: Any
    given: Any
    """What a trial is given beside the sample."""
    is_determined: bool


# --- ways of calling ----------------------------------------------------------------------------------------------


def forms_of(op: Any) -> Iterator[Form]:
    """Return the ways in which an operator can be called."""
    yield Form(FORWARD, "function", op.op, run_forward)
    if op.method_variant:
        yield Form(FORWARD, "method", op.method_variant, run_forward)
    if op.supports_autograd:
        yield Form(BACKWARD, "function", op.op, run_backward)
    if op.inplace_variant:
        yield Form(IN_PLACE, "in place", op.inplace_variant, run_in_place)
    if op.supports_out:
        yield Form(OUT, "out", op.op, run_out)


def run_forward(form: Form, sample: Sample, arrangement: Arrangement, given: Any) -> Any:
    first, args, kwargs = sample.with_tensors(arrangement.distribute)
    with torch.no_grad():
        return form.call(first, *args, **kwargs)


def run_in_place(form: Form, sample: Sample, arrangement: Arrangement, given: Any) -> Any:
    first, args, kwargs = sample.with_tensors(arrangement.distribute)
    with torch.no_grad():
        return form.call(first, *args, **kwargs), first


def run_out(form: Form, sample: Sample, arrangement: Arrangement, given: Any) -> Any:
    """``given`` is the tree of results; tensors that are written to have other values."""
    first, args, kwargs = sample.with_tensors(arrangement.distribute)
    leaves, spec = tree_flatten(given)
    outs = spec.unflatten([arrangement.distribute(torch.ones_like(leaf), place) for place, leaf in enumerate(leaves)])
    with torch.no_grad():
        form.call(first, *args, **kwargs, out=outs)
    return outs


def run_backward(form: Form, sample: Sample, arrangement: Arrangement, given: Any) -> Any:
    """``given`` are the gradients of the differentiable results."""
    inputs = []

    def make(tensor: torch.Tensor, position: int) -> torch.Tensor:
        made = arrangement.distribute(tensor, position)
        if tensor.requires_grad:
            inputs.append(made.requires_grad_())
        return made

    first, args, kwargs = sample.with_tensors(make)
    outputs = differentiable(sample.finish(form.call(first, *args, **kwargs)))
    gradients = [arrangement.distribute(each, position) for position, each in enumerate(given)]
    return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def differentiable(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def extra_input_of(form: Form, sample: Sample) -> Any:
    """Return what a trial is given beside the sample: gradients to begin with, or results as templates."""
    first, args, kwargs = sample.with_tensors(
        lambda tensor, _: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )
    if form.direction == BACKWARD:
        outputs = differentiable(sample.finish(form.call(first, *args, **kwargs)))
        return [torch.randn_like(output.detach()) for output in outputs]
    with torch.no_grad():
        return form.call(first, *args, **kwargs) if form.direction == OUT else None


# --- trials -------------------------------------------------------------------------------------------------------


def outcomes_of(
    name: str, scale: Scale, directions: Sequence[str] = DIRECTIONS, among: Sequence[Arrangement] = ARRANGEMENTS
) -> Iterator[Outcome]:
    """Try one operator."""
    op = operators()[name]
    forms = [form for form in forms_of(op) if form.direction in directions]
    samples = samples_of(op, scale.samples)
    for form in forms:
        for number, trials in groupby(scale.trials(form, len(samples), among, name), itemgetter(0)):
            expected = reference(name, form, samples[number])
            for _, arrangement in trials if expected is not None else ():
                verdict, text = verdict_of(form, samples[number], arrangement, expected)
                yield Outcome(name, form.direction, form.name, number, arrangement.name, verdict, text)


def reference(name: str, form: Form, sample: Sample) -> Expected | None:
    """Return what plain tensors give; None if this form of the operator does not take the sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seed_everything(SEED)
            given = extra_input_of(form, sample)
            if form.direction == BACKWARD and not given:
                return None
            results = run(form, sample, Plain(), given, seed=SEED)
        except Exception:
            return None
    return Expected(results, given, is_determined(name))


@cache
def is_determined(name: str) -> bool:
    """Whether the arguments determine the results: all elements are set, and none is drawn."""
    form = next(forms_of(operators()[name]))
    for sample in samples_of(operators()[name], FULL.samples):
        results = [reference_results(form, sample, seed) for seed in (1, 2, 3)]
        try:
            compare(results[1:], results[:1] * 2, Plain())
        except WrongResult:
            return False
    return name not in UNDETERMINED


def reference_results(form: Form, sample: Sample, seed: int) -> Any:
    """Return what plain tensors give, or nothing if they give an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(form, sample, Plain(), None, seed)
    except Exception:
        return None


def run(form: Form, sample: Sample, arrangement: Arrangement, given: Any, seed: int) -> Any:
    """Call an operator in a form, with all generators seeded; some entries of the database seed them once more."""
    seed_everything(seed)
    original = torch.manual_seed
    with mock.patch.object(torch, "manual_seed", lambda inner: original(inner + seed)):
        return form.run(form, sample, arrangement, given)


def verdict_of(form: Form, sample: Sample, arrangement: Arrangement, expected: Expected) -> tuple[str, str]:
    """Return what became of a call, and why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = run(form, sample, arrangement, expected.given, SEED)
            compare(got, expected.results, arrangement, by_value=expected.is_determined)
    except WrongResult as wrong:
        return wrong.verdict, str(wrong)
    except Exception as error:
        return ERROR, f"{type(error).__name__}: {error}"[:MAX_TEXT]
    return RIGHT, ""


# --- comparing ----------------------------------------------------------------------------------------------------


def compare(got: Any, expected: Any, arrangement: Arrangement, *, by_value: bool = True) -> None:
    """Raise `WrongResult` if results differ, beyond the order in which numbers are added up."""
    leaves, wanted = tree_flatten(got)[0], tree_flatten(expected)[0]
    if len(leaves) != len(wanted):
        raise WrongResult("wrong kind", f"{len(leaves)} results, expected {len(wanted)}")
    for place, (leaf, want) in enumerate(zip(leaves, wanted, strict=True)):
        if isinstance(want, torch.Tensor):
            _compare_tensors(leaf, want, arrangement, f"result {place}", by_value=by_value)
        elif type(leaf) is not type(want):
            raise WrongResult("wrong kind", f"result {place} is {_kind(leaf)}, expected {_kind(want)}")
        elif by_value and not _are_equal(leaf, want):
            raise WrongResult("wrong value", f"result {place} is {leaf!r}, expected {want!r}")


def _compare_tensors(leaf: Any, want: torch.Tensor, arrangement: Arrangement, what: str, *, by_value: bool) -> None:
    if not isinstance(leaf, torch.Tensor):
        raise WrongResult("wrong kind", f"{what} is {_kind(leaf)}, expected {_kind(want)}")
    try:
        whole = arrangement.whole(leaf.detach())
    except TypeError as error:
        raise WrongResult("wrong kind", f"{what}: {error}") from None
    if whole.shape != want.shape:
        raise WrongResult("wrong shape", f"{what} is of {tuple(whole.shape)}, expected {tuple(want.shape)}")
    if whole.dtype != want.dtype:
        raise WrongResult("wrong dtype", f"{what} is of {whole.dtype}, expected {want.dtype}")
    if by_value:
        _compare_values(whole, want.detach(), what)
    if isinstance(arrangement, Placed) and want.layout is torch.strided and want.numel():
        got, wanted = _memory(leaf), _memory(want)
        if got != wanted:
            raise WrongResult("wrong strides", f"{what} has strides and offset {got}, expected {wanted}")


def _memory(tensor: torch.Tensor) -> tuple[list[int | None], int]:
    """Return a tensor's strides, without strides of dims of size 1, which do not count, and its storage offset."""
    strides = [step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return strides, tensor.storage_offset()


def _compare_values(whole: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if want.layout is not torch.strided:
        whole, want = (each if each.layout is torch.strided else each.to_dense() for each in (whole, want))
    relative = RELATIVE.get(want.dtype, 0.0)
    # Sums are as exact as their largest term, so the tolerance of all elements goes by the largest one.
    finite = want[want.isfinite()] if relative else want.new_empty(0)
    largest = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    try:
        torch.testing.assert_close(whole, want, rtol=relative, atol=relative / 5 * largest, equal_nan=True)
    except AssertionError as error:
        raise WrongResult("wrong value", f"{what}: " + " ".join(str(error).split())[:MAX_TEXT]) from None


def _are_equal(leaf: Any, want: Any) -> bool:
    if isinstance(want, float):
        return math.isclose(leaf, want, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(leaf) and math.isnan(want))
    return bool(leaf == want)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
