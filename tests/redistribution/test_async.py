"""Asynchronous redistributions give the same results as others, in any order of reads, also without a read."""

import pytest

from . import async_cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
def test_several_in_flight_end_in_any_order(pool, clients):
    assert pool.values(async_cases.check, range(25), clients=clients, group=True) == [[]] * clients


@pytest.mark.parametrize(
    "way", ["components", "to_local", "full_tensor", "redistribute", "redistribute_async", "detach", "clone", "repr"]
)
def test_however_a_result_is_first_read_it_is_complete(pool, way):
    assert pool.values(async_cases.read, way, clients=3, group=True) == [[True] * 8] * 3


def test_results_that_nobody_reads_keep_nobody_waiting(pool):
    for seen in pool.values(async_cases.drop_results, clients=3, group=True):
        assert all(seen)


def test_the_source_may_change_when_its_redistribution_is_complete(pool):
    assert pool.values(async_cases.change_sources_afterwards, clients=3, group=True) == [[True] * 5] * 3


def test_gradients(pool):
    assert pool.values(async_cases.gradients, clients=2, group=True) == [[True] * 6] * 2


def test_what_failed_goes_on_failing(pool):
    for errors, is_right in pool.values(async_cases.read_failed_results, clients=2, group=True):
        assert len(errors) == 4
        assert len(set(errors)) == 1
        assert "clients want different things" in errors[0]
        assert is_right


def test_who_drops_a_result_goes_along_with_what_others_want(pool):
    answers = pool.run(async_cases.drop_conflicting_results, clients=3, group=True)
    assert [answer.value for answer in answers] == [True] * 3, answers
    assert max(answer.seconds for answer in answers) < 15
