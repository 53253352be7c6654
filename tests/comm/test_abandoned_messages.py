"""Messages of calls that have failed: buffers to send or to fill may be used for something else."""

import os
import socket
import threading

import pytest
import torch

from dtckpt.comm.collectives import PendingWork
from dtckpt.comm.same_host import EAGER_NBYTES, ProgressEngine, read_memory
from dtckpt.errors import CoordinationError
from dtckpt.redistribution.execute import Redistribution

TAG = 7
LARGE, SMALL = 2 * EAGER_NBYTES, 16


@pytest.fixture
def ends():
    """Two endpoints of one connection, clients 0 and 1."""
    engines = [ProgressEngine(10.0) for _ in range(2)]
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield [engines[own].connect(pair[own], 1 - own, os.getpid()) for own in range(2)]
    for engine in engines:
        engine.close()


def bytes_of(value, nbytes):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_what_is_given_up_passes_for_no_message(ends):
    """The sender's tensor has changed by the time the receiver comes to it."""
    memory, buffer = bytes_of(1, LARGE), bytes_of(0, LARGE)
    sent = ends[0].send(memory, TAG)
    sent.abandon()
    memory.fill_(2)
    received = ends[1].recv(buffer, TAG)
    with pytest.raises(RuntimeError, match="client 0 has given up its message"):
        received.wait()
    sent.wait()  # its end of the connection goes on


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_abandoned_memory_is_not_written_to(ends, nbytes):
    buffer, after = bytes_of(0, nbytes), bytes_of(0, nbytes)
    received = ends[1].recv(buffer, TAG)
    received.abandon()
    sends = [ends[0].send(bytes_of(value, nbytes), TAG) for value in (1, 2)]
    ends[1].recv(after, TAG).wait()
    assert received.is_done
    for sent in sends:
        sent.wait()
    assert buffer.eq(0).all()
    assert after.eq(2).all()  # the messages after it keep their places


def test_who_sends_to_a_call_that_has_failed_is_not_left_waiting(ends):
    """No caller waits at the receiver's end any more."""
    large = bytes_of(1, LARGE)
    ends[1].recv(bytes_of(0, LARGE), TAG).abandon()
    ends[0].send(large, TAG).wait()


def test_memory_that_is_being_written_to_is_given_up_when_that_is_done(ends, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*args):
        begun.set()
        assert go_on.wait(10)
        read_memory(*args)

    buffer = bytes_of(0, LARGE)
    received = ends[1].recv(buffer, TAG)
    ends[0].send(bytes_of(1, LARGE), TAG)
    monkeypatch.setattr("dtckpt.comm.same_host.read_memory", slowly)
    threads = [threading.Thread(target=received.wait), threading.Thread(target=received.abandon)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert buffer.eq(1).all()


class Failing:
    def wait(self):
        raise RuntimeError("the peer is gone")


class Transfer:
    """A transfer that is under way, or fails."""

    made = ({},)

    def __init__(self, *, fails):
        self.fails, self.is_abandoned = fails, False

    def finish(self):
        if self.fails:
            raise CoordinationError("the peer is gone")

    def abandon(self):
        self.is_abandoned = True


@pytest.mark.parametrize("is_start", [False, True], ids=["waiting", "starting"])
def test_a_failure_abandons_all_transfers_of_a_redistribution(monkeypatch, is_start):
    transfers = [Transfer(fails=False), Transfer(fails=True), Transfer(fails=False)]

    def start(running, *_):
        running._transfers += transfers
        if is_start:
            raise MemoryError
        return []

    monkeypatch.setattr(Redistribution, "_start", start)
    with pytest.raises(MemoryError if is_start else CoordinationError) as caught:
        Redistribution([], []).wait()
    assert [each.is_abandoned for each in transfers] == [is_start, True, True]
    del caught


def test_a_failure_abandons_all_messages_of_the_call():
    calls = []
    pending = PendingWork(
        [], "exchange", (0, 1), receives=[Failing(), None], on_abandon=lambda: calls.append("abandoned")
    )
    with pytest.raises(CoordinationError, match="the peer is gone"):
        pending.wait()
    assert calls


def test_messages_that_nobody_waits_for_are_abandoned():
    calls = []
    pending = PendingWork([Failing()], "exchange", (0, 1), on_abandon=lambda: calls.append("abandoned"))
    del pending
    assert calls
    done = PendingWork([], "exchange", (0, 1), on_abandon=lambda: calls.append("done"))
    done.wait()
    del done
    assert "done" not in calls
