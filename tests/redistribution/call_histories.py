"""Random histories of calls in which some clients ask for other things than the rest; run in client processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.states import cluster_mesh

import dtckpt
from dtckpt import DTensor, Mesh, Partial, Replicate, Shard
from dtckpt.dtensor import distribute_tensor
from dtckpt.errors import DtckptError

CLIENTS = 4
WHOLE = torch.arange(24.0).reshape(8, 3)
Outcome = tuple[str, str, float]
"""What became of a statement, ``right``, ``wrong``, ``error`` or ``none``; the error's text; seconds."""


@dataclass(frozen=True)
class State:
    """The tensors of a program: in quarters, halves and whole on a grid, and in halves on this client's row of it."""

    mesh: Mesh
    quarters: DTensor
    halves: DTensor
    whole: DTensor
    row: DTensor

    @classmethod
    def new(cls) -> State:
        mesh = cluster_mesh({"a": 2, "b": 2}, CLIENTS, dtckpt.client_id())
        layouts = [Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]
        row = distribute_tensor(WHOLE, mesh["b"], [Shard(0)])
        return cls(mesh, *(distribute_tensor(WHOLE, mesh, each) for each in layouts), row)


def _moved(name: str, *placements: Any) -> Callable[[State, int], DTensor]:
    return lambda state, step: (getattr(state, name) + 100 * step).redistribute(placements=placements)


def _of_local(rows: int) -> Callable[[State, int], DTensor]:
    def make(state: State, step: int) -> DTensor:
        region = state.quarters.layout.region(dtckpt.client_id(), WHOLE.shape)
        local = (WHOLE[region.slices()] + 100 * step)[:rows]
        return DTensor.from_local(local, state.mesh, [Shard(0), Shard(0)], shape=WHOLE.shape)

    return make


CALLS: dict[str, Callable[[State, int], DTensor]] = {
    "all of quarters": _moved("quarters", Replicate(), Replicate()),
    "all of halves": _moved("halves", Replicate(), Replicate()),
    "quarters to halves": _moved("quarters", Shard(0), Replicate()),
    "quarters to columns": _moved("quarters", Shard(1), Replicate()),
    "halves to terms": _moved("halves", Replicate(), Partial()),
    "quarters as they are": _moved("quarters", Shard(0), Shard(0)),
    "halves as they are": _moved("halves", Shard(0), Replicate()),
    "cut": _moved("whole", Shard(0), Shard(0)),
    "cut along columns": _moved("whole", Replicate(), Shard(1)),
    "wrong dim": _moved("quarters", Shard(5), Replicate()),
    "wrong operator": lambda state, step: (state.quarters + 100 * step).sum(9),
    "local": _of_local(2),
    "wrong local": _of_local(1),
    "row": _moved("row", Replicate()),
}
ELSEWHERE = "elsewhere"
"""The client makes no call in this step or later ones: it waits for the others by other means."""
SINCE_THEN = ["all of quarters"] * 3
"""What all clients call in the end: each needs all others."""


@dataclass(frozen=True)
class Statement:
    """One statement of a program.

    Args:
        calls: What each client calls.
        is_used: Whether the statement goes on to use the result, which takes a second call.
    """

    calls: tuple[str, ...]
    is_used: bool


def random_history(seed: int) -> list[Statement]:
    """Return a program in which one to three clients call something else in one statement, in two, or in none."""
    choose = random.Random(seed)
    odd_steps = choose.sample(range(4), choose.choice([0, 1, 1, 1, 2]))
    right = [name for name in CALLS if "wrong" not in name]
    statements: list[Statement] = []
    elsewhere: set[int] = set()
    for step in range(6):
        calls = [choose.choice(right)] * CLIENTS
        if step in odd_steps:
            odd = choose.sample(range(CLIENTS), choose.randint(1, 3))
            is_alike = choose.random() < 0.5
            names = [choose.choice([*CALLS, ELSEWHERE])] * 4 if is_alike else choose.choices([*CALLS, ELSEWHERE], k=4)
            for client in odd:
                calls[client] = names[client]
                elsewhere |= {client} if names[client] == ELSEWHERE else set()
        calls = [ELSEWHERE if client in elsewhere else call for client, call in enumerate(calls)]
        statements.append(Statement(tuple(calls), choose.random() < 0.5))
    for call in SINCE_THEN:
        calls = [ELSEWHERE if client in elsewhere else call for client in range(CLIENTS)]
        statements.append(Statement(tuple(calls), is_used=False))
    return statements


def run(program: Sequence[Statement], *, is_late: Sequence[int] = ()) -> list[Outcome]:
    """Run a program on this client; return what became of each statement.

    Args:
        program: The statements.
        is_late: Clients that sleep before each statement.
    """
    client, state = dtckpt.client_id(), State.new()
    CALLS["quarters as they are"](state, 0)  # loads the operators, which takes seconds
    store = dist.distributed_c10d._get_default_store().clone()
    outcomes: list[Outcome] = []
    for step, statement in enumerate(program):
        call, start = statement.calls[client], time.monotonic()
        if call == ELSEWHERE:
            break
        if client in is_late:
            time.sleep(0.3)
        try:
            result = CALLS[call](state, step)
            values = [_is_right(result, WHOLE + 100 * step)]
            if statement.is_used:
                values.append(torch.equal(result.full_tensor(), WHOLE + 100 * step))
            outcomes.append(("right" if all(values) else "wrong", "", time.monotonic() - start))
        except (DtckptError, IndexError) as error:
            outcomes.append(("error", f"{type(error).__name__}: {error}", time.monotonic() - start))
    store.set(f"over/{client}", "")
    # Each client stays until all are through: a client that ends would give the others an error of another kind.
    store.wait([f"over/{other}" for other in range(CLIENTS)], timedelta(seconds=60))
    return outcomes + [("none", "", 0.0)] * (len(program) - len(outcomes))


def _is_right(result: DTensor, expected: torch.Tensor) -> bool:
    """Whether the components of this client's devices hold what the layout says."""
    if result.layout.has_partial:
        return True  # a term says nothing by itself; `full_tensor` does
    parts = zip(result.device_mesh.local_device_ids(), result.components, strict=True)
    regions = ((result.layout.region(device, WHOLE.shape), part) for device, part in parts)
    return all(torch.equal(part, expected[region.slices()]) for region, part in regions)
