"""Random histories of a root whose steps share files; see `root_histories`."""

import random

import pytest
from support.shares import SEED, amount

from .root_histories import History

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("number", range(amount(3, 300)))
def test_every_listed_step_is_whole_and_right(nursery, tmp_path, number):
    History(nursery, tmp_path, random.Random(f"root {number} {SEED}")).run(12)
