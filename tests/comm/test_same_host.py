"""Endpoints of connections within a host; both ends are in one process here, which may read its own memory."""

import os
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import bits_of

from dtckpt.comm.same_host import EAGER_NBYTES, ProgressEngine

SIZES = (1, EAGER_NBYTES - 1, EAGER_NBYTES, EAGER_NBYTES + 1, 3 << 20)


class Line:
    """A connection between clients 0 and 1; ``ends[0]`` is client 0's."""

    def __init__(self, timeout_s=60.0):
        self.engines = [ProgressEngine(timeout_s) for _ in range(2)]
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends = [self.engines[own].connect(pair[own], 1 - own, os.getpid()) for own in range(2)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine in self.engines:
            engine.end()


@pytest.fixture
def line():
    with Line() as made:
        yield made


@pytest.fixture
def third(line):
    """The end, at client 2, of another connection of client 0, whose own end is the second value."""
    engine = ProgressEngine(10.0)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield engine.connect(far, 0, os.getpid()), line.engines[0].connect(near, 2, os.getpid())
    engine.end()


def numbers(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def room_for(tensor):
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


@pytest.mark.parametrize("is_posted", [True, False], ids=["posted", "unexpected"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_message_arrives_whole(line, nbytes, is_posted):
    message = numbers(nbytes)
    room = room_for(message)
    received = line.ends[1].recv(room, 5) if is_posted else None
    sent = line.ends[0].send(message, 5)
    assert not sent.is_done
    if received is None:
        marker = line.ends[0].send(message[:1], 6, is_answered=True)
        line.ends[1].recv(room_for(message[:1]), 6).wait()  # so the one before it has come, too
        assert marker.is_done
        received = line.ends[1].recv(room, 5)
    received.wait()
    sent.wait()
    assert torch.equal(room, message)


@pytest.mark.parametrize(
    "message",
    [
        torch.tensor(3.5),
        torch.tensor([True, False, True]),
        torch.arange(6, dtype=torch.bfloat16),
        torch.full((3, 20_000), 1 + 2j),
        torch.arange(100_000.0)[40_000:],
    ],
    ids=["0-d", "bool", "bfloat16", "complex", "with an offset"],
)
def test_any_dtype_and_place_will_do(line, message):
    room = room_for(message)
    sent = line.ends[0].send(message, 0)
    line.ends[1].recv(room, 0).wait()
    sent.wait()
    assert bits_of(room) == bits_of(message)


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(data):
    """Both clients send and receive at once, in any order, small and large."""
    plan = data.draw(
        st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from((1, 100, EAGER_NBYTES, EAGER_NBYTES + 7))),
            max_size=40,
        )
    )
    messages = [(giver, tag, numbers(nbytes, seed)) for seed, (giver, tag, nbytes) in enumerate(plan)]
    # Each end's receives of one tag are posted in the order of the sends; how the two are mixed is drawn.
    steps = [("send", number) for number in range(len(plan))] + [("recv", number) for number in range(len(plan))]
    order = data.draw(st.permutations(steps))
    sends = iter(sorted(number for what, number in order if what == "send"))
    receives = iter(sorted(number for what, number in order if what == "recv"))
    rooms, requests = {}, []
    with Line() as line:
        for what, _ in order:
            number = next(sends if what == "send" else receives)
            giver, tag, message = messages[number]
            if what == "send":
                requests.append(line.ends[giver].send(message, tag))
            else:
                rooms[number] = room_for(message)
                requests.append(line.ends[1 - giver].recv(rooms[number], tag))
        threads = [
            threading.Thread(target=lambda own=own: [each.wait() for each in requests if each._engine is own])
            for own in line.engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    for number, (_, _, message) in enumerate(messages):
        assert torch.equal(rooms[number], message)


def test_sending_never_blocks_however_much_is_unread(line):
    messages = [numbers(1000, seed) for seed in range(3000)]
    sent = [line.ends[0].send(message, 1) for message in messages]
    rooms = [room_for(message) for message in messages]
    receives = [line.ends[1].recv(room, 1) for room in rooms]
    taking = threading.Thread(target=lambda: [each.wait() for each in receives])
    taking.start()
    for each in sent:
        each.wait()
    taking.join(20)
    assert not taking.is_alive()
    assert all(map(torch.equal, rooms, messages))


@pytest.mark.parametrize("nbytes", [10, EAGER_NBYTES + 10])
def test_another_size_is_refused_by_the_receiver_and_the_sender_goes_on(line, nbytes):
    sent = line.ends[0].send(numbers(nbytes), 1)
    room = torch.zeros(nbytes + 1, dtype=torch.uint8)
    received = line.ends[1].recv(room, 1)
    with pytest.raises(RuntimeError, match=f"client 0 sent {nbytes} bytes, expected {nbytes + 1}"):
        received.wait()
    sent.wait()
    assert not room.any()


def test_a_sender_is_done_when_its_message_is_received_unless_an_answer_says_so(line):
    message = numbers(8)
    assert line.ends[0].send(message, 1, is_answered=True).is_done
    sent = line.ends[0].send(message, 2)
    # Client 1 sees that the message has come, but nobody there has asked for it.
    marker = line.ends[0].send(message, 3, is_answered=True)
    line.ends[1].recv(room_for(message), 3).wait()
    assert marker.is_done
    assert not sent.is_done
    line.ends[1].recv(room_for(message), 2).wait()
    sent.wait()


@pytest.mark.parametrize("has_unread", [False, True])
def test_what_was_sent_before_the_end_arrives_and_nothing_else_is_waited_for(line, has_unread):
    message = numbers(100)
    if has_unread:  # the system says then that the connection was reset
        line.ends[1].send(message, 9, is_answered=True)
    line.ends[0].send(message, 1, is_answered=True)
    line.engines[0].end()
    room = room_for(message)
    received, never = line.ends[1].recv(room, 1), line.ends[1].recv(room_for(message), 2)
    received.wait()
    assert torch.equal(room, message)
    with pytest.raises(RuntimeError, match="client 0 has ended"):
        never.wait()
    for too_late in (line.ends[1].recv(room, 2), line.ends[1].send(message, 2)):
        with pytest.raises(RuntimeError, match="client 0 has ended"):
            too_late.wait()


def test_a_sender_whose_message_nobody_can_take_any_more_hears_of_it(line):
    sent = [line.ends[1].send(numbers(nbytes), 1) for nbytes in (8, EAGER_NBYTES + 1)]
    line.engines[0].end()
    for each in sent:
        with pytest.raises(RuntimeError, match="client 0 has ended"):
            each.wait()


def test_a_wait_is_bounded_and_names_whom_it_is_for():
    with Line(timeout_s=0.05) as line:
        received = line.ends[1].recv(torch.zeros(3), 1)
        with pytest.raises(RuntimeError, match=r"client 0 in 0\.05 s"):
            received.wait()


def test_memory_that_cannot_be_read_is_an_error_of_the_receiver(line):
    class Gone(torch.Tensor):
        def data_ptr(self):
            return 4096  # nothing is mapped there

    sent = line.ends[0].send(numbers(EAGER_NBYTES + 1).as_subclass(Gone), 1)
    received = line.ends[1].recv(torch.zeros(EAGER_NBYTES + 1, dtype=torch.uint8), 1)
    with pytest.raises(RuntimeError, match="the memory of client 0 cannot be read"):
        received.wait()
    sent.wait()


def test_threads_wait_at_once_each_for_its_own(line):
    """The last that is waited for comes first, so whoever looks at the socket serves the others."""
    count = 8
    rooms = [torch.zeros(EAGER_NBYTES + 1, dtype=torch.uint8) for _ in range(count)]
    receives = [line.ends[1].recv(room, tag) for tag, room in enumerate(rooms)]
    threads = [threading.Thread(target=each.wait) for each in receives]
    for thread in threads:
        thread.start()
    messages = [numbers(EAGER_NBYTES + 1, tag) for tag in range(count)]
    sent = [line.ends[0].send(messages[tag], tag) for tag in reversed(range(count))]
    for each in sent:
        each.wait()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert all(map(torch.equal, rooms, messages))


def test_what_is_attended_to_gets_on_although_nobody_waits(line):
    message = numbers(EAGER_NBYTES + 1)
    room = room_for(message)
    line.ends[1].recv(room, 1)
    line.engines[1].attend()
    line.engines[1].attend()  # one thread is enough
    (thread,) = [each for each in threading.enumerate() if each.name == "dtckpt-messages"]
    line.ends[0].send(message, 1).wait()
    thread.join(10)
    assert not thread.is_alive()
    assert torch.equal(room, message)


def test_what_is_on_its_way_ends_with_its_engine(line):
    received, sent = line.ends[1].recv(torch.zeros(1), 1), line.ends[1].send(numbers(8), 2)
    line.engines[1].end()
    for each in (received, sent):
        with pytest.raises(RuntimeError, match="the connection with client 0 is closed"):
            each.wait()


def test_what_was_offered_passes_for_no_message_when_the_connection_is_closed(line):
    """The receiver still finds the offer, but the sender's call has failed, and the tensor may have changed."""
    message = numbers(EAGER_NBYTES + 1)
    sent = line.ends[0].send(message, 1)
    line.engines[0].end()
    message.fill_(7)
    assert sent.error
    with pytest.raises(RuntimeError, match="client 0 has given up what it was sending"):
        line.ends[1].recv(room_for(message), 1).wait()


def fill_socket(line):
    """Send from client 0 until its socket has no room; return the last message."""
    for _ in range(10_000):
        sent = line.ends[0].send(numbers(EAGER_NBYTES), 1, is_answered=True)
        if line.ends[0].has_backlog:
            return sent
    raise AssertionError("the socket takes more and more")


def test_who_waits_for_an_acknowledgement_gets_it_although_nobody_waits_at_the_other_end(line):
    """Client 0's socket is full when it has received, and it goes on to something else."""
    last = fill_socket(line)
    large = numbers(EAGER_NBYTES + 1)
    sent = line.ends[1].send(large, 2)
    line.ends[0].recv(room_for(large), 2).wait()
    sent.wait()
    assert not last.is_done


def test_an_engine_that_ends_sends_what_its_sockets_had_no_room_for(line, monkeypatch):
    """Else whoever waits for an acknowledgement hears that the client has ended."""
    monkeypatch.setattr(line.engines[0], "attend", lambda: None)
    fill_socket(line)
    large = numbers(EAGER_NBYTES + 1)
    sent = line.ends[1].send(large, 2)
    line.ends[0].recv(room_for(large), 2).wait()
    waiting = threading.Thread(target=sent.wait)
    waiting.start()
    line.engines[0].end()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not sent.error


def test_a_client_that_ended_is_no_obstacle_to_messages_of_others(line, third):
    theirs, ours = third
    fill_socket(line)
    line.engines[1].end()
    for seed in range(3):
        message = numbers(10, seed)
        room = room_for(message)
        received = ours.recv(room, seed)
        theirs.send(message, seed, is_answered=True)
        received.wait()
        assert torch.equal(room, message)


def test_a_failure_ends_the_wait_for_whatever_is_waited_for_together_with_it(line, third):
    """Client 2 is alive and slow; client 1 has ended."""
    failures = []
    line.ends[0].recv(torch.zeros(1), 1, failures=failures)
    received = third[1].recv(torch.zeros(1), 1, failures=failures)
    line.engines[1].end()
    with pytest.raises(RuntimeError, match="client 1 has ended"):
        received.wait()
