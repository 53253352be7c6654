"""Orders, batch norm, einsum, masks, infinities and the steps of optimizers: in one process, and over clients."""

import pytest

from . import spread
from .faults import DEVICES

CASES = [spread.faults_of_calls, spread.faults_of_steps]


@pytest.mark.parametrize("case", CASES)
def test_one_process(case):
    assert case() == []


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_clients(pool, case):
    assert pool.values(case, clients=DEVICES, group=True) == [[]] * DEVICES
