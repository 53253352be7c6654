"""Choice of transport between clients: the same-host transport, or Gloo if anything stands in the way."""

import pytest
import torch.distributed as dist

from dtckpt.comm.point_to_point import Connections
from dtckpt.errors import CoordinationError

from . import point_to_point_cases

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("obstacle", point_to_point_cases.OBSTACLES)
def test_both_sides_choose_the_same_way(pool, obstacle):
    results = pool.values(point_to_point_cases.exchange_twice, obstacle, clients=3, group=True)
    assert all(is_right for _, is_right in results)
    hindered = point_to_point_cases.OBSTACLES[obstacle].keys()
    for client, (transports, _) in enumerate(results):
        others = {0, 1, 2} - {client}
        expected = {"gloo" if {client, other} & hindered else "host" for other in others}
        assert transports == expected, client


def test_the_environment_can_turn_it_off(pool):
    results = pool.values(point_to_point_cases.turned_off, clients=2, group=True)
    assert results == [({"gloo"}, True)] * 2


def test_clients_meet_before_they_wait_for_messages(pool):
    """Else one waits for another that waits for its message, where clients send in different waves."""
    assert pool.values(point_to_point_cases.cut_into_different_waves, clients=6, group=True) == [True] * 6


def test_others_do_not_wait_for_a_client_that_has_not_looked_at_its_result(pool):
    assert pool.values(point_to_point_cases.wait_late, clients=3, group=True) == [True] * 3


@pytest.mark.parametrize("is_large", [False, True], ids=["eager", "rendezvous"])
def test_a_client_that_is_killed_is_missed_at_once(pool, is_large):
    *others, killed = pool.run(point_to_point_cases.lose_one, is_large=is_large, clients=3, group=True)
    assert killed.has_died
    for answer in others:
        assert not answer.error, answer
        assert answer.value < 10  # the process group's timeout is 30 s


def test_a_client_that_is_gone_before_the_first_message_is_named(monkeypatch):
    class Gloo:
        def recv(self, *_):
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(CoordinationError, match="meeting client 1 failed: Connection closed by peer"):
        Connections(1.0).connect({1}, Gloo(), [0, 1])


def test_connections_end_with_their_process_group(pool):
    first = pool.values(point_to_point_cases.count_connections, clients=3, group=True)
    assert [transports for _, transports in first] == [{"host"}] * 3
    for _ in range(2):  # a case of another test may have left some, but none are added
        again = pool.values(point_to_point_cases.count_connections, clients=3, group=True)
        assert all(now[0] <= before[0] for now, before in zip(again, first, strict=True)), (first, again)


def test_a_process_that_was_forked_from_a_client_does_not_stand_in_for_it(pool):
    first, second = pool.run(point_to_point_cases.fork_and_end, clients=2, group=True)
    assert first.value is True, first
    assert second.has_died
