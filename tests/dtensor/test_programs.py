"""Programs written for PyTorch's DTensor see the same with only the import changed."""

import pytest

from . import dtensor_programs, gradient_programs

pytestmark = pytest.mark.processes

PROGRAMS = dtensor_programs.PROGRAMS + gradient_programs.PROGRAMS


@pytest.mark.share(8)
@pytest.mark.parametrize("clients", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_see_the_same(pool, program, clients):
    for ours, theirs in pool.values(dtensor_programs.run_both, program, clients=clients, group=True):
        assert ours == theirs
