"""Search for programs that fail.

    PYTHONPATH=tests python -m dtensor.operators.programs.search --count 2000 --clients 2

Failures are shrunk and grouped by kind and statement. ``--seed 7`` prints one program and its faults.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.client_processes import Pool
from support.states import cluster_mesh

import dtckpt
from dtckpt import Mesh, abstract_mesh

from .draw import draw
from .program import Program
from .runner import Difference, difference, plain_errors
from .shrinker import shrink

CLIENTS_TIMEOUT_S = 300.0
TRIALS_ON_CLIENTS = 120
SLOW_S = 5.0
"""A program that takes longer waits for clients that do not come; it is not shrunk, as each trial would wait again."""


@dataclass(frozen=True)
class Failure:
    """A program that fails, as it was drawn and as small as it got, and how the small one fails."""

    drawn: Program
    program: Program
    difference: Difference
    clients: int = 1

    def __str__(self) -> str:
        at, found = self.program, self.difference
        raising = plain_errors(at) | ({found.position} if found.kind == "raises" else set())
        where = f"statement {found.position}" if found.position < len(at.statements) else "the end"
        script = at.source(mesh_of(at.axes), raising, found.variable)
        replay = f"DTCKPT_PROGRAM_SEED={at.seed}"
        if self.clients > 1:
            replay += f" DTCKPT_PROGRAM_CLIENTS={self.clients}"
            where += f", on {self.clients} clients that share the devices of this mesh"
        return f"{found.kind} of {found.variable or 'the program'} at {where}: {found.text}\n{replay}\n\n{script}"

    @property
    def group(self) -> tuple[str, str]:
        """The kind, and the last statement of the small program."""
        rows = [each.row for each in self.program.statements[: self.difference.position + 1]]
        return self.difference.kind, (rows or ["start"])[-1]


@cache
def mesh_of(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return a mesh whose devices are all local."""
    return abstract_mesh(dict(axes))


def alike(one: Difference, other: Difference | None) -> bool:
    """Whether two programs fail in the same way: by kind, and by class of error."""
    if other is None or one.kind != other.kind:
        return False
    return "raise" not in one.kind or one.text.split(":")[0] == other.text.split(":")[0]


def failure_of(program: Program, ignored: Collection[str] = ()) -> Failure | None:
    """Return how a program fails in this process, shrunk; None if it does not."""
    found = difference(program, mesh_of(program.axes), ignored=ignored)
    if found is None:
        return None

    def fails(candidate: Program) -> bool:
        with contextlib.suppress(Exception):  # a candidate that makes no sense, such as an input of a missing axis
            return alike(found, difference(candidate, mesh_of(candidate.axes), ignored=ignored))
        return False

    small = shrink(program, fails)
    return Failure(program, small, difference(small, mesh_of(small.axes), ignored=ignored) or found)


# --- several clients ----------------------------------------------------------------------------------------------


def run_seeds(seeds: list[int], ignored: Collection[str], note: str = "") -> tuple[int, Difference | None]:
    """Run programs on a mesh over all clients until one fails; return the number of programs that were right, and the
    failure.

    Collective: Over all clients; each of them learns whether a program fails on another one.

    Args:
        seeds: Of the programs.
        ignored: Kinds of differences that do not count.
        note: A file in which client 0 writes the seed of the program that it runs.
    """
    clients = dtckpt.num_clients()
    for number, seed in enumerate(seeds):
        if note and dtckpt.client_id() == 0:
            Path(note).write_text(str(seed))
        is_wrong, found = run_on_clients(draw(seed, clients), ignored)
        if is_wrong:
            return number, found
    return len(seeds), None


def run_on_clients(program: Program, ignored: Collection[str]) -> tuple[bool, Difference | None]:
    """Run a program on all clients; return whether it fails on some client, and how it fails on this one."""
    import torch
    import torch.distributed as dist

    found = difference(program, _cluster(program.axes), ignored=ignored, goes_on=True)
    is_wrong = torch.tensor([int(found is not None)])
    dist.all_reduce(is_wrong)
    return bool(is_wrong), found


