"""Run a random program on plain tensors and on DTensors, statement by statement, and return the first difference."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch.nn import functional

from dtckpt import Mesh
from dtckpt.dtensor import DTensor

from .program import HELPERS, Input, Program

Namespace = dict[str, Any]

TOLERANCES = {
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
}
"""Of programs that are not exact, relative to the largest element. Elements of another tensor differ by more."""

REFUSED = (
    "more than one element of the written-to tensor refers to a single memory location; got",
    "some elements of the input tensor and the written-to tensor refer to a single memory location",
    "autograd would take the gradient of other elements",
    "expected a view of elements of the DTensor",
    "new_fn INTERNAL ASSERT FAILED",
    "Autograd not support dtype",  # of views of integers that a comparison in place has written to
)
"""Texts of errors that DTensors alone raise. There a program ends."""

MEMORY_FACTS = ("stride", "offset", "is_contiguous", "channels_last")

NOT_REFUSED = (
    "some elements of the input tensor and the written-to tensor refer to a single memory location",
    "view_as_real doesn't work on unresolved conjugated tensors",
    "is not supported for tensors with negative bit set",
    "ZeroTensors are immutable",
    "doesn't currently support mutable TensorLists with conjugate inputs",
    "ZeroDivisionError",  # plain tensors and DTensors raise it; how many elements were written before is not defined
)
"""Texts of errors that plain tensors alone raise. There a program ends, too."""

KERNELS_REFUSE = ("not implemented for", "is not supported for complex tensors")
"""Texts of errors that only kernels raise: on several clients only clients that have elements raise them
(docs/departures.md)."""

LAZY_REFUSED = (
    "more than one element of the written-to tensor refers to a single memory location",
    "some elements of the input tensor and the written-to tensor refer to a single memory location",
)
"""Texts of errors that plain tensors raise only where they are, or only where they are not, conjugated lazily."""

# Accepted departures, by what docs/departures.md says of them, and how programs keep away from them:
# * "Tensors that distribute_tensor or a redistribution makes have contiguous strides": the inputs are contiguous.
# * "A pending sum stays pending through operators that are linear in it", and may give NaN for infinity: all numbers
#   are finite (`Drawer._is_fit`).
# * "In-place operators and out keep layout and shape": a plain `out` that changes its shape is not taken.
# * "DTensors have no lazy bits": where plain tensors have one, strides of what follows are not compared.
# * "Changes of shape in place", and "as_strided": `REFUSED`.
# * "Strides of dims of size 1, and of tensors without elements": `_steps`.
# * "Strides of gradients": the strides of results of torch.autograd.grad, of `grad`, and of tensors made from them are
#   not compared, nor whether gradients of zeros require gradients: there a program ends.
# Not compared, as they mean nothing on plain tensors either: gradients of what was written to through `data`, results
# written to their own operands (`out` of a product), what is written through views whose elements overlap in memory,
# which may count twice, and random numbers.


@dataclass(frozen=True)
class Difference:
    """Where a run on DTensors departs from the run on plain tensors.

    Args:
        kind: What differs: ``values``, ``stride``, ``raises``, ...
        position: The statement after which it was seen; the number of statements for the end of the program.
        variable: Whose it is; empty for errors.
        text: The expected and the found value.
    """

    kind: str
    position: int
    variable: str
    text: str


@lru_cache(maxsize=10_000)
def _compiled(source: str) -> CodeType:
    return compile(source, "<program>", "exec")


def namespace() -> Namespace:
    return {"torch": torch, "F": functional, **HELPERS}


def execute(source: str, variables: Namespace) -> Exception | None:
    """Run a statement; return its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(_compiled(source), variables)
    except Exception as error:
        return error
    return None


def tensors_of(variables: Namespace) -> dict[str, torch.Tensor]:
    return {name: each for name, each in variables.items() if isinstance(each, torch.Tensor)}


def plain_errors(program: Program) -> set[int]:
    """Return the positions of the statements that raise on plain tensors."""
    variables = namespace() | {each.name: each.plain() for each in program.inputs}
    return {
        position
        for position, statement in enumerate(program.statements)
        if execute(statement.source, variables) is not None
    }


def difference(
    program: Program, mesh: Mesh, *, ignored: Collection[str] = (), goes_on: bool = False
) -> Difference | None:
    """Run a program both ways; return the first difference.

    Collective: Over the mesh's clients.

    Args:
        program: Its mesh has the axes of ``mesh``.
        mesh: Where the DTensors lie.
        ignored: Kinds of differences that do not count.
        goes_on: Whether to run the statements after a difference, too, so that all clients make the same calls
            whatever each of them finds.
    """
    first = None
    for found in _differences(program, mesh, goes_on=goes_on):
        if found.kind not in ignored:
            first = first or found
            if not goes_on:
                break
    return first


