"""Clients find a global shape together once; then they take it for granted, and notice when that is wrong."""

import pytest

from . import agreement_cases
from .agreement_cases import BAD

pytestmark = pytest.mark.processes


def means(pool, rows, **options):
    return pool.values(
        agreement_cases.means, clients=len(rows), group=True, by_client={n: (r,) for n, r in enumerate(rows)}, **options
    )


def test_equal_steps_communicate_once(pool):
    for kinds in pool.values(agreement_cases.communications_of_steps, clients=2, group=True):
        firsts, seconds = kinds[::2], kinds[1::2]
        assert seconds == [[]] * len(seconds)
        assert firsts == [["exchange"]] * (len(firsts) - 1) + [[]]


def test_shapes_that_change_on_all_clients(pool):
    for found in means(pool, [[4, 5, 4, 5, 1, 4]] * 3):
        assert found == [1.0] * 6


def test_uneven_shards_stay_as_they_are(pool):
    assert means(pool, [[4, 4, 4], [3, 3, 3]]) == [[1.0] * 3] * 2


def test_shape_that_is_new_on_one_client_is_noticed_by_all(pool):
    """The others take the shape of the first step for granted while client 1 asks."""
    found = means(pool, [[4, 4, 4, 4], [4, 4, 4, 4], [4, 3, 3, 3]])
    assert found[0] == found[1] == found[2]
    first, (kind, text), *rest = found[0]
    assert (first, kind, rest) == (1.0, "LayoutError", [1.0, 1.0])
    assert "arguments changed on some clients only" in text


def test_shapes_that_all_clients_know_from_different_steps_are_noticed(pool):
    """Each client takes something for granted, so no client asks, and the messages look alike."""
    found = means(pool, [[4, 3, 4, 4], [4, 3, 3, 3]])
    assert found[0] == found[1]
    first, second, (kind, text), last = found[0]
    assert (first, second, kind, last) == (1.0, 1.0, "LayoutError", 1.0)
    assert "the clients took different things for granted" in text
    assert "pass shape= or run_check=True to from_local" in text


def test_checked_shapes_may_change_as_they_like(pool):
    assert means(pool, [[4, 3, 4, 4, 4], [4, 3, 3, 4, 4]], run_check=True) == [[1.0] * 5] * 2


@pytest.mark.parametrize("before", [[], [4]], ids=["first", "later"])
def test_error_of_one_client_reaches_all(pool, before):
    found = means(pool, [[*before, 4, 4], [*before, BAD, 4]])
    (kind, text) = found[1][-2]
    assert (kind, "must be dense" in text) == ("ComponentError", True)
    assert found[0][-2][0] == ("LayoutError" if before else "ComponentError")
    assert [each[-1] for each in found] == [1.0, 1.0]


def test_client_that_calls_from_local_alone_is_noticed(pool):
    """No client has taken anything for granted."""
    for kind, text in pool.values(agreement_cases.one_asks_while_others_redistribute, clients=2, group=True):
        assert kind == "LayoutError"
        assert "client 1: an agreement on the arguments of from_local/pack" in text


def test_agreements_end_with_the_process_group(pool, tmp_path):
    for found in pool.values(agreement_cases.anew_in_another_group, str(tmp_path / "store"), clients=2, group=True):
        assert found == [1.0, 1.0]


def test_tensors_that_are_distributed_again(pool):
    shapes = {0: ([(4,), (6, 2), (4,), (4,), (6, 2), (4,)],), 1: ([(4,), (6, 2), (4,), (6, 2), (6, 2), (4,)],)}
    found = pool.values(agreement_cases.distributed_in_turn, clients=2, group=True, by_client=shapes)
    assert found[0] == found[1]
    assert [each if isinstance(each[0], int) else each[0] for each in found[0]] == [
        (4,),
        (6, 2),
        (4,),
        "LayoutError",
        (6, 2),
        (4,),
    ]
