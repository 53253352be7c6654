"""Random programs give the same with DTensors as with plain tensors: values, metadata, aliases, gradients, errors.

A failure is shown as a small script. Its seed replays it: ``DTCKPT_PROGRAM_SEED=<seed>``, with
``DTCKPT_PROGRAM_CLIENTS=<n>`` if it was on several clients.
``PYTHONPATH=tests python -m dtensor.operators.programs.search`` runs any number of programs, and groups what fails.
"""

import os
import random
from functools import cache

import pytest
import torch

from dtckpt import UNSHARDED, Layout, abstract_mesh
from dtckpt.dtensor import DTensor, pack
from dtensor.operators.programs.coverage import catalogue_names, left_out, reached
from dtensor.operators.programs.draw import Drawer, draw
from dtensor.operators.programs.grammar import FAMILIES
from dtensor.operators.programs.program import terms_of
from dtensor.operators.programs.search import failure_of, failures_on_clients

SEED = os.environ.get("DTCKPT_PROGRAM_SEED")
CLIENTS = int(os.environ.get("DTCKPT_PROGRAM_CLIENTS", "1"))


def batches(clients, count, size):
    """Return ranges of seeds: of all programs, or of the replayed program."""
    if SEED is not None:
        return [range(int(SEED), int(SEED) + 1)] if clients == CLIENTS else []
    return [range(first, first + size) for first in range(0, count, size)]


def name_of(seeds):
    return f"{seeds.start}-{seeds.stop - 1}"


@pytest.mark.share(2)
@pytest.mark.parametrize("seeds", batches(1, 20_000, 100), ids=name_of)
def test_one_process(seeds):
    for seed in seeds:
        if found := failure_of(draw(seed)):
            pytest.fail(str(found), pytrace=False)


@pytest.mark.share(1, of="programs on clients")
@pytest.mark.parametrize(
    ("clients", "seeds"),
    [(clients, seeds) for clients, count in ((2, 2000), (4, 1000)) for seeds in batches(clients, count, 50)],
    ids=str,
)
def test_clients(pool, tmp_path, clients, seeds):
    for found in failures_on_clients(pool, seeds, clients, tmp_path / "seed"):
        pytest.fail(str(found), pytrace=False)


def test_every_operator_is_in_the_grammar_or_left_out_with_a_reason():
    """Run each row of the grammar once, and compare the operators that run with the catalogue."""
    names, (ran, dead) = catalogue_names(), reached()
    assert dead == ()
    assert sorted(names - ran - set(left_out())) == [], "add them to grammar.toml or left_out.toml"
    assert sorted(name for name in left_out() if name in ran or name not in names) == [], "not left out, or none"


# --- the tester itself --------------------------------------------------------------------------------------------

PLAIN_ROWS = {
    "{x} + {like}",
    "-{x}",
    "{x}.flip({dims})",
    "{x}.cumsum({dim})",
    "{x}.data.add_({n})",
    "{x}.transpose({dim}, {dim2})",
}


def wrong_numbers(made):
    return made + 1


def no_view(made):
    return made.clone(memory_format=torch.preserve_format)


def error(made):
    raise ValueError("planted")


FAULTS = {"cumsum": wrong_numbers, "transpose": no_view, "flip": error}


def plant(monkeypatch, name, fault):
    """Let an operator on DTensors do something wrong with its result."""
    dispatch = DTensor.__torch_dispatch__

    @classmethod
    def dispatch_wrongly(cls, func, types, args=(), kwargs=None):
        made = dispatch(func, types, args, kwargs)
        return fault(made) if func._schema.name == f"aten::{name}" else made

    monkeypatch.setattr(DTensor, "__torch_dispatch__", dispatch_wrongly)


def simple_program(seed):
    rows = [row for family in FAMILIES.values() for row in family if row.template in PLAIN_ROWS]
    drawer = Drawer(seed)
    drawer.gradient_share = 0.0  # operators run in the gradients of others, too
    drawer.input((2, 3), "float64")
    for _ in range(8):
        drawer.statement(drawer.rng.choice(rows))
    drawer.end()
    return drawer.result()


@cache
def right_programs():
    """Simple programs without a failure; called before a fault is planted."""
    return [program for program in map(simple_program, range(60)) if failure_of(program) is None]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_shrunk(monkeypatch, capsys, name):
    programs = right_programs()
    assert len(programs) > 10
    plant(monkeypatch, name, FAULTS[name])
    found = next(filter(None, map(failure_of, programs)))
    assert any(name in statement.source for statement in found.program.statements), str(found)
    assert len(found.program.statements) <= 2
    assert len(found.program.inputs) == found.program.num_devices == 1
    exec(str(found).split("\n\n", 1)[1], {})
    printed = capsys.readouterr().out.splitlines()
    assert printed != []
    assert printed[: len(printed) // 2] != printed[len(printed) // 2 :]


def test_programs_are_the_same_each_time():
    assert [draw(seed) for seed in range(5)] == [draw(seed) for seed in range(5)]


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min", "product", "band", "bor", "bxor"])
def test_terms_reduce_to_the_tensor(reduction):
    dtype = torch.int64 if reduction[0] == "b" else torch.float64
    whole = torch.tensor([[3, 0, -2], [5, 1, 4]]).to(dtype)
    for count in (1, 2, 3):
        terms = terms_of(whole, reduction, count, random.Random(count))
        assert len(terms) == count
        made = pack(terms, Layout([UNSHARDED, UNSHARDED], abstract_mesh({"x": count}), {"x": reduction}), whole.shape)
        assert torch.equal(made.full_tensor(), whole)
        assert count == 1 or not torch.equal(terms[0], terms[1])