@cache
def _cluster(axes: tuple[tuple[str, int], ...]) -> Mesh:
    return cluster_mesh(dict(axes), dtckpt.num_clients(), dtckpt.client_id())


def failure_on_clients(pool: Pool, program: Program, clients: int, ignored: Collection[str] = ()) -> Failure | None:
    """Return how a program fails on some client, shrunk; None if it does not."""

    def found_by(candidate: Program) -> Difference | None:
        if candidate.num_devices % clients:
            return None
        try:
            answers = pool.run(run_on_clients, candidate, ignored, clients=clients, group=True)
        except AssertionError as error:  # a client that hangs
            return Difference("hangs", len(candidate.statements), "", str(error)[:300])
        for answer in answers:
            if answer.has_died or answer.error:
                return Difference("raises", len(candidate.statements), "", f"{answer.error}: {answer.text[:300]}")
        return next((each for _, each in (answer.value for answer in answers) if each), None)

    start = time.monotonic()
    found = found_by(program)
    if found is None:
        return None
    if time.monotonic() - start > SLOW_S:
        return Failure(program, program, found, clients)
    alone = failure_of(program, ignored)
    if alone is not None and alike(found, alone.difference):
        return alone
    small = shrink(program, lambda candidate: alike(found, found_by(candidate)), TRIALS_ON_CLIENTS)
    return Failure(program, small, found_by(small) or found, clients)


# --- many programs ------------------------------------------------------------------------------------------------


def failures(seeds: Iterable[int], ignored: Collection[str] = ()) -> Iterator[Failure]:
    """Yield how programs fail in this process."""
    for seed in seeds:
        found = failure_of(draw(seed), ignored)
        if found is not None:
            yield found


def failures_on_clients(
    pool: Pool, seeds: Iterable[int], clients: int, note: Path, ignored: Collection[str] = ()
) -> Iterator[Failure]:
    """Yield how programs fail on several clients, which are started anew after each failure."""
    left = list(seeds)
    while left:
        chunk = left[:100]
        try:
            answers = pool.run(
                run_seeds, chunk, tuple(ignored), str(note), clients=clients, group=True, timeout_s=CLIENTS_TIMEOUT_S
            )
            done = None if any(each.has_died or each.error for each in answers) else answers[0].value[0]
        except AssertionError:
            done = None
        if done is None:
            done = chunk.index(int(note.read_text()))
        left = left[done + 1 :] if done < len(chunk) else left[len(chunk) :]
        if done < len(chunk):
            found = failure_on_clients(pool, draw(chunk[done], clients), clients, ignored)
            if found is not None:
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="number of programs")
    parser.add_argument("--seed", type=int, help="this program only")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--ignore", default="", help="kinds of differences that do not count, such as stride,offset")
    options = parser.parse_args()
    ignored = tuple(filter(None, options.ignore.split(",")))
    seeds = range(options.first, options.first + options.count) if options.seed is None else [options.seed]
    groups: dict[tuple[str, str], list[Failure]] = {}
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if options.clients > 1:
            note = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "seed"
            pool = stack.enter_context(Pool())
            found = failures_on_clients(pool, seeds, options.clients, note, ignored)
        else:
            found = failures(seeds, ignored)
        for each in found:
            of_kind = groups.setdefault(each.group, [])
            if not of_kind:
                print(f"=== seed {each.drawn.seed}, {time.monotonic() - start:.0f} s\n{each}", flush=True)
            of_kind.append(each)
    print(f"{len(seeds)} programs, {time.monotonic() - start:.0f} s, {sum(map(len, groups.values()))} failures:")
    for (kind, row), of_kind in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"{len(of_kind):5} {kind:16} {row}   seeds {[each.drawn.seed for each in of_kind[:5]]}")
    sys.exit(bool(groups))


if __name__ == "__main__":
    main()
