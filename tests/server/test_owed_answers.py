"""What the coordinator owes on heartbeat streams: when it is sent, in which order, and how much of it waits.

In one event loop, without gRPC; `test_streams` has clients and coordinators that speak over it.
"""

import asyncio

import grpc
import pytest
from dtckpt_server import heartbeat_streams as streams_module
from dtckpt_server.events import Identity, Register
from dtckpt_server.heartbeat_streams import MAX_UNSENT, Stream, Streams
from dtckpt_server.rules import Rules
from dtckpt_server.service import CoordinatorService

from dtckpt._proto import coordinator_pb2 as pb

LONG_S = 600.0
WHO = pb.TaskIdentity(job="job", task=0, incarnation=1)


class Context:
    """What gRPC gives a stream's handler; its client reads nothing before it is let."""

    def __init__(self, is_read=True):
        self.written = []
        self.is_read = asyncio.Event()
        if is_read:
            self.is_read.set()

    async def write(self, response):
        await self.is_read.wait()
        self.written.append(response)

    def peer(self):
        return "test"


def answer(sequence):
    return pb.HeartbeatStreamResponse(sequence=sequence)


def test_slow_reader_costs_a_bounded_number_of_notices():
    async def flood():
        context = Context(is_read=False)
        stream = Stream(context)
        for _ in range(3 * MAX_UNSENT):
            stream.tell(pb.HeartbeatStreamResponse(notice=pb.Notice()))
        context.is_read.set()
        await stream.settle()
        stream.end()
        return len(context.written)

    assert asyncio.run(flood()) == MAX_UNSENT


def test_answers_to_heartbeats_on_all_streams_are_sent_together():
    async def beat():
        contexts, streams = [Context() for _ in range(3)], Streams(0.001)
        open_streams = [Stream(context) for context in contexts]
        for number in range(2):
            for stream in open_streams:
                await streams.answer(stream, answer(number))
        assert not any(context.written for context in contexts)
        streams._send_owed()
        await asyncio.gather(*(stream.settle() for stream in open_streams))
        told = [[response.sequence for response in context.written] for context in contexts]
        for stream in open_streams:
            stream.end()
        return told

    assert asyncio.run(beat()) == 3 * [[0, 1]]


def test_a_stream_that_has_ended_owes_nothing():
    """Its answer may become due after it; the event loop may end before a task that sends would begin."""

    async def beat():
        context, streams = Context(), Streams(LONG_S)
        stream = Stream(context)
        await streams.answer(stream, answer(1))
        stream.end()
        streams._send_owed()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(beat()) == set()


def test_nothing_overtakes_an_answer():
    async def beat():
        context, streams = Context(), Streams(LONG_S)
        stream = Stream(context)
        await streams.answer(stream, answer(1))
        stream.owe(answer(2))
        await stream.send_owed()
        stream.end()
        return [response.sequence for response in context.written]

    assert asyncio.run(beat()) == [1, 2]


def test_who_beats_and_does_not_read_is_not_read_either():
    async def beat():
        context, streams = Context(is_read=False), Streams(LONG_S)
        stream = Stream(context)
        for number in range(MAX_UNSENT - 1):
            await streams.answer(stream, answer(number))
        last = asyncio.ensure_future(streams.answer(stream, answer(MAX_UNSENT - 1)))
        await asyncio.sleep(0)
        assert not last.done()
        context.is_read.set()
        await last
        stream.end()
        return [response.sequence for response in context.written]

    assert asyncio.run(beat()) == list(range(MAX_UNSENT))


@pytest.mark.parametrize("timeout_s", [0.1, 60.0])
def test_an_answer_is_never_late_for_the_next_heartbeat(timeout_s):
    """A client takes a stream for broken that is silent for an interval, a sixth of the timeout."""
    service = CoordinatorService(Rules(timeout_s, 1))
    assert service._streams._gather_s <= timeout_s / 6 / 4


def test_slow_reader_costs_a_bounded_number_of_bytes(monkeypatch):
    """Answers hold all clients' payloads; beyond some megabytes a client is told to read first, and to repeat."""
    monkeypatch.setattr(streams_module, "MAX_UNSENT_NBYTES", 10_000)

    async def arrive():
        context, service = Context(is_read=False), CoordinatorService(Rules(LONG_S, 1))
        service.apply(Register(Identity("job", 0, 1), 1, 0, "", ""))
        stream = Stream(context)
        for number in range(8):
            vote = pb.Vote(ok=True, payload=bytes(4096))
            arrival = pb.ArriveRequest(
                task=WHO, name=f"b{number}", call=number + 1, timeout_s=9, vote=vote, collect=True
            )
            request = pb.HeartbeatStreamRequest(task=WHO, sequence=number + 1, arrival=arrival)
            stream.spawn(service._answer_arrival(request, stream, context))
        await asyncio.sleep(0)
        context.is_read.set()
        await stream.settle()
        stream.end()
        return context.written

    told = asyncio.run(arrive())
    assert [response.sequence for response in told] == list(range(1, 9))
    assert [bool(response.arrived) for response in told] == 4 * [True] + 4 * [False]
    assert {response.refusal.code for response in told[4:]} == {grpc.StatusCode.UNAVAILABLE.value[0]}
