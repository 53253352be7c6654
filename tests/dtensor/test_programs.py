"""Programs written for PyTorch's DTensor see the same with only the import changed."""

import pytest
from support import dtensor_programs

pytestmark = pytest.mark.processes


@pytest.mark.share(16)
@pytest.mark.parametrize("clients", [2, 4])
@pytest.mark.parametrize("program", dtensor_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_programs_see_the_same(pool, program, clients):
    for ours, theirs in pool.values(dtensor_programs.run_both, program.__name__, clients=clients, group=True):
        assert ours == theirs
