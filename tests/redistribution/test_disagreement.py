"""Clients that ask for different redistributions in one call all raise the same error, and go on."""

import pytest

from . import disagreement_cases

pytestmark = pytest.mark.processes


def asked(pool, requests, **options):
    by_client = {n: (request,) if isinstance(request, str) else request for n, request in enumerate(requests)}
    answers = pool.run(disagreement_cases.ask, clients=len(requests), group=True, by_client=by_client, **options)
    assert [answer.trace for answer in answers] == [""] * len(requests)
    return [answer.value for answer in answers], max(answer.seconds for answer in answers)


def errors_in(seen):
    """Return each client's only error; all else that it asked for came."""
    found = [[step for step in steps if step is not True] for steps in seen]
    assert [len(errors) for errors in found] == [1] * len(seen), seen
    return [error for (error,) in found]


def last_error_in(seen):
    """Return the error that each client raises in every call, from the first call that it did not return from."""
    errors = [[step for step in steps if step is not True] for steps in seen]
    assert all(found and steps[-len(found) :] == found for found, steps in zip(errors, seen, strict=True)), seen
    (error,) = {error for found in errors for error in found}
    return error


@pytest.mark.parametrize("wrong", ["dim too large", "too many", "no placements"])
@pytest.mark.parametrize("right", ["columns", "whole"])
def test_an_error_of_one_client_reaches_all(pool, wrong, right):
    seen, seconds = asked(pool, [right, wrong, right])
    errors = errors_in(seen)
    assert len({kind for kind, _ in errors}) == 1
    assert errors[0] == errors[2] == (errors[1][0], f"client 1: {errors[1][1]}")
    assert seconds < 10


def test_an_error_of_all_clients_is_raised_at_once(pool):
    seen, seconds = asked(pool, ["dim too large"] * 3)
    assert {first[0] for first, *_ in seen} == {"LayoutError"}
    assert [rest for _, *rest in seen] == [[True, True]] * 3
    assert seconds < 5, "they waited for each other"


@pytest.mark.parametrize(
    "requests",
    [
        ["columns", "whole"],
        ["whole", "columns", "whole", "columns"],
        ["whole", "columns", "terms"],
        ["terms", "whole", "columns", "whole"],
        pytest.param(["whole", "terms", "whole"], id="paths that begin with the same exchange"),
    ],
)
def test_different_requests_are_an_error_on_all(pool, requests):
    seen, _ = asked(pool, requests)
    errors = errors_in(seen)
    assert {kind for kind, _ in errors} == {"LayoutError"}
    assert len({text for _, text in errors}) == 1
    assert "clients want different things" in errors[0][1]


@pytest.mark.parametrize("slow", [(), (0,), (0, 2)])
@pytest.mark.parametrize("odd", ["everything", "dim too large"])
def test_clients_that_need_nothing_of_the_odd_one_come_back_for_it(pool, odd, slow):
    """Over one axis of a grid two clients are done without the other two, one of which waits for all."""
    answers = pool.run(
        disagreement_cases.ask_on_grid,
        clients=4,
        group=True,
        by_client={client: (odd,) if client == 1 else () for client in range(4)},
        slow=slow,
    )
    assert [answer.trace for answer in answers] == [""] * 4
    seen = [answer.value for answer in answers]
    if odd == "dim too large":
        assert seen[1].pop(0)[1].startswith("placements: got Shard(dim=5)")
    kind, text = last_error_in(seen)
    assert kind == "LayoutError"
    assert "had returned from this call; from now on every redistribution" in text
    assert max(answer.seconds for answer in answers) < 10


def test_a_client_that_only_gives_hears_of_another_request_before_it_is_done(pool):
    """The last of four gets no columns; it comes when the others have said what they want, and takes nothing."""
    seen, _ = asked(pool, [("columns",), ("whole", 2), ("columns",), ("columns", 3)])
    assert {kind for kind, _ in errors_in(seen)} == {"LayoutError"}
    assert [rest for _, *rest in seen] == [[True, True]] * 4


def test_a_client_hears_of_an_error_before_it_gets_what_others_have_made_of_zeros(pool):
    """One of four fails; another, which exchanges nothing with it, comes when the other two know."""
    by_client = {1: ("dim too large",), 2: ("whole", 3)}
    answers = pool.run(disagreement_cases.ask_of_terms, clients=4, group=True, by_client=by_client)
    assert [answer.trace for answer in answers] == [""] * 4
    errors_in([answer.value for answer in answers])
    assert [answer.value[1] for answer in answers] == [True] * 4


def test_others_hear_of_an_error_however_late_they_come(pool):
    seen, _ = asked(pool, ["columns", "dim too large", "columns"], late=(0, 2))
    errors = errors_in(seen)
    assert [rest for _, *rest in seen] == [[True, True]] * 3
    assert errors[0] == errors[2] == (errors[1][0], f"client 1: {errors[1][1]}")


def test_clients_that_have_failed_go_along_with_what_late_ones_want(pool):
    """Two clients of a grid fail by themselves, before one of the other two asks for what needs all of them."""
    requests = {0: ("everything",), 1: ("dim too large",)}
    answers = pool.run(disagreement_cases.ask_on_grid, clients=4, group=True, by_client=requests, late=(0, 2))
    assert [answer.trace for answer in answers] == [""] * 4
    errors = errors_in([answer.value for answer in answers])
    assert [answer.value[1:] for answer in answers] == [[True] * 3] * 4
    assert {kind for kind, _ in errors} == {"LayoutError"}
    assert max(answer.seconds for answer in answers) < 15


def test_a_client_that_needs_nothing_hears_of_an_error_in_its_next_call(pool):
    seen, _ = asked(pool, ["rows", "dim too large"])
    (first, *rest), (own, *later) = seen
    kind, text = last_error_in([rest, later])
    assert (first, kind) == (True, own[0])
    assert text.startswith(f"client 1: {own[1]}; client 0 had returned from this call")


def test_a_client_that_changes_nothing_disagrees_with_those_that_change(pool):
    seen = pool.values(disagreement_cases.one_changes_nothing, clients=4, group=True)
    kind, text = last_error_in(seen)
    assert kind == "LayoutError"
    assert ": (10, 6) of torch.float32 from (Shard(dim=0),) to (Replicate(),)" in text
    assert "client 3: (10, 6) of torch.float32 as it is, (Shard(dim=0),)" in text
    assert [steps[0] for steps in seen] == [(kind, text)] * 4


@pytest.mark.parametrize("where", ["barrier", "save", "sleep"])
def test_a_client_that_waits_elsewhere_is_missing(pool, tmp_path, where):
    answers = pool.run(
        disagreement_cases.one_is_elsewhere, where, str(tmp_path), clients=4, group=True, heartbeat_timeout_s=2
    )
    assert [answer.trace for answer in answers] == [""] * 4
    outcomes, seconds = zip(*(answer.value for answer in answers), strict=True)
    ((kind, text),) = set(outcomes)
    assert kind == "CoordinationError"
    assert "client 3 has not come for 2 s, and waits in " in text
    assert max(seconds) < 8


def test_wrong_component_for_a_given_shape_reaches_all(pool):
    seen = pool.values(disagreement_cases.wrong_local_shape, clients=4, group=True)
    kind, text = seen[3][0]
    assert (kind, "does not fit global shape (8,)" in text) == ("ComponentError", True)
    assert [steps[0] for steps in seen[:3]] == [True] * 3
    ((kind_of_all, text_of_all),) = {steps[1] for steps in seen}
    assert (kind_of_all, text_of_all.startswith(f"client 3: {text}")) == (kind, True)
