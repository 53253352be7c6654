"""Clients that want different things of one redistribution all raise, and go on."""

import pytest

from . import diverging

pytestmark = pytest.mark.processes


def asked(pool, wishes, **options):
    answers = pool.run(
        diverging.ask,
        clients=len(wishes),
        group=True,
        by_client={n: (wish,) for n, wish in enumerate(wishes)},
        **options,
    )
    assert [answer.trace for answer in answers] == [""] * len(wishes)
    return [answer.value for answer in answers], max(answer.seconds for answer in answers)


@pytest.mark.parametrize("wrong", ["dim too large", "too many", "no placements"])
@pytest.mark.parametrize("right", ["columns", "whole"])
def test_an_error_of_one_client_reaches_all(pool, wrong, right):
    seen, seconds = asked(pool, [right, wrong, right])
    errors = [first for first, *_ in seen]
    assert len({kind for kind, _ in errors}) == 1
    assert errors[0] == errors[2] == (errors[1][0], f"client 1: {errors[1][1]}")
    assert [rest for _, *rest in seen] == [[True, True]] * 3, "they do not go on"
    assert seconds < 10


def test_an_error_of_all_clients_is_raised_at_once(pool):
    seen, seconds = asked(pool, ["dim too large"] * 3)
    assert {first[0] for first, *_ in seen} == {"LayoutError"}
    assert [rest for _, *rest in seen] == [[True, True]] * 3
    assert seconds < 2, "they waited for each other"


@pytest.mark.parametrize(
    "wishes",
    [
        ["columns", "whole"],
        ["whole", "columns", "whole", "columns"],
        ["whole", "columns", "terms"],
        ["terms", "whole", "columns", "whole"],
        pytest.param(["whole", "terms", "whole"], id="paths that begin with the same hop"),
    ],
)
def test_different_wishes_are_an_error_on_all(pool, wishes):
    seen, _ = asked(pool, wishes)
    assert {first[0] for first, *_ in seen} == {"LayoutError"}
    assert len({first[1] for first, *_ in seen}) == 1
    assert "clients want different things" in seen[0][0][1]
    assert [rest for _, *rest in seen] == [[True, True]] * len(wishes)


def test_a_client_that_fails_where_others_need_nothing_fails_alone(pool):
    seen, _ = asked(pool, ["rows", "dim too large"])
    assert seen[0] == [True, True, True] or seen[0][0] is True
    assert seen[1][0][0] == "LayoutError"
