"""Orders, batch norm, einsum, masks, infinities and the steps of optimizers: in one process, and over clients."""

import pytest

from . import several_client_cases
from .silent_faults import DEVICES

CASES = [
    several_client_cases.faults_of_calls,
    several_client_cases.faults_of_steps,
    several_client_cases.faults_of_buffers,
]


@pytest.mark.parametrize("case", CASES)
def test_one_process(case):
    assert case() == []


@pytest.mark.share(1)
@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_clients(pool, case):
    assert pool.values(case, clients=DEVICES, group=True) == [[]] * DEVICES
