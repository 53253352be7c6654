"""One client calls an operator with other arguments than the rest: all raise, soon, and go on together."""

import pytest

from . import odd_call_cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", odd_call_cases.CALLS)
def test_every_client_gets_an_error(pool, name):
    answers = pool.run(odd_call_cases.call, name, clients=3, group=True)
    assert [answer.trace for answer in answers] == [""] * 3
    assert max(answer.seconds for answer in answers) < 15
    errors = [answer.value[0] for answer in answers]
    assert all(kind for kind, _ in errors)
    callers = "operator ", "the function of local_map: "
    assert all(text.removeprefix("client 1: ").startswith(callers) for kind, text in errors if "Failed" in kind)
    assert all(is_right for _, is_right in (answer.value for answer in answers))


def test_the_others_hear_what_went_wrong_on_the_odd_one(pool):
    answers = pool.run(odd_call_cases.call, "index", clients=3, group=True)
    kinds, texts = zip(*(answer.value[0] for answer in answers), strict=True)
    assert kinds == ("ClientFailedError", "IndexError", "ClientFailedError")
    assert texts[0] == texts[2] == f"client 1: operator aten.index.Tensor: IndexError: {texts[1]}"


def test_an_error_of_all_is_raised_at_once(pool):
    answers = pool.run(odd_call_cases.call, "index", odd=None, clients=3, group=True)
    assert {answer.value[0][0] for answer in answers} == {"IndexError"}
    assert max(answer.seconds for answer in answers) < 10
