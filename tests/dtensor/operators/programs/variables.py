"""The variables of a random program: its inputs with random values and layouts, and what to take for an operand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .program import Input
from .runner import namespace, tensors_of

MAX_NUMEL = 200
MAX_INPUTS = 6
FLOATS = ("float64", "float64", "float64", "float32", "float32")
OTHERS = ("int64", "int64", "int32", "bool", "complex64", "complex128", "uint8")
KINDS = {
    "float64": "f", "float32": "f", "bfloat16": "f", "float16": "f", "complex64": "c", "complex128": "c", "bool": "b",
}  # fmt: skip
"""Kind of each dtype; integers are the rest."""


class Unfit(Exception):
    """Raised if there is nothing to put for a word of a template."""


def kind_of(dtype: torch.dtype) -> str:
    return KINDS.get(name_of(dtype), "i")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Variables:
    """The variables of a program that is being drawn.

    Args:
        rng: Decides everything.
        axes: The mesh.
    """

    def __init__(self, rng: random.Random, axes: dict[str, int]) -> None:
        self.rng, self.axes = rng, axes
        self.is_exact = rng.random() < 0.6
        self.can_be_pending = rng.random() < 0.7
        self.gradient_share = rng.choice([0.0, 0.6])
        self.inputs: list[Input] = []
        self.variables: dict[str, Any] = namespace()

    def input(self, shape: Sequence[int], dtype: str, values: Sequence[complex] | None = None) -> str:
        """Add an input; return its name."""
        if len(self.inputs) >= MAX_INPUTS or math.prod(shape) > MAX_NUMEL:
            raise Unfit
        rng, name, kind = self.rng, f"t{len(self.inputs)}", KINDS.get(dtype, "i")
        if values is None:
            values = [self._value(kind, dtype) for _ in range(math.prod(shape))]
        specs: list[list[str]] = [[] for _ in shape]
        waiting: list[tuple[str, str]] = []
        reductions = self._reductions(dtype)
        for axis in rng.sample(list(self.axes), len(self.axes)):
            way = rng.random()
            if way < 0.45 and shape:
                rng.choice(specs).append(axis)
            elif way > 0.7 and self.can_be_pending:
                waiting.append((axis, rng.choice(reductions)))
        # A third is no exact number.
        has_thirds = self.is_exact and any(size & (size - 1) for size in self.axes.values())
        reduction = "" if not waiting else "sum" if has_thirds and waiting[0][1] == "avg" else waiting[0][1]
        waiting = [(axis, reduction) for axis, _ in waiting]
        needs = kind in "fc" and rng.random() < self.gradient_share
        made = Input(
            name,
            tuple(shape),
            dtype,
            tuple(values),
            tuple(map(tuple, specs)),
            tuple(waiting),
            needs,
            rng.randrange(2**20),
        )
        self.inputs.append(made)
        self.variables[name] = made.plain()
        return name

    def _value(self, kind: str, dtype: str) -> complex:
        rng = self.rng
        if kind == "b":
            return rng.random() < 0.5
        if kind == "c":
            return complex(rng.randint(-3, 3), rng.randint(-3, 3))
        if dtype == "uint8":
            return rng.randint(2, 8)
        return rng.randint(-4, 4) if kind == "i" else rng.randint(-6, 6) / 2

    def _reductions(self, dtype: str) -> list[str]:
        kind = KINDS.get(dtype, "i")
        if kind == "f":
            return ["sum", "sum", "avg", "max", "min", "product"]
        if dtype == "uint8":
            return ["bor", "band", "bxor"]
        return {"c": ["sum"], "i": ["sum", "max", "min", "product", "bor", "band", "bxor"]}.get(
            kind, ["max", "min", "bor", "band", "bxor"]
        )

    def random_shape(self) -> tuple[int, ...]:
        rng = self.rng
        rank = rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])
        sizes = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6] if rng.random() < 0.5 else [2, 3, 4]
        shape = tuple(rng.choice(sizes) for _ in range(rank))
        return shape if math.prod(shape) <= MAX_NUMEL // 2 else shape[1:]

    def variable(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """Return a variable; later ones are likelier, as they may be views."""
        names = [name for name, each in tensors_of(self.variables).items() if fits(each)]
        if not names:
            raise Unfit
        (name,) = self.rng.choices(names, range(1, len(names) + 1))
        return name

    def of_shape(self, shape: Sequence[int], dtype: str | None = None) -> str:
        """Return a variable of this shape and dtype (default: of x), or a new input."""
        wanted, dtype = tuple(shape), dtype or name_of(self.x.dtype)
        if self.rng.random() < 0.6:
            try:
                return self.variable(lambda each: tuple(each.shape) == wanted and name_of(each.dtype) == dtype)
            except Unfit:
                pass
        return self.input(wanted, dtype)

    def of_indices(self, shape: Sequence[int], size: int, *, repeats: bool = True, is_negative: bool = True) -> str:
        """Return a new input of indices of a dim of this size."""
        count, low = math.prod(shape), -size if is_negative else 0
        if size == 0 and count:
            raise Unfit
        if repeats:
            return self.input(shape, "int64", [self.rng.randrange(low, size) for _ in range(count)])
        if count > size:
            raise Unfit
        return self.input(shape, "int64", self.rng.sample(range(size), count))
