"""Every operator of PyTorch's database is right on DTensors, but for operators with a reason in ``exceptions.toml``.

A run tries some of the operators, and of each some calls, others each day; ``DTCKPT_TESTS=all`` tries all of them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.shares import IS_ALL
from support.states import IS_DEVELOPMENT_TORCH

from .operator_database import BACKWARD, DIRECTIONS, FORWARD, FULL, QUICK, RIGHT, outcomes_of
from .operator_samples import operators

SCALE = FULL if IS_ALL else QUICK
EXCEPTIONS = tomllib.loads(Path(__file__).with_name("exceptions.toml").read_text())
LEAST_RIGHT = {FORWARD: 663, BACKWARD: 542} if IS_DEVELOPMENT_TORCH else {FORWARD: 658, BACKWARD: 535}
"""All of them, of PyTorch 2.11's too; PyTorch's DTensor has 523 and 470 of a selection of 633."""


@pytest.mark.share(len(operators()) // 20)
@pytest.mark.parametrize("name", operators())
def test_operator(name):
    # All calls of listed operators are tried: an operator that has become right must leave the list.
    outcomes = list(outcomes_of(name, FULL if name in EXCEPTIONS else SCALE))
    if not any(outcome.direction == FORWARD for outcome in outcomes):  # a share of samples that the operator refuses
        outcomes = list(outcomes_of(name, FULL))
    assert any(outcome.direction == FORWARD for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.verdict != RIGHT]
    excepted = EXCEPTIONS.get(name, {}).get("directions", [])
    assert [outcome for outcome in wrong if outcome.direction not in excepted] == []
    assert {outcome.direction for outcome in wrong} == set(excepted)


def test_exceptions_have_reasons():
    for name, entry in EXCEPTIONS.items():
        assert name in operators() or not IS_DEVELOPMENT_TORCH  # older ones do not have all
        assert set(entry) == {"directions", "reason"}
        assert entry["reason"]
        assert entry["directions"]
        assert set(entry["directions"]) <= set(DIRECTIONS)


@pytest.mark.parametrize("direction", LEAST_RIGHT)
def test_exceptions_are_few(direction):
    excepted = [name for name, entry in EXCEPTIONS.items() if direction in entry["directions"]]
    tried = [op for op in operators().values() if direction == FORWARD or op.supports_autograd]
    assert len(tried) - len(excepted) >= LEAST_RIGHT[direction]
