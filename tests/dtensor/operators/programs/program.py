"""A random program as a value: a mesh, the tensors that it starts with, and statements of Python.

`draw` draws programs from a seed, `runner` runs them on plain tensors and on DTensors, and `shrinker` reduces a program
that fails.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

import torch

from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Replicate, Shard
from dtckpt.dtensor import pack

_HEAD = """\
import torch
import torch.nn.functional as F
from dtckpt import UNSHARDED, Layout, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import pack

"""


def loss(*tensors: torch.Tensor) -> torch.Tensor:
    """Return a sum in which each element counts with another weight, so that gradients tell elements apart."""
    parts = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]
    weights = [(torch.arange(each.numel(), dtype=torch.float64) % 5 - 2).reshape(each.shape) for each in parts]
    return sum((each.double() * weight).sum() for each, weight in zip(parts, weights, strict=True))


def moved(tensor: torch.Tensor, *dims: int | None) -> torch.Tensor:
    """Return a contiguous copy; a DTensor's copy is split along such a dim by each mesh axis, or replicated."""
    if hasattr(tensor, "redistribute"):
        dims = dims[: tensor.device_mesh.ndim]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        tensor = tensor.redistribute(placements=placements)
    return tensor.clone(memory_format=torch.contiguous_format)


HELPERS: dict[str, Callable[..., torch.Tensor]] = {"loss": loss, "moved": moved}
"""What programs call besides PyTorch."""


