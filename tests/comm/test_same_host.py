"""Endpoints of the same-host transport; both ends are in one process here, which may read its own memory."""

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


class Connection:
    """A connection between clients 0 and 1; ``ends[0]`` is client 0's."""

    def __init__(self, timeout_s=60.0):
        self.engines = [ProgressEngine(timeout_s) for _ in range(2)]
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends = [self.engines[own].connect(pair[own], 1 - own, os.getpid()) for own in range(2)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine in self.engines:
            engine.close()


@pytest.fixture
def connection():
    with Connection() as pair:
        yield pair


@pytest.fixture
def third(connection):
    """The end, at client 2, of another connection of client 0, whose own end is the second value."""
    engine = ProgressEngine(10.0)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield engine.connect(far, 0, os.getpid()), connection.engines[0].connect(near, 2, os.getpid())
    engine.close()


def numbers(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def buffer_like(tensor):
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


@pytest.mark.parametrize("is_posted", [True, False], ids=["posted", "unexpected"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_message_arrives_whole(connection, nbytes, is_posted):
    message = numbers(nbytes)
    buffer = buffer_like(message)
    received = connection.ends[1].recv(buffer, 5) if is_posted else None
    sent = connection.ends[0].send(message, 5)
    assert not sent.is_done
    if received is None:
        marker = connection.ends[0].send(message[:1], 6, is_answered=True)
        connection.ends[1].recv(buffer_like(message[:1]), 6).wait()  # so the message before it has come, too
        assert marker.is_done
        received = connection.ends[1].recv(buffer, 5)
    received.wait()
    sent.wait()
    assert torch.equal(buffer, message)


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
def test_any_dtype_and_place_will_do(connection, message):
    buffer = buffer_like(message)
    sent = connection.ends[0].send(message, 0)
    connection.ends[1].recv(buffer, 0).wait()
    sent.wait()
    assert bits_of(buffer) == bits_of(message)


@settings(deadline=None, max_examples=examples(30))
@given(data=st.data())
def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(data):
    """Both clients send and receive at once, in any order, small and large."""
    plan = data.draw(
        st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from((1, 100, EAGER_NBYTES, EAGER_NBYTES + 7))),
            max_size=40,
        )
    )
    messages = [(sender, tag, numbers(nbytes, seed)) for seed, (sender, tag, nbytes) in enumerate(plan)]
    # Each end's receives of one tag are posted in the order of the sends; how the two are mixed is drawn.
    steps = [("send", number) for number in range(len(plan))] + [("recv", number) for number in range(len(plan))]
    order = data.draw(st.permutations(steps))
    sends = iter(sorted(number for what, number in order if what == "send"))
    receives = iter(sorted(number for what, number in order if what == "recv"))
    buffers, requests = {}, []
    with Connection() as connection:
        for what, _ in order:
            number = next(sends if what == "send" else receives)
            sender, tag, message = messages[number]
            if what == "send":
                requests.append(connection.ends[sender].send(message, tag))
            else:
                buffers[number] = buffer_like(message)
                requests.append(connection.ends[1 - sender].recv(buffers[number], tag))
        threads = [
            threading.Thread(target=lambda own=own: [each.wait() for each in requests if each._engine is own])
            for own in connection.engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    for number, (_, _, message) in enumerate(messages):
        assert torch.equal(buffers[number], message)


def test_sending_never_blocks_however_much_is_unread(connection):
    messages = [numbers(1000, seed) for seed in range(3000)]
    sent = [connection.ends[0].send(message, 1) for message in messages]
    buffers = [buffer_like(message) for message in messages]
    receives = [connection.ends[1].recv(buffer, 1) for buffer in buffers]
    taking = threading.Thread(target=lambda: [each.wait() for each in receives])
    taking.start()
    for each in sent:
        each.wait()
    taking.join(20)
    assert not taking.is_alive()
    assert all(map(torch.equal, buffers, messages))


@pytest.mark.parametrize("nbytes", [10, EAGER_NBYTES + 10])
def test_another_size_is_refused_by_the_receiver_and_the_sender_goes_on(connection, nbytes):
    sent = connection.ends[0].send(numbers(nbytes), 1)
    buffer = torch.zeros(nbytes + 1, dtype=torch.uint8)
    received = connection.ends[1].recv(buffer, 1)
    with pytest.raises(RuntimeError, match=f"client 0 sent {nbytes} bytes, expected {nbytes + 1}"):
        received.wait()
    sent.wait()
    assert not buffer.any()


def test_a_sender_is_done_when_its_message_is_received_unless_an_answer_says_so(connection):
    message = numbers(8)
    assert connection.ends[0].send(message, 1, is_answered=True).is_done
    sent = connection.ends[0].send(message, 2)
    # Client 1 sees that the message has come, but no call there has asked for it.
    marker = connection.ends[0].send(message, 3, is_answered=True)
    connection.ends[1].recv(buffer_like(message), 3).wait()
    assert marker.is_done
    assert not sent.is_done
    connection.ends[1].recv(buffer_like(message), 2).wait()
    sent.wait()


@pytest.mark.parametrize("has_unread", [False, True])
def test_what_was_sent_before_the_end_arrives_and_nothing_else_is_waited_for(connection, has_unread):
    message = numbers(100)
    if has_unread:  # the system says then that the connection was reset
        connection.ends[1].send(message, 9, is_answered=True)
    connection.ends[0].send(message, 1, is_answered=True)
    connection.engines[0].close()
    buffer = buffer_like(message)
    received, never = connection.ends[1].recv(buffer, 1), connection.ends[1].recv(buffer_like(message), 2)
    received.wait()
    assert torch.equal(buffer, message)
    with pytest.raises(RuntimeError, match="client 0 has ended"):
        never.wait()
    for too_late in (connection.ends[1].recv(buffer, 2), connection.ends[1].send(message, 2)):
        with pytest.raises(RuntimeError, match="client 0 has ended"):
            too_late.wait()


def test_a_sender_whose_message_nobody_can_take_any_more_hears_of_it(connection):
    sent = [connection.ends[1].send(numbers(nbytes), 1) for nbytes in (8, EAGER_NBYTES + 1)]
    connection.engines[0].close()
    for each in sent:
        with pytest.raises(RuntimeError, match="client 0 has ended"):
            each.wait()


def test_a_wait_is_bounded_and_names_whom_it_is_for():
    with Connection(timeout_s=0.05) as connection:
        received = connection.ends[1].recv(torch.zeros(3), 1)
        with pytest.raises(RuntimeError, match=r"client 0 in 0\.05 s"):
            received.wait()


def test_memory_that_cannot_be_read_is_an_error_of_the_receiver(connection):
    class Gone(torch.Tensor):
        def data_ptr(self):
            return 4096  # nothing is mapped there

    sent = connection.ends[0].send(numbers(EAGER_NBYTES + 1).as_subclass(Gone), 1)
    received = connection.ends[1].recv(torch.zeros(EAGER_NBYTES + 1, dtype=torch.uint8), 1)
    with pytest.raises(RuntimeError, match="the memory of client 0 cannot be read"):
        received.wait()
    sent.wait()


def test_threads_wait_at_once_each_for_its_own(connection):
    """The last that is waited for comes first, so the waiter that looks at the socket serves the others."""
    count = 8
    buffers = [torch.zeros(EAGER_NBYTES + 1, dtype=torch.uint8) for _ in range(count)]
    receives = [connection.ends[1].recv(buffer, tag) for tag, buffer in enumerate(buffers)]
    threads = [threading.Thread(target=each.wait) for each in receives]
    for thread in threads:
        thread.start()
    messages = [numbers(EAGER_NBYTES + 1, tag) for tag in range(count)]
    sent = [connection.ends[0].send(messages[tag], tag) for tag in reversed(range(count))]
    for each in sent:
        each.wait()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert all(map(torch.equal, buffers, messages))


def test_what_is_attended_to_gets_on_although_nobody_waits(connection):
    message = numbers(EAGER_NBYTES + 1)
    buffer = buffer_like(message)
    connection.ends[1].recv(buffer, 1)
    connection.engines[1].ensure_progress()
    connection.engines[1].ensure_progress()  # one thread is enough
    (thread,) = [each for each in threading.enumerate() if each.name == "dtckpt-messages"]
    connection.ends[0].send(message, 1).wait()
    thread.join(10)
    assert not thread.is_alive()
    assert torch.equal(buffer, message)


def test_what_is_on_its_way_ends_with_its_engine(connection):
    received, sent = connection.ends[1].recv(torch.zeros(1), 1), connection.ends[1].send(numbers(8), 2)
    connection.engines[1].close()
    for each in (received, sent):
        with pytest.raises(RuntimeError, match="the connection with client 0 is closed"):
            each.wait()


def test_what_was_offered_passes_for_no_message_when_the_connection_is_closed(connection):
    """The receiver still finds the offer, but the sender's call has failed, and the tensor may have changed."""
    message = numbers(EAGER_NBYTES + 1)
    sent = connection.ends[0].send(message, 1)
    connection.engines[0].close()
    message.fill_(7)
    assert sent.error
    with pytest.raises(RuntimeError, match="client 0 has given up its message"):
        connection.ends[1].recv(buffer_like(message), 1).wait()


def fill_socket(connection):
    """Send from client 0 until its socket has no room; return the last message."""
    for _ in range(10_000):
        sent = connection.ends[0].send(numbers(EAGER_NBYTES), 1, is_answered=True)
        if connection.ends[0].has_backlog:
            return sent
    raise AssertionError("the socket takes more and more")


def test_who_waits_for_an_acknowledgement_gets_it_although_nobody_waits_at_the_other_end(connection):
    """Client 0's socket is full when it has received, and it goes on to something else."""
    last = fill_socket(connection)
    large = numbers(EAGER_NBYTES + 1)
    sent = connection.ends[1].send(large, 2)
    connection.ends[0].recv(buffer_like(large), 2).wait()
    sent.wait()
    assert not last.is_done


def test_an_engine_that_ends_sends_what_its_sockets_had_no_room_for(connection, monkeypatch):
    """Else a client that waits for an acknowledgement hears that the client has ended."""
    monkeypatch.setattr(connection.engines[0], "ensure_progress", lambda: None)
    fill_socket(connection)
    large = numbers(EAGER_NBYTES + 1)
    sent = connection.ends[1].send(large, 2)
    connection.ends[0].recv(buffer_like(large), 2).wait()
    waiting = threading.Thread(target=sent.wait)
    waiting.start()
    connection.engines[0].close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not sent.error


def test_a_client_that_ended_is_no_obstacle_to_messages_of_others(connection, third):
    theirs, ours = third
    fill_socket(connection)
    connection.engines[1].close()
    for seed in range(3):
        message = numbers(10, seed)
        buffer = buffer_like(message)
        received = ours.recv(buffer, seed)
        theirs.send(message, seed, is_answered=True)
        received.wait()
        assert torch.equal(buffer, message)


def test_a_failure_ends_the_wait_for_whatever_is_waited_for_together_with_it(connection, third):
    """Client 2 is alive and slow; client 1 has ended."""
    failures = []
    connection.ends[0].recv(torch.zeros(1), 1, failures=failures)
    received = third[1].recv(torch.zeros(1), 1, failures=failures)
    connection.engines[1].close()
    with pytest.raises(RuntimeError, match="client 1 has ended"):
        received.wait()
