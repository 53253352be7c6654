"""Reduce a program that fails to a small program that fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .program import Input, Program, Statement

Fails = Callable[[Program], bool]
"""Whether a program fails in the same way."""

MAX_TRIALS = 600
NO_GRAD = "with torch.no_grad(): "


def shrink(program: Program, fails: Fails, max_trials: int = MAX_TRIALS) -> Program:
    """Return the smallest program found that fails: fewer statements, devices and elements, simpler layouts and dtypes.

    Args:
        program: Fails.
        fails: Called with candidates.
        max_trials: How many candidates are tried at most.
    """
    trials, known = 0, {program}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidates in (_with_fewer_statements, _with_smaller_meshes, _with_simpler_inputs, _with_smaller_shapes):
            position = 0
            while True:  # candidates of the program as it is now; those before have been tried
                candidate = next(_at(candidates(program), position), None)
                if candidate is None:
                    break
                position += 1
                if candidate in known:
                    continue
                known.add(candidate)
                trials += 1
                if trials > max_trials:
                    return program
                if fails(candidate):
                    program, is_smaller = candidate, True
                    position = max(0, position - 1)
    return program


def _at(candidates: Iterator[Program], position: int) -> Iterator[Program]:
    for number, candidate in enumerate(candidates):
        if number >= position:
            yield candidate


def _with_fewer_statements(program: Program) -> Iterator[Program]:
    statements = program.statements
    for length in (len(statements) // 2, len(statements) // 4, 1):
        for start in range(len(statements) - length, -1, -max(1, length)):
            if length:
                yield _used(replace(program, statements=statements[:start] + statements[start + length :]))
    if not program.looks:
        yield replace(program, looks=True)
    for number, statement in enumerate(statements):
        for shorter in _shorter(statement.source):
            changed = Statement(shorter, statement.row)
            yield _used(replace(program, statements=(*statements[:number], changed, *statements[number + 1 :])))


def _shorter(source: str) -> Iterator[str]:
    if source.startswith(NO_GRAD):
        yield source.removeprefix(NO_GRAD)
    for found in re.finditer(r"loss\((\w+(?:, \w+)+)\)", source):
        names = found[1].split(", ")
        for name in names:
            kept = ", ".join(each for each in names if each != name)
            yield f"{source[: found.start(1)]}{kept}{source[found.end(1) :]}"
    found = re.match(r"((?:grad_\w+, )+)= (.*?), \[(.*?)\](.*)", source)
    if found and "," in found[3]:
        for name in found[3].split(", "):
            kept = [each for each in found[3].split(", ") if each != name]
            made = "".join(f"grad_{each}, " for each in kept)
            yield f"{made}= {found[2]}, [{', '.join(kept)}]{found[4]}"


def _used(program: Program) -> Program:
    """Return a program without the inputs that no statement names."""
    text = "\n".join(statement.source for statement in program.statements)
    return replace(program, inputs=tuple(each for each in program.inputs if re.search(rf"\b{each.name}\b", text)))


def _with_smaller_meshes(program: Program) -> Iterator[Program]:
    for number, (axis, size) in enumerate(program.axes):
        others = program.axes[:number] + program.axes[number + 1 :]
        if others:
            yield replace(program, axes=others, inputs=tuple(_without_axis(each, axis) for each in program.inputs))
        for smaller in range(1, size):
            yield replace(program, axes=(*program.axes[:number], (axis, smaller), *program.axes[number + 1 :]))


def _without_axis(each: Input, axis: str) -> Input:
    specs = tuple(tuple(name for name in axes if name != axis) for axes in each.specs)
    return replace(each, specs=specs, partial=tuple(pair for pair in each.partial if pair[0] != axis))


def _with_simpler_inputs(program: Program) -> Iterator[Program]:
    for each in program.inputs:
        for simpler in _simpler(each):
            yield _with_input(program, simpler)


def _with_input(program: Program, changed: Input) -> Program:
    return replace(program, inputs=tuple(changed if each.name == changed.name else each for each in program.inputs))


def _simpler(each: Input) -> Iterator[Input]:
    if each.partial:
        yield replace(each, partial=())
        yield replace(each, partial=each.partial[:1])
    if each.requires_grad:
        yield replace(each, requires_grad=False)
    for dim, axes in enumerate(each.specs):
        for fewer in ((), axes[:1]):
            if axes != fewer:
                yield replace(each, specs=(*each.specs[:dim], fewer, *each.specs[dim + 1 :]))
    if each.dtype in {"float32", "bfloat16", "float16"}:
        yield replace(each, dtype="float64")
    if each.dtype.startswith("float"):
        counted = tuple(float(number) for number in range(1, 1 + len(each.values)))
        if each.values != counted and max(each.values, default=0.0, key=abs) != 1.0:
            yield replace(each, values=counted)
            yield replace(each, values=(1.0,) * len(each.values))


def _with_smaller_shapes(program: Program) -> Iterator[Program]:
    for each in program.inputs:
        for dim, size in enumerate(each.shape):
            for smaller in range(1, size):
                kept = torch.arange(len(each.values)).reshape(each.shape).narrow(dim, 0, smaller).reshape(-1).tolist()
                shape = (*each.shape[:dim], smaller, *each.shape[dim + 1 :])
                yield _with_input(program, replace(each, shape=shape, values=tuple(each.values[at] for at in kept)))
