"""Contract tests of `Coordination`. A test module subclasses `CoordinationContract` and says how to make clients."""

from __future__ import annotations

import _thread
import re
import threading
import time
import uuid
from collections.abc import Sequence

import pytest
from support.client_calls import (
    AT_ONCE_S,
    FIRST,
    HEARTBEAT_S,
    SECOND,
    TASK,
    TIMEOUT_S,
    Running,
    at,
    begin,
    inside,
    leave_all,
    same_error,
    together,
    wait_until,
)

from dtckpt import errors
from dtckpt.coordination import barrier_rules, verdicts
from dtckpt.coordination.api import BEGIN, Coordination, Progress, Vote
from dtckpt.coordination.identity import calls_of


class CoordinationContract:
    """Run by all implementations."""

    num_clients = 3

    def make(self, num_clients: int, job: str) -> Sequence[Coordination]:
        raise NotImplementedError

    @pytest.fixture
    def clients(self):
        made = self.make(self.num_clients, uuid.uuid4().hex)
        yield made
        leave_all(made)

    def test_fits_the_protocol(self, clients):
        for number, client in enumerate(clients):
            assert isinstance(client, Coordination)
            assert client.member.client == number
            assert client.member.num_clients == len(clients)
            assert client.heartbeat_timeout_s > 0

    def test_passes_and_hands_out_payloads(self, clients):
        results = together(
            clients,
            lambda c: c.barrier("b", Vote(payload=bytes([c.member.client]) * 4096), timeout_s=TIMEOUT_S, collect=True),
        )
        for result in results.values():
            assert result.error is None
            assert result.value.payloads == {client: bytes([client]) * 4096 for client in range(len(clients))}

    def test_payloads_only_if_asked_for(self, clients):
        results = together(clients, lambda c: c.barrier("b", Vote(payload=b"x"), timeout_s=TIMEOUT_S))
        assert [result.value.payloads for result in results.values()] == [{}] * len(clients)

    def test_name_is_reused(self, clients):
        for generation in range(40):
            results = together(clients, at("again"))
            assert [result.value.generation for result in results.values()] == [generation] * len(clients), results

    def test_no_vote_is_everyones_error(self, clients):
        failing = len(clients) - 1
        error = errors.StorageFullError("no space left on /data")

        def call(client):
            vote = Vote.of_error(error) if client.member.client == failing else Vote()
            return client.barrier("b", vote, timeout_s=TIMEOUT_S, position=FIRST)

        same_error(together(clients, call), errors.StorageFullError, rf"^client {failing}: no space left on /data$")

    def test_foreign_error_is_client_failed(self, clients):
        vote = Vote.of_error(OSError("disk \udcff gone"))
        results = together(clients, at("b", vote=vote, position=FIRST))
        same_error(results, errors.ClientFailedError, r"client \d: OSError: disk \\udcff gone")

    def test_next_generation_works_after_a_failure(self, clients):
        together(clients, at("b", vote=Vote(ok=False), position=FIRST))
        results = together(clients, at("b", position=SECOND))
        assert [result.value.generation for result in results.values()] == [1] * len(clients), results

    def test_long_reasons_are_capped(self, clients):
        results = together(clients, at("b", vote=Vote(ok=False, reason="ü" * 10**6), position=FIRST))
        error = same_error(results, errors.ClientFailedError, "client .: ü+")
        assert len(str(error)) <= errors.MAX_MESSAGE_CHARS

    @pytest.mark.parametrize("name", ["../x", "a/b", "a%2Fb", "\0", "x" * 256, "barrier/open", "ü" * 128, " "])
    def test_hostile_names_are_just_names(self, clients, name):
        for barrier in (name, "a", name):
            assert not any(result.error for result in together(clients, at(barrier)).values())

    def test_names_do_not_collide(self, clients):
        calls = [Running(clients, at(name)) for name in ("a/b", "a%2Fb", "a", "a/open", "b")]
        for call in calls:
            assert {result.value.generation for result in call.results().values()} == {0}

    @pytest.mark.parametrize("name", ["", "x" * 257, "\udcff"])
    def test_bad_names_are_refused(self, clients, name):
        with pytest.raises(errors.ConfigError, match="barrier name"):
            clients[0].barrier(name, timeout_s=1)

    @pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
    def test_bad_timeouts_are_refused(self, clients, timeout_s):
        with pytest.raises(errors.ConfigError, match="timeout_s"):
            clients[0].barrier("b", timeout_s=timeout_s)

    def test_oversized_payload_is_refused(self, clients):
        with pytest.raises(ValueError, match="4097 bytes"):
            clients[0].barrier("b", Vote(payload=b"x" * 4097), timeout_s=1)

    def test_unknown_participants_are_refused(self, clients):
        for wrong in ([0, 99], [0, 0], [-1, 0]):
            with pytest.raises(errors.ConfigError, match="participants"):
                clients[0].barrier("b", timeout_s=1, participants=wrong)

    def test_register_and_leave_are_idempotent(self, clients):
        for _ in range(2):
            clients[0].register()
        for _ in range(2):
            clients[0].leave()

    def test_can_come_back_after_leaving(self, clients):
        together(clients, at("b"))
        leave_all(clients)
        results = together(clients, lambda client: client.register())
        assert not any(result.error for result in results.values()), results
        results = together(clients, at("b"))
        assert [result.value.generation for result in results.values()] == [1] * len(clients), results

    def test_operation_has_an_identity(self, clients):
        """All know the same one, its later rounds carry it, and the next operation has another."""
        ids = set()
        for _ in range(3):
            operations = begin(clients)
            ids |= {operation.id for operation in operations.values()}
            for name in ("save/planned", "save/written"):
                results = together(clients, inside(operations, name))
                assert {client: result.value.operation for client, result in results.items()} == operations
        assert len(ids) == 3
        assert "" not in ids

    def test_round_that_stands_alone_has_no_operation(self, clients):
        operations = begin(clients)
        results = together(clients, at("save/written"))
        assert {result.value.operation for result in results.values()} == {BEGIN}
        assert not any(result.error for result in together(clients, inside(operations, "save/written")).values())

    def test_operation_that_failed_to_begin_is_none(self, clients):
        failed = together(clients, at("save/begin", vote=Vote(ok=False), operation=BEGIN, position=FIRST))
        same_error(failed, errors.ClientFailedError, "voted no")
        assert {calls_of(client.member).report.operation for client in clients} == {""}
        begin(clients, position=SECOND)

    def test_status_shows_progress(self, clients):
        together(clients, lambda client: client.register())
        clients[0].heartbeat(Progress("write", 12, 3, 4))
        wait_until(lambda: clients[-1].status().tasks[0].progress == Progress("write", 12, 3, 4))
        status = clients[-1].status()
        assert status.num_clients == len(clients)
        assert [task.state for task in status.tasks] == ["registered"] * len(clients)