@dataclass(frozen=True)
class Input:
    """A tensor that a program starts with, and how it lies.

    Args:
        name: Its variable.
        shape: Its shape.
        dtype: Name of its dtype in `torch`.
        values: Its elements in order.
        specs: For each dim the mesh axes that split it, major first.
        partial: The mesh axes along which each device holds a term, and how the terms reduce to the tensor.
        requires_grad: Whether it is a leaf that has a gradient.
        salt: Decides the terms.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: tuple[complex, ...]
    specs: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    requires_grad: bool = False
    salt: int = 0

    def plain(self) -> torch.Tensor:
        made = torch.tensor(self.values, dtype=getattr(torch, self.dtype)).reshape(self.shape)
        made = made.clone()  # a tensor that is no view
        return made.requires_grad_(self.requires_grad)

    def layout(self, mesh: Mesh) -> Layout:
        return Layout([axes or UNSHARDED for axes in self.specs], mesh, dict(self.partial))

    def distributed(self, mesh: Mesh) -> DTensor:
        """Return the tensor in its layout."""
        layout, terms = self.layout(mesh), self.terms(mesh)
        regions = {device: layout.region(device, self.shape).slices() for device in mesh.local_device_ids()}
        parts = [terms[device][region].clone() for device, region in regions.items()]
        return pack(parts, layout, self.shape).requires_grad_(self.requires_grad)

    def terms(self, mesh: Mesh) -> list[torch.Tensor]:
        """Return for each device of the mesh the term of the whole tensor that it holds a piece of."""
        rng = random.Random(self.salt)
        found = {(): self.plain().detach()}
        for axis, reduction in self.partial:
            found = {
                (*place, number): term
                for place, whole in found.items()
                for number, term in enumerate(terms_of(whole, reduction, mesh.dim_size(axis), rng))
            }
        axes = [mesh.dim_names.index(axis) for axis, _ in self.partial]
        places = itertools.product(*map(range, mesh.shape))
        return [found[tuple(place[axis] for axis in axes)] for place in places]


def terms_of(whole: torch.Tensor, reduction: str, count: int, rng: random.Random) -> list[torch.Tensor]:
    """Return terms that differ and reduce to ``whole``, exactly if its elements are small integers or halves."""

    def numbers(*choices: float) -> torch.Tensor:
        return torch.tensor([rng.choice(choices) for _ in range(whole.numel())]).reshape(whole.shape).to(whole.dtype)

    owner = torch.tensor([rng.randrange(count) for _ in range(whole.numel())], dtype=torch.int64).reshape(whole.shape)
    last = rng.randrange(count)
    if reduction in {"sum", "avg"}:
        halves = whole.dtype.is_floating_point  # so that terms round in other ways than their sum
        terms = [numbers(-1, 0.5, 1.5, 2) if halves else numbers(-1, 0, 1, 2) for _ in range(count)]
        terms[last] = whole * (count if reduction == "avg" else 1) - sum(terms[:last] + terms[last + 1 :])
        return terms
    if reduction == "bxor":
        terms = [numbers(0, 1) for _ in range(count)]
        terms[last] = whole
        for term in terms[:last] + terms[last + 1 :]:
            terms[last] = terms[last] ^ term
        return terms
    if reduction == "product" and whole.dtype != torch.bool:
        terms = [numbers(1, -1, 2) if whole.dtype.is_floating_point else numbers(1, -1) for _ in range(count)]
        terms[last] = whole / math.prod(terms[:last] + terms[last + 1 :]) if count > 1 else whole
        return [term.to(whole.dtype) for term in terms]
    if whole.dtype == torch.bool or reduction in {"band", "bor"}:
        is_and = reduction in {"min", "product", "band"}
        others = [whole | numbers(0, 1) if is_and else whole & numbers(0, 1) for _ in range(count)]
    else:
        others = [whole - numbers(0, 1, 2) if reduction == "max" else whole + numbers(0, 1, 2) for _ in range(count)]
    return [torch.where(owner == number, whole, other) for number, other in enumerate(others)]


@dataclass(frozen=True)
class Statement:
    """A statement of Python and the row of the grammar that it comes from."""

    source: str
    row: str


@dataclass(frozen=True)
class Program:
    """Statements over named tensors.

    Args:
        seed: From which it is drawn.
        axes: The mesh: names and sizes of its axes.
        inputs: The tensors that the statements start with.
        statements: Run in order.
        is_exact: Whether all its numbers are exact, so that results are equal and not only close.
        looks: Whether values are compared after each statement; else at the end only. What was not looked at need not
            be up to date.
    """

    seed: int
    axes: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    is_exact: bool = True
    looks: bool = True

    @cached_property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def source(self, mesh: Mesh, raising: Collection[int] = (), variable: str = "") -> str:
        """Return a script that runs the program on plain tensors and on DTensors, and prints a variable of both.

        Args:
            mesh: A mesh of these axes.
            raising: Positions of statements that raise.
            variable: The printed text.
        """
        body = [line for each in self.inputs for line in _lines_of(each, mesh)]
        for position, statement in enumerate(self.statements):
            line = statement.source
            if position in raising:
                lines = ["try:", f"    {line}", "except Exception as error:", "    print(type(error), error)"]
            else:
                lines = [line]
            body += lines
        if variable:
            body.append(f"print('plain' if is_plain else 'DTensor', {variable}, getattr({variable}, 'stride', str)())")
        lines = [f"mesh = abstract_mesh({dict(self.axes)})", "for is_plain in (True, False):"]
        text = "\n".join(statement.source for statement in self.statements)
        helpers = [inspect.getsource(made) + "\n\n" for name, made in HELPERS.items() if f"{name}(" in text]
        return "".join([_HEAD, *helpers]) + "\n".join([*lines, *("    " + line for line in body)]) + "\n"


def _lines_of(each: Input, mesh: Mesh) -> list[str]:
    whole, specs = each.plain().detach(), ", ".join(_spec(axes) for axes in each.specs)
    lines = [f"{each.name} = {literal(whole)}", "if not is_plain:"]
    region = f"[layout.region(device, {each.shape}).slices()].clone()"
    if each.partial:
        lines += [
            f"    terms = [{', '.join(literal(term) for term in each.terms(mesh))}]",
            f"    layout = Layout([{specs}], mesh, {dict(each.partial)})",
            f"    parts = [terms[device]{region} for device in mesh.local_device_ids()]",
        ]
    else:
        lines += [
            f"    layout = Layout([{specs}], mesh)",
            f"    parts = [{each.name}{region} for device in mesh.local_device_ids()]",
        ]
    lines.append(f"    {each.name} = pack(parts, layout, {each.shape})")
    return [*lines, *([f"{each.name}.requires_grad_()"] if each.requires_grad else [])]


def _spec(axes: tuple[str, ...]) -> str:
    return "UNSHARDED" if not axes else repr(axes[0] if len(axes) == 1 else axes)


def literal(tensor: torch.Tensor) -> str:
    """Return an expression that makes a plain tensor, no view."""
    if not tensor.numel():
        return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
    return f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype})"
