"""Loops that name, find and delete checkpoints themselves, as the trainers of PyTorch do."""

import pytest

from . import plugin_cases as cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("in_background", [False, True])
def test_a_loop_goes_on_with_fewer_ranks(pool, tmp_path, in_background):
    path = str(tmp_path / "checkpoint")
    first = pool.values(cases.run_loop, path, 3, in_background=in_background, clients=4, group=True)
    assert first == [[-1, [3.0], first[0][2]]] * 4
    assert {"step-2", "step-3"} <= set(first[0][2])
    then = pool.values(cases.run_loop, path, 5, clients=2, group=True)
    assert then == [[3, [5.0], ["step-4", "step-5"]]] * 2


def test_a_loop_goes_back_to_a_step(pool, tmp_path):
    path = str(tmp_path / "checkpoint")
    pool.values(cases.run_loop, path, 3, keep=9, clients=2, group=True)
    back = pool.values(cases.run_loop, path, 2, load_step=1, keep=9, clients=2, group=True)
    assert back == [[1, [2.0], ["step-1", "step-2", "step-3"]]] * 2
    assert pool.values(cases.run_loop, path, 4, keep=9, clients=2, group=True)[0][:2] == [3, [4.0]]


def test_a_save_that_died_is_not_found(pool, tmp_path):
    path = tmp_path / "checkpoint"
    pool.values(cases.run_loop, str(path), 1, clients=2, group=True)
    pool.run(cases.die_in_save, str(path / "step-2"), clients=2, group=True)
    assert cases.newest_step(path) == 1
    assert pool.values(cases.run_loop, str(path), 2, clients=2, group=True)[0][:2] == [1, [2.0]]
