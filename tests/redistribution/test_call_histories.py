"""Random programs in which clients disagree: no call returns a wrong value, all clients raise, and none hangs."""

import pytest

from . import call_histories
from .call_histories import CLIENTS, ELSEWHERE, SINCE_THEN, random_history

HEARTBEAT_TIMEOUT_S = 4.0
BOUND_S = 20.0
"""Far below the timeout of the process group, 30 s: to notice takes the heartbeat timeout, and a second or two each to
look, to take part and to settle."""

pytestmark = pytest.mark.processes


def run(pool, program, **options):
    answers = pool.run(
        call_histories.run,
        program,
        clients=CLIENTS,
        group=True,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        timeout_s=120,
        **options,
    )
    assert [answer.trace for answer in answers] == [""] * CLIENTS
    return [answer.value for answer in answers]


@pytest.mark.share(8)
@pytest.mark.parametrize("seed", range(400))
def test_disagreements_never_pair_wrong_calls(pool, seed):
    program = random_history(seed)
    outcomes = run(pool, program, is_late=[seed % 7])
    shown = "\n".join(
        f"{step.calls} {'used' if step.is_used else ''}: {[each[number][:2] for each in outcomes]}"
        for number, step in enumerate(program)
    )
    assert "wrong" not in {kind for each in outcomes for kind, *_ in each}, shown
    assert max(seconds for each in outcomes for *_, seconds in each) < BOUND_S, shown
    is_odd = any(len(set(step.calls)) > 1 or "wrong" in step.calls[0] for step in program)
    there = [each for client, each in enumerate(outcomes) if program[-1].calls[client] != ELSEWHERE]
    for each in there:
        assert ("error" in {kind for kind, *_ in each}) == is_odd, shown
    # In the end every call needs all clients. Either they are level again, or each of them raises, in every such call.
    ends = [[kind for kind, *_ in each[-len(SINCE_THEN) :]] for each in there]
    assert all(set(kinds) in ({"right"}, {"error"}) for kinds in zip(*ends, strict=True)), shown
    if any(ELSEWHERE in step.calls for step in program):
        assert all(set(kinds) == {"error"} for kinds in ends), shown
