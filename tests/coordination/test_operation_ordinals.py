"""Which operation each client is at: comparisons as pure values, and clients that go on after them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtckpt import errors
from dtckpt.coordination.api import Position
from dtckpt.coordination.operation_ordinals import (
    LEAST_VAIN_WAIT_S,
    NBYTES,
    SAME,
    Comparison,
    Ordinal,
    OrdinalTracker,
    compare,
)

LEVEL = "a client skipped one, gave one up alone, or was restarted; nothing was done, and all are level now"
BEHIND = "the clients behind meet operations that the others have given up, and must catch up"


def numbers(*given: int, **options: bool | int) -> dict[int, Ordinal]:
    return {client: Ordinal(number, **options) for client, number in enumerate(given)}


def steps(*given: int | None) -> dict[int, Ordinal]:
    return {client: Ordinal(1, step) for client, step in enumerate(given)}


def timed_out(*missing: int) -> errors.DtckptError:
    """Return the verdict of a barrier to which these clients did not come."""
    return errors.BarrierTimeoutError("timed out", is_verdict=True, missing=missing)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ordinal",
    [
        Ordinal(1),
        Ordinal(2**63, step=0),
        Ordinal(7, step=2**62, was_cut_off=True),
        Ordinal(7, was_cut_off=True, waited_gap=2**40),
    ],
)
def test_goes_over_the_wire(ordinal):
    data = ordinal.to_bytes()
    assert len(data) == NBYTES
    assert Ordinal.from_bytes(data + b"and what the client has to say") == ordinal


@pytest.mark.parametrize(
    ("ordinal", "position"),
    [
        (Ordinal(7), Position("#7", is_certain=False)),
        (Ordinal(7, was_cut_off=True), Position("#7", is_certain=False)),
        (Ordinal(7, step=12), Position("step 12", is_certain=True)),
        (Ordinal(7, step=0), Position("step 0", is_certain=True)),
    ],
)
def test_position_is_certain_where_it_is_more_than_a_count(ordinal, position):
    assert ordinal.position == position


# --- comparisons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordinals", [numbers(3), numbers(3, 3, 3), steps(0, 0), steps(7, 7, 7)])
def test_same(ordinals):
    assert compare(ordinals, "save") == SAME
    assert SAME.is_same


def test_steps_count_whatever_the_numbers_are():
    assert compare({0: Ordinal(1, step=5), 1: Ordinal(9, step=5)}, "save").is_same


def test_client_that_skipped_one_makes_all_fail():
    expected = f"client 1 is at its 7th save, the others at their 8th: {LEVEL}"
    assert compare(numbers(8, 7, 8), "save") == Comparison(frozenset({1}), 1, others_wait=False, message=expected)


@pytest.mark.parametrize("cut_off", [0, 1, 2])
def test_who_is_behind_is_waited_for_where_any_client_was_cut_off(cut_off):
    """Either it has gone on without the others, or they without it: the counts are right."""
    ordinals = numbers(8, 8, 5)
    ordinals[cut_off] = replace(ordinals[cut_off], was_cut_off=True)
    expected = f"client 2 is at its 5th save, the others at their 8th: {BEHIND}"
    assert compare(ordinals, "save") == Comparison(frozenset({2}), 3, others_wait=True, message=expected)


@pytest.mark.parametrize(("gap", "is_same"), [(1, False), (2, True), (3, True)])
def test_client_that_was_waited_for_in_vain_had_skipped(gap, is_same):
    """It was two behind when the others began to wait: if it came no closer, its count is wrong."""
    ordinals = {0: Ordinal(8, waited_gap=2), 1: Ordinal(8 - gap, was_cut_off=True)}
    found = compare(ordinals, "save")
    assert found.is_same == is_same
    assert is_same or found.others_wait


def test_clients_whose_steps_differ_fail_once_and_are_waited_for_then():
    first = compare(steps(12, 12, 10), "save")
    assert first == Comparison(
        frozenset({2}), 2, others_wait=False, message=f"client 2 is at step 10, the others at step 12: {LEVEL}"
    )
    again = compare(steps(13, 13, 11), "save", last_behind=first.behind)
    assert again.others_wait
    assert again.message == f"client 2 is at step 11, the others at step 13: {BEHIND}"


def test_other_clients_behind_are_not_waited_for_at_once():
    assert not compare(steps(13, 10, 11), "save", last_behind=frozenset({2})).others_wait


def test_step_on_some_clients_only():
    found = compare(steps(3, None, 3, None), "save")
    assert found == Comparison(
        message="client 1, client 3 gave no step, the others did; pass step= on every client or on none"
    )
    assert not found.is_same
    assert not found.others_wait


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((1, 2, 2), "client 0 is at its 1st save, the others at their 2nd"),
        ((3, 2, 2), "client 0 is at its 3rd save, the others at their 2nd"),
        ((11, 12, 13, 13), "client 0 is at its 11th save, client 1 is at its 12th save, the others at their 13th"),
        ((21, 22), "client 0 is at its 21st save, the others at their 22nd"),
        ((112, 101, 101), "client 0 is at its 112th save, the others at their 101st"),
        ((7, 8, 7, 8), "client 0 is at its 7th save, client 2 is at its 7th save, the others at their 8th"),
    ],
)
def test_message_names_the_odd_ones(given, told):
    assert compare(numbers(*given), "save").message == f"{told}: {LEVEL}"


def test_message_of_many_is_capped():
    message = compare(numbers(*[7] * 500, *[8] * 501), "save").message
    assert "more" in message
    assert len(message) < 1000


# --- clients that go on -----------------------------------------------------------------------------------------------


class Clients:
    """Clients that call the same operation again and again."""

    def __init__(self, num_clients: int) -> None:
        self.trackers = [OrdinalTracker("save") for _ in range(num_clients)]
        self.waiting: dict[int, Ordinal] = {}

    def skip(self, *clients: int) -> None:
        """Let clients come to an operation that the others do not come to, and hear its failure."""
        missing = set(range(len(self.trackers))) - set(clients)
        for client in clients:
            self.trackers[client].next_ordinal()
            self.trackers[client].note_failure(timed_out(*missing), client, LEAST_VAIN_WAIT_S)

    def give_up(self, client: int) -> None:
        """Let a client come to an operation and be cut off from it."""
        self.trackers[client].next_ordinal()
        self.trackers[client].note_failure(errors.CoordinatorUnavailableError("cut off"), client, LEAST_VAIN_WAIT_S)

    def come_late(self, client: int) -> None:
        """Let a client come to an operation that the others have given up without it."""
        self.trackers[client].next_ordinal()
        self.trackers[client].note_failure(timed_out(client), client, 0.0)

    def meet(self, *given: int | None) -> list[str]:
        """Let all come to their next operation, if they do not wait at one; return what each is told, "" for success.

        Args:
            given: Steps, of clients that give one.
        """
        ordinals = {
            client: self.waiting.get(client) or tracker.next_ordinal(given[client] if given else None)
            for client, tracker in enumerate(self.trackers)
        }
        ordinals = {client: Ordinal.from_bytes(ordinal.to_bytes()) for client, ordinal in ordinals.items()}
        found = {client: tracker.reconcile(ordinals, client) for client, tracker in enumerate(self.trackers)}
        assert len(set(map(str, found.values()))) == 1, "all come to the same result"
        told = found[0]
        self.waiting = {}
        answers = []
        for client in ordinals:
            if told.others_wait and client not in told.behind:
                self.waiting[client] = ordinals[client]
                answers.append("waits")
            else:
                answers.append(told.message)
        return answers

    def stop_waiting(self, waited_s: float = LEAST_VAIN_WAIT_S) -> None:
        """Let the time of those be over who wait."""
        missing = set(range(len(self.trackers))) - set(self.waiting)
        for client in self.waiting:
            self.trackers[client].note_failure(timed_out(*missing), client, waited_s)
        self.waiting = {}


@pytest.mark.parametrize("num_skipped", [1, 2, 5])
def test_one_failure_levels_clients_of_which_one_skipped(num_skipped):
    clients = Clients(3)
    assert clients.meet() == ["", "", ""]
    for _ in range(num_skipped):
        clients.skip(0, 2)
    first, second, third = clients.meet()
    assert first == second == third
    assert first.startswith("client 1 is at its 2nd save, the others at their ")
    assert first.endswith(LEVEL)
    for _ in range(3):
        assert clients.meet() == ["", "", ""]


def test_client_that_was_cut_off_catches_up_while_the_others_wait():
    """It fails at what the others have given up, and is not levelled: its count is right."""
    clients = Clients(3)
    clients.meet()
    clients.give_up(2)
    clients.skip(0, 1)
    clients.skip(0, 1)
    clients.skip(0, 1)
    told = [clients.meet() for _ in range(3)]
    for answers, place in zip(told[:2], ("3rd", "4th"), strict=True):
        assert answers[:2] == ["waits", "waits"]
        assert answers[2] == f"client 2 is at its {place} save, the others at their 5th: {BEHIND}"
    assert told[2] == ["", "", ""]
    assert not any(tracker.next_ordinal().was_cut_off for tracker in clients.trackers)


def test_client_that_heard_that_the_others_went_on_without_it_catches_up():
    """To have come too late is to have been cut off: its count is right."""
    clients = Clients(3)
    clients.meet()
    for _ in range(3):
        clients.skip(0, 1)
    clients.come_late(2)
    told = [clients.meet() for _ in range(3)]
    assert [answers[:2] for answers in told] == [["waits", "waits"]] * 2 + [["", ""]]
    assert told[2][2] == ""


def test_client_that_was_cut_off_and_is_ahead_waits():
    """It went on alone; the others come to what it has given up."""
    clients = Clients(2)
    clients.give_up(0)
    clients.give_up(0)
    assert [clients.meet()[0] for _ in range(3)] == ["waits", "waits", ""]


def test_client_that_was_cut_off_and_skipped_costs_two_failures():
    """The others wait in vain, once; then it is known that its count is wrong."""
    clients = Clients(2)
    clients.meet()
    clients.give_up(1)  # both come to it
    clients.skip(0)
    clients.skip(0)  # client 1 does not come to this one
    assert clients.meet()[0] == "waits"
    clients.stop_waiting()
    # Both are at the same point of their programs, and stay so: the gap does not close.
    assert clients.meet() == ["", ""]
    assert clients.meet() == ["", ""]
    assert [tracker.next_ordinal() for tracker in clients.trackers] == [Ordinal(7)] * 2


def test_waiting_that_was_short_was_not_in_vain():
    """A client that is behind may just be slow."""
    clients = Clients(2)
    clients.give_up(1)
    clients.skip(0)
    clients.skip(0)
    assert clients.meet()[0] == "waits"
    clients.stop_waiting(LEAST_VAIN_WAIT_S - 0.1)
    assert clients.meet()[0] == "waits"
    clients.stop_waiting()
    assert clients.meet() == ["", ""]


def test_waiting_is_over_when_the_other_has_come():
    """A later gap is judged by itself."""
    clients = Clients(2)
    clients.give_up(1)
    clients.skip(0)
    clients.skip(0)
    assert clients.meet()[0] == "waits"
    assert clients.meet() == ["", ""]
    clients.give_up(1)
    clients.skip(0)
    clients.skip(0)
    assert clients.meet()[0] == "waits"


def test_clients_that_heard_at_a_later_try_are_cut_off():
    """As the coordinator tells all; what the client itself knows comes too late for its ordinal."""
    trackers = [OrdinalTracker("save") for _ in range(2)]
    ordinals = {client: tracker.next_ordinal() for client, tracker in enumerate(trackers)}
    ordinals[0] = Ordinal(ordinals[0].number + 1)
    found = [tracker.reconcile(ordinals, client, cut_off=(1,)) for client, tracker in enumerate(trackers)]
    assert found[0] == found[1]
    assert found[0].others_wait
    assert all(tracker.next_ordinal().was_cut_off for tracker in trackers), "until all are level again"


def test_chase_with_steps():
    """The client that is behind fails at its steps, while the others wait, until it has come to their step."""
    clients = Clients(2)
    assert clients.meet(1, 1) == ["", ""]
    expected = f"client 1 is at step 2, the others at step 5: {LEVEL}"
    assert clients.meet(5, 2) == [expected, expected]
    assert clients.meet(6, 3) == ["waits", f"client 1 is at step 3, the others at step 6: {BEHIND}"]
    assert clients.meet(6, 4)[0] == "waits"
    assert clients.meet(6, 5)[0] == "waits"
    assert clients.meet(6, 6) == ["", ""]
    assert clients.meet(7, 7) == ["", ""]


def test_steps_of_clients_of_which_one_skipped_go_on_together():
    clients = Clients(2)
    clients.meet(1, 1)
    clients.trackers[0].next_ordinal(2)
    clients.trackers[0].note_failure(timed_out(1), 0, LEAST_VAIN_WAIT_S)
    assert clients.meet(3, 3) == ["", ""]


def test_step_on_one_client_only_levels_the_numbers():
    clients = Clients(2)
    clients.skip(0)
    (first, second) = clients.meet(1, None)
    assert first == second == "client 1 gave no step, the others did; pass step= on every client or on none"
    assert clients.meet() == ["", ""]


@pytest.mark.parametrize(
    ("error", "cut_off"),
    [
        (timed_out(1), {1}),
        (timed_out(0, 2), {0, 2}),
        (errors.ClientLostError("lost", is_verdict=True, clients=(1,)), {1}),
        (errors.ClientFailedError("voted no", is_verdict=True), set()),
        (errors.BarrierCancelledError("was interrupted", is_verdict=True), set()),
        (errors.CoordinatorUnavailableError("cut off"), {0, 1, 2}),
        (KeyboardInterrupt(), {0, 1, 2}),
    ],
)
def test_client_was_cut_off_by_what_is_no_verdict_or_names_it(error, cut_off):
    for client in range(3):
        tracker = OrdinalTracker("save")
        tracker.next_ordinal()
        tracker.note_failure(error, client, 0.0)
        assert tracker.next_ordinal() == Ordinal(2, was_cut_off=client in cut_off)


def test_client_stays_cut_off_until_all_are_level():
    tracker = OrdinalTracker("save")
    tracker.next_ordinal()
    tracker.note_failure(timed_out(0), 0, 0.0)
    tracker.note_failure(timed_out(1), 0, 0.0)
    behind = tracker.next_ordinal()
    assert behind == Ordinal(2, was_cut_off=True)
    assert tracker.reconcile({0: behind, 1: Ordinal(3)}, 0).others_wait
    level = tracker.next_ordinal()
    assert level == Ordinal(3, was_cut_off=True)
    assert tracker.reconcile({0: level, 1: Ordinal(3)}, 0).is_same
    assert tracker.next_ordinal() == Ordinal(4)
