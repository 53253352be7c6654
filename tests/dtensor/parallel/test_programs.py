"""Programs of tensor parallelism see the same with only the import changed, collectives included."""

import pytest

from dtensor import dtensor_programs

from . import parallel_programs

pytestmark = pytest.mark.processes


@pytest.mark.share(3)
@pytest.mark.parametrize("program", parallel_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_programs_see_the_same(pool, program):
    for ours, theirs in pool.values(dtensor_programs.run_both, program, clients=2, group=True):
        assert ours == theirs