class ManyClientsContract(CoordinationContract):
    """Run by the implementations that know more than one client."""

    def silence(self, client: Coordination) -> None:
        """Stop the client's heartbeats without a goodbye, as if it had been killed."""
        raise NotImplementedError

    def test_topics_must_be_equal(self, clients):
        def call(client):
            vote = Vote(topic=b"%d" % (client.member.client % 2))
            return client.barrier("b", vote, timeout_s=TIMEOUT_S, position=FIRST)

        results = together(clients, call)
        same_error(results, errors.BarrierConflictError, "^barrier 'b': topics differ: client . came for 3., client .")

    def test_participants_must_be_equal(self, clients):
        def call(client):
            return client.barrier("b", timeout_s=TIMEOUT_S, participants=[0, 1] if client.member.client == 0 else None)

        same_error(together(clients, call), errors.BarrierConflictError, "participants differ: client . also expects")

    def test_stranger_harms_nobody(self, clients):
        with pytest.raises(errors.BarrierConflictError, match="client 2 is not a participant; participants are 0, 1"):
            clients[2].barrier("b", timeout_s=TIMEOUT_S, participants=[1, 0])
        results = together(clients[:2], at("b", participants=[0, 1]))
        assert not any(result.error for result in results.values())

    def test_subset_passes_alone(self, clients):
        results = together(clients[1:], at("b", participants=[2, 1], collect=True))
        assert [sorted(result.value.payloads) for result in results.values()] == [[1, 2]] * 2
        assert not any(result.error for result in together(clients, at("b")).values())

    def test_timeout_names_the_missing(self, clients):
        clients[1].register()
        results = together([clients[0], clients[2]], at("b", timeout_s=0.5))
        error = same_error(
            results,
            errors.BarrierTimeoutError,
            rf"^barrier 'b' timed out after 0.5 s: 2/3 arrived, missing {TASK.format(1)}$",
        )
        assert isinstance(error, TimeoutError)
        assert error.missing == (1,)
        assert max(result.seconds for result in results.values()) < AT_ONCE_S

    def test_missing_says_never_registered(self, clients):
        together(clients[:2], lambda client: client.register())  # which may take longer than the barrier
        results = together(clients[:2], at("b", timeout_s=0.3))
        same_error(results, errors.BarrierTimeoutError, "missing client 2 .*, which never registered")

    def test_late_arrival_gets_the_stored_verdict(self, clients):
        early = together(clients[:2], at("b", timeout_s=0.3, position=FIRST))
        late = together(clients[2:], at("b", position=FIRST))
        same_error({**early, **late}, errors.BarrierTimeoutError, "missing client 2")
        assert late[2].seconds < AT_ONCE_S
        results = together(clients, at("b", position=SECOND))
        assert [result.value.generation for result in results.values()] == [1] * len(clients), results

    def test_arrival_at_another_position_is_not_late(self, clients):
        together(clients[:2], at("b", timeout_s=0.3, position=FIRST))
        waiting = Running(clients[2:], at("b", position=SECOND))
        wait_until(lambda: clients[2].status().barriers)
        results = {**together(clients[:2], at("b", position=SECOND)), **waiting.results()}
        assert not any(result.error for result in results.values()), results

    def test_late_arrival_at_a_round_that_did_not_time_out_is_told_at_once(self, clients):
        """It had no time to come."""
        early = together(clients[:2], at("b", vote=Vote(ok=False, reason="full")))
        late = together(clients[2:], at("b"))
        same_error({**early, **late}, errors.ClientFailedError, "client .: full")

    def test_late_arrival_that_may_be_a_new_one_waits_for_the_grace(self, clients):
        """Alone, it is told the old failure then."""
        together(clients[:2], at("b", timeout_s=0.3))
        late = together(clients[2:], at("b"))
        error = same_error(
            late,
            errors.BarrierTimeoutError,
            r"^barrier 'b': the others had given up \d+\.\d s before this client came; that round failed: "
            rf"barrier 'b' timed out after 0.3 s: 2/3 arrived, missing {TASK.format(2)}",
        )
        assert error.missing == (2,)
        assert barrier_rules.grace_s(HEARTBEAT_S) <= late[2].seconds < AT_ONCE_S

    def test_nobody_is_late_for_a_round_that_told_of_an_earlier_one(self, clients):
        """Clients of the earlier round come for the next round, and meet the client that was told."""
        together(clients[:2], at("b", timeout_s=0.3))
        same_error(together(clients[2:], at("b")), errors.BarrierTimeoutError, "the others had given up")
        results = together(clients, at("b"))
        assert [result.value.generation for result in results.values()] == [2] * len(clients), results

    def test_late_arrival_that_others_join_takes_part(self, clients, monkeypatch):
        monkeypatch.setattr(barrier_rules, "grace_s", lambda _: TIMEOUT_S)
        together(clients[:2], at("b", timeout_s=0.3))
        late = Running(clients[2:], at("b"))
        wait_until(lambda: clients[2].status().barriers)
        results = {**together(clients[:2], at("b")), **late.results()}
        assert [result.value.generation for result in results.values()] == [1] * len(clients), results

    def test_no_vote_ends_the_wait_at_once(self, clients):
        start = time.monotonic()
        results = together(clients[:2], lambda c: c.barrier("b", Vote(ok=c.member.client == 0), timeout_s=TIMEOUT_S))
        same_error(results, errors.ClientFailedError, "client 1: voted no without a reason")
        assert time.monotonic() - start < AT_ONCE_S

    def test_same_barrier_twice_at_once_is_one_arrival(self, clients):
        """Two threads of one client must not complete a barrier of two; the earlier call is told."""
        earlier = Running(clients[:1], at("b", participants=[0, 1]))
        wait_until(lambda: clients[0].status().barriers)
        later = Running(clients[:1], at("b", timeout_s=0.5, participants=[0, 1]))
        expected = f"^barrier 'b': {TASK.format(0)} has given up waiting"
        same_error(earlier.results(), errors.BarrierCancelledError, expected)
        same_error(later.results(), errors.BarrierTimeoutError, "1/2 arrived")

    def test_client_that_comes_anew_meets_the_others(self, clients):
        given_up = Running(clients[:1], at("b"))
        wait_until(lambda: clients[0].status().barriers)
        again = Running(clients[:1], at("b", position=SECOND))
        same_error(given_up.results(), errors.BarrierCancelledError, "has given up waiting")
        results = {**together(clients[1:], at("b", position=SECOND)), **again.results()}
        assert not any(result.error for result in results.values()), results

    def test_round_of_an_operation_takes_place_once(self, clients):
        """A late client gets its verdict, also by a second call."""
        operations = begin(clients)
        early = together(clients[:1], inside(operations, "save/written", vote=Vote(ok=False, reason="full")))
        for late in (clients[1:], clients[1:], clients[:1]):
            results = together(late, inside(operations, "save/written"))
            same_error({**early, **results}, errors.ClientFailedError, "^client 0: full$")
        again = begin(clients)
        assert not any(result.error for result in together(clients, inside(again, "save/written")).values())

    def test_round_does_not_wait_for_a_client_that_leaves_the_operation(self, clients):
        operations = begin(clients)
        waiting = Running(clients[:2], inside(operations, "save/written"))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(2,)])
        calls_of(clients[2].member).leave_operation()
        results = waiting.results()
        expected = f"^barrier 'save/written': {TASK.format(2)} is not in this operation any more"
        same_error(results, errors.BarrierConflictError, expected)
        assert max(result.seconds for result in results.values()) < AT_ONCE_S

    @pytest.mark.parametrize("name", ["restore/begin", "save/written"])
    def test_round_of_an_operation_does_not_outlast_a_call_that_was_given_up(self, clients, name):
        operations = begin(clients) if name == "save/written" else dict.fromkeys(range(3), BEGIN)
        given_up = Running(clients[2:], inside(operations, name))
        wait_until(lambda: [barrier.missing for barrier in clients[2].status().barriers] == [(0, 1)])
        waiting = Running(clients[:1], inside(operations, name))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(1,)])
        calls_of(clients[2].member).end(1000, "")
        results = {**waiting.results(), **given_up.results()}
        expected = f"^barrier '{name}': {TASK.format(2)} has given up waiting"
        same_error(results, errors.BarrierCancelledError, expected)
        assert max(result.seconds for result in results.values()) < AT_ONCE_S

    def test_round_does_not_wait_for_others_once_its_client_has_given_it_up(self, clients):
        """The others come a moment later, and would else pass it with a client that is not there."""
        given_up = Running(clients[2:], inside(dict.fromkeys(range(3), BEGIN), "save/begin"))
        wait_until(lambda: [barrier.missing for barrier in clients[2].status().barriers] == [(0, 1)])
        calls_of(clients[2].member).leave_operation()
        results = given_up.results()
        expected = f"^barrier 'save/begin': {TASK.format(2)} has given up waiting"
        same_error(results, errors.BarrierCancelledError, expected)
        assert results[2].seconds < AT_ONCE_S

    def test_operations_that_wait_for_each_other_fail_at_once(self, clients):
        """Each client waits for the other one in another operation's first round."""
        save = Running(clients[:1], at("save/begin", operation=BEGIN, participants=[0, 1]))
        wait_until(lambda: clients[0].status().barriers)
        restore = Running(clients[1:2], at("restore/begin", operation=BEGIN, participants=[0, 1]))
        for results in (save.results(), restore.results()):
            expected = r"^client . \(.*\) waits at '.+/begin', client . \(.*\) at '.+/begin', each for the other"
            same_error(results, errors.BarrierConflictError, expected)
            assert max(result.seconds for result in results.values()) < AT_ONCE_S

    def test_operations_that_waited_for_each_other_are_told_once(self, clients):
        """Each client knows how both rounds failed, so its next call is a new one."""
        pair = {"operation": BEGIN, "participants": [0, 1]}
        save = Running(clients[:1], at("save/begin", **pair))
        wait_until(lambda: clients[0].status().barriers)
        assert together(clients[1:2], at("restore/begin", **pair))[1].error is not None
        assert save.results()[0].error is not None
        for name in ("save/begin", "restore/begin"):
            assert not any(result.error for result in together(clients[:2], at(name, **pair)).values())

    @pytest.mark.parametrize("silent", [0, 2])
    def test_lost_client_is_named(self, clients, silent):
        together(clients, lambda client: client.register())
        clients[silent].heartbeat(Progress("write", 12))
        wait_until(lambda: clients[1].status().tasks[silent].progress.step == 12)
        self.silence(clients[silent])
        others = [client for client in clients if client.member.client != silent]
        results = together(others, at("b"))
        error = same_error(
            results,
            errors.ClientLostError,
            rf"{TASK.format(silent)} sent no heartbeat for \d\.\d s; last seen in phase 'write' step 12$",
        )
        assert error.clients == (silent,)
        assert max(result.seconds for result in results.values()) < HEARTBEAT_S + 1.0

    def test_client_lost_after_arriving(self, clients):
        running = Running([clients[0]], at("b"))
        wait_until(lambda: any(barrier.missing == (1, 2) for barrier in clients[0].status().barriers))
        self.silence(clients[0])
        results = together([clients[1]], at("b"))
        same_error({**running.results(), **results}, errors.ClientLostError, f"{TASK.format(0)} sent no heartbeat")

    def test_client_that_leaves_is_named(self, clients):
        together(clients, lambda client: client.register())
        clients[1].leave()
        results = together([clients[0], clients[2]], at("b"))
        error = same_error(results, errors.ClientLostError, f"barrier 'b' failed: {TASK.format(1)} has left")
        assert error.clients == (1,)

    def test_barriers_of_different_names_run_at_once(self, clients):
        names = [f"b{number}" for number in range(8)]
        running = [Running(clients, at(name)) for name in names]
        for one in running:
            assert not any(result.error for result in one.results().values())

    def test_one_name_is_one_open_barrier(self, clients):
        first = Running([clients[0]], at("b", participants=[0, 1]))
        wait_until(lambda: clients[0].status().barriers)
        second = together([clients[2]], at("b", participants=[1, 2]))
        same_error({**first.results(), **second}, errors.BarrierConflictError, "participants differ")

    def test_interrupted_client_cancels_for_all(self, clients):
        others = Running(clients[1:2], at("b"))
        wait_until(lambda: clients[1].status().barriers)
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            clients[0].barrier("b", timeout_s=TIMEOUT_S)
        timer.join()
        expected = f"barrier 'b': {TASK.format(0)} was interrupted while it waited"
        same_error(others.results(), errors.BarrierCancelledError, expected)

    def test_says_for_whom_it_waits(self, clients, monkeypatch, caplog):
        monkeypatch.setattr(verdicts, "STILL_WAITING_S", 0.2)
        clients[1].register()
        clients[1].heartbeat(Progress("read", 7))
        wait_until(lambda: clients[1].status().tasks[1].progress.step == 7)
        together(clients[:1], at("b", timeout_s=1.0, participants=[0, 1]))
        expected = f"barrier 'b': still waiting for {TASK.format(1)}; last seen in phase 'read' step 7"
        assert any(re.fullmatch(expected, record.message) for record in caplog.records), caplog.records

    def test_status_shows_open_barriers(self, clients):
        running = Running([clients[0]], at("b"))
        wait_until(lambda: [(b.name, b.missing) for b in clients[0].status().barriers] == [("b", (1, 2))])
        assert not any(result.error for result in together(clients[1:], at("b")).values())
        assert running.results()[0].error is None
        assert clients[0].status().barriers == ()

    def test_id_that_is_taken_is_refused(self, clients):
        job = clients[0].member.job
        clients[0].register()
        (rival, *_) = self.make(self.num_clients, job)
        with pytest.raises(errors.FencedError, match="is another live process"):
            rival.register()

    def test_restarted_client_takes_its_place_and_meets_the_others_in_their_next_round(self, clients):
        together(clients, at("b"))
        self.silence(clients[2])
        reborn = self.make(self.num_clients, clients[0].member.job)[2]
        reborn.register()
        results = together([*clients[:2], reborn], at("b"))
        assert [result.value.generation for result in results.values()] == [1] * len(clients), results
        assert clients[0].status().tasks[2].incarnation == reborn.member.incarnation
        reborn.leave()
