"""A training step communicates no more often than with PyTorch's DTensor, and in the phases that have to."""

import pytest

from . import communication_cases

pytestmark = pytest.mark.processes

TENSOR_PARALLEL = {"loss": 1, "backward and gradients": 4, "clip": 1}
"""The partial result is summed for the loss, and four gradients change their layout; PyTorch changes some of them again
and again in the clipping and in the optimizer."""
STEPS = {
    "tensor parallel, AdamW": TENSOR_PARALLEL,
    "tensor parallel, AdamW in a loop": TENSOR_PARALLEL,
    "tensor parallel, AdamW on lists": TENSOR_PARALLEL,
    "tensor parallel, fused AdamW": TENSOR_PARALLEL,
    "tensor parallel, SGD": TENSOR_PARALLEL,
    # The loss divides by the number of rows that are not ignored, which no client knows alone.
    "data parallel": {"loss": 1, "backward and gradients": 1},
    "local functions": {},
}


@pytest.mark.parametrize("program", STEPS)
def test_communications_of_a_step(pool, program):
    for found in pool.values(communication_cases.counts, "dtckpt", program, clients=2, group=True):
        assert found == STEPS[program]


@pytest.mark.parametrize("program", STEPS)
def test_pytorch_communicates_at_least_as_often(pool, program):
    for found in pool.values(communication_cases.counts, "PyTorch", program, clients=2, group=True):
        assert sum(found.values()) >= sum(STEPS[program].values()), found


def test_all_programs_are_counted():
    assert STEPS.keys() == communication_cases.PROGRAMS.keys()