def _differences(program: Program, mesh: Mesh, *, goes_on: bool) -> Iterator[Difference]:
    plain = namespace() | {each.name: each.plain() for each in program.inputs}
    ours = namespace() | {each.name: _distributed(each, mesh) for each in program.inputs}
    is_lazy, gradients = False, set[str]()
    for position, statement in enumerate(program.statements):
        made, _, value = statement.source.rpartition("; ")[2].partition(" = ")
        # Also tensors made from a gradient.
        if value.endswith(".grad") or "torch.autograd.grad(" in value or gradients & {*re.findall(r"\w+", value)}:
            gradients.add(made)
        before = _versions(plain), _versions(ours)
        expected, error = execute(statement.source, plain), execute(statement.source, ours)
        if any(text in str(error) for text in REFUSED) or any(text in str(expected) for text in NOT_REFUSED):
            return
        if is_lazy and any(text in f"{expected}{error}" for text in LAZY_REFUSED):
            return
        if goes_on and any(text in str(expected) for text in KERNELS_REFUSE):
            return
        if (expected is None) != (error is None):
            kind = "does not raise" if error is None else "raises"
            yield Difference(kind, position, "", f"expected {_named(expected)}, got {_named(error)}")
            return  # the variables are no longer the same
        changes = [
            {name for name, count in _versions(each).items() if old.get(name, count) != count}
            for each, old in zip((plain, ours), before, strict=True)
        ]
        written = [plain[name] for name in changes[0]]
        if "_scatter(" in statement.source and isinstance(plain.get(made), torch.Tensor):
            written.append(plain[made])
        if any(map(_overlaps, written)):
            return
        is_lazy = is_lazy or any(each.is_conj() or each.is_neg() for each in tensors_of(plain).values())
        for name, each in tensors_of(plain).items():
            made = ours.get(name)
            for kind, text in _wrong_facts(each, made):
                if any(refused in text for refused in REFUSED):
                    return
                if (is_lazy or name.startswith("grad_") or name in gradients) and kind in MEMORY_FACTS:
                    continue
                if kind in ("requires_grad", "is_leaf", "grad_fn") and name in gradients and not each.any():
                    return
                yield Difference(kind, position, name, text)
        if program.looks:
            yield from _wrong_values(program, plain, ours, position)
        for name in sorted(changes[0] ^ changes[1]):
            yield Difference(
                "version", position, name, f"_version changed: {name in changes[0]}, ours {name in changes[1]}"
            )
    yield from _wrong_values(program, plain, ours, len(program.statements))


def _distributed(each: Input, mesh: Mesh) -> DTensor:
    return each.distributed(mesh)


def _named(error: Exception | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {str(error)[:300]}"


def _versions(variables: Namespace) -> dict[str, int]:
    return {name: each._version for name, each in tensors_of(variables).items()}


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    made = {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "stride": _steps(tensor),
        "offset": tensor.storage_offset() if tensor.numel() else None,
        "is_contiguous": tensor.is_contiguous(),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "grad_fn": tensor.grad_fn is not None,
    }
    if tensor.ndim == 4 and tensor.numel():
        made["channels_last"] = tensor.is_contiguous(memory_format=torch.channels_last)
    return made


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory along dims that were not expanded."""
    covered = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step and size > 1 and step < covered:
            return True
        covered += (size - 1) * step
    return False


def _steps(tensor: torch.Tensor) -> list[int | None]:
    """Return the strides that lead anywhere."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return [step if size > 1 and tensor.numel() else None for size, step in steps]


def _wrong_facts(plain: torch.Tensor, ours: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(ours, DTensor):
        yield "class", f"expected a DTensor, got {type(ours).__name__}"
        return
    try:
        found = _facts(ours)
    except Exception as error:
        yield "facts raise", _named(error)
        return
    for kind, expected in _facts(plain).items():
        if found[kind] != expected:
            yield kind, f"expected {expected}, got {found[kind]}"


def _wrong_values(program: Program, plain: Namespace, ours: Namespace, position: int) -> Iterator[Difference]:
    # What was computed from rounded numbers is no nearer to them than these are.
    tolerance = max([TOLERANCES.get(each.dtype, 0.0) for each in tensors_of(plain).values()], default=0.0)
    for name, each in tensors_of(plain).items():
        made = ours.get(name)
        if not isinstance(made, torch.Tensor) or made.shape != each.shape or made.dtype != each.dtype:
            continue
        try:
            with torch.no_grad():
                text = _wrong_elements(made, each.detach(), 0.0 if program.is_exact else tolerance)
        except Exception as error:
            yield Difference("values raise", position, name, _named(error))
            continue
        if text:
            yield Difference("values", position, name, text)


def _wrong_elements(ours: torch.Tensor, plain: torch.Tensor, tolerance: float) -> str:
    """Return the faults; components are looked at as they are, and only terms are reduced first."""
    if not isinstance(ours, DTensor) or ours.layout.partial:
        whole = ours.detach().full_tensor() if isinstance(ours, DTensor) else ours
        is_right = are_equal(whole, plain, tolerance)
        return "" if is_right else f"expected {plain.tolist()}, got {whole.tolist()}"
    layout, shape = ours.layout, tuple(plain.shape)
    for device, component in zip(layout.mesh.local_device_ids(), ours.components, strict=True):
        part = plain[layout.region(device, shape).slices()]
        if not are_equal(component.detach(), part, tolerance):
            return f"component of device {device}: expected {part.tolist()}, got {component.tolist()}, {layout}"
    return ""


def are_equal(ours: torch.Tensor, plain: torch.Tensor, tolerance: float) -> bool:
    """Whether tensors have equal elements, or close ones if there is a tolerance."""
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return False
    if torch.equal(ours, plain):
        return True
    if not tolerance or plain.dtype not in TOLERANCES:
        return False
    apart = (ours.resolve_conj() - plain.resolve_conj()).abs().max()
    return bool(apart <= tolerance * max(1.0, float(plain.abs().max())))
