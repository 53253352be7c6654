"""Requests of any kind, well-formed or not: no crash, no leak, and honest clients notice nothing.

``FUZZED_REQUESTS=10000`` makes it that many.
"""

import itertools
import os
import random
import secrets
import threading
from collections import Counter
from pathlib import Path

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from support.client_calls import leave_all, same_error, together
from support.coordinators import server_process

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import feeds_pb2 as feeds_pb
from dtckpt.coordination.api import Member, Vote
from dtckpt.coordination.grpc_client import GrpcCoordination

REQUESTS = int(os.environ.get("FUZZED_REQUESTS", "2000"))
BATCH = 50
ON_STREAMS, STREAM_LENGTH = 10, 5
"""How many requests of a batch go on heartbeat streams, and how many on each."""
GROWTH_MB = 40
SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
FEEDS = feeds_pb.DESCRIPTOR.services_by_name["Feeds"]
UNARY = [method for method in (*SERVICE.methods, *FEEDS.methods) if not method.client_streaming]
STREAM = SERVICE.methods_by_name["HeartbeatStream"]
JOBS = ("", "fuzz", "fuzz2", "ü", "x" * 300)
STREAMERS = [pb.TaskIdentity(job="streams", task=task, incarnation=task + 1) for task in range(2)]
CALLS = itertools.count(1)
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED", "RESOURCE_EXHAUSTED"}


def number(draw):
    return draw.choice((0, 1, 2, 3, 7, 1000, 100_001, 2**31, 2**32 - 1))


def fill(message, draw):
    """Set some of a message's fields to something."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.2:
            continue
        if field.type == field.TYPE_MESSAGE:
            fill(getattr(message, field.name), draw)
        elif field.is_repeated:
            getattr(message, field.name).extend(number(draw) for _ in range(draw.randrange(5)))
        elif field.type == field.TYPE_BOOL:
            setattr(message, field.name, draw.random() < 0.5)
        elif field.type == field.TYPE_DOUBLE:
            setattr(message, field.name, draw.choice((-1.0, 0.0, 1e-9, 0.01, 1e300, float("inf"), float("nan"))))
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, draw.randbytes(draw.choice((0, 1, 256, 4097))))
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, draw.choice(JOBS))
        else:
            setattr(message, field.name, number(draw))


def request(method, draw):
    """Return the bytes of a request: of some message, of one with flipped bits, or just bytes."""
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randrange(200))
    message = GetMessageClass(method.input_type)()
    fill(message, draw)
    if method.name == "Subscribe":
        message.max_wait_s = draw.choice((-1.0, 0.0, 0.01, float("nan")))  # else most of them would wait
    if method.client_streaming and kind > 0.15:
        message.task.CopyFrom(draw.choice(STREAMERS) if kind > 0.95 else STREAMERS[0])
        if message.HasField("arrival") and kind > 0.2:
            message.arrival.task.CopyFrom(message.task)
        if message.HasField("arrival") and kind > 0.5:
            message.arrival.MergeFrom(pb.ArriveRequest(name="fuzz", call=next(CALLS), timeout_s=0.01))
            for name in ("participants", "operation", "position", "report"):
                message.arrival.ClearField(name)
            message.arrival.vote.payload = b""
        return message.SerializeToString()
    is_in_honest_job = "task" in method.input_type.fields_by_name and kind > 0.8 and method.name != "Register"
    if is_in_honest_job:
        message.task.job = "honest"  # whose incarnations a client cannot guess
    data = bytearray(message.SerializeToString())
    if kind < 0.3 and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def status_of(call):
    try:
        call.result()
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


def beat(sequence):
    return pb.HeartbeatStreamRequest(task=STREAMERS[0], sequence=sequence).SerializeToString()


def stream_of(channel, requests):
    """Send requests on one heartbeat stream, and a heartbeat; return the answers until that is answered."""
    is_over = threading.Event()

    def sent():
        yield from (*requests, beat(2**63))
        is_over.wait(5.0)  # a client that closes a stream at once hears nothing of arrivals

    answers = []
    call = channel.stream_stream(f"/{SERVICE.full_name}/HeartbeatStream")(sent(), timeout=5.0)
    try:
        for data in call:
            answers.append(pb.HeartbeatStreamResponse.FromString(data))
            if answers[-1].sequence == 2**63:
                break
    except grpc.RpcError as error:
        return answers, (error.code().name, error.details())
    finally:
        is_over.set()
        call.cancel()
    return answers, ("OK", "")


def rss_mb(process):
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1000


@pytest.mark.processes
def test_fuzzed_requests():
    draw = random.Random(0)
    statuses, ends, messages = Counter(), Counter(), set()
    with server_process(heartbeat_timeout_s=60) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        honest = [
            GrpcCoordination(f"127.0.0.1:{server.port}", Member("honest", client, 2, secrets.randbits(60)))
            for client in range(2)
        ]
        together(honest, lambda client: client.barrier("b", timeout_s=20))
        register = channel.unary_unary(f"/{SERVICE.full_name}/Register")
        for who in STREAMERS:
            register(pb.RegisterRequest(task=who, num_clients=2).SerializeToString(), timeout=5.0)
        before = rss_mb(server.process)
        for batch in range(REQUESTS // BATCH):
            calls = []
            for _ in range(BATCH - ON_STREAMS):
                method = draw.choice(UNARY)
                call = channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}")
                calls.append(call.future(request(method, draw), timeout=draw.choice((0.2, 5.0))))
            for _ in range(ON_STREAMS // STREAM_LENGTH):
                requests = [request(STREAM, draw) for _ in range(STREAM_LENGTH)]
                answers, (status, message) = stream_of(channel, requests)
                ends[status] += 1
                ends["arrived"] += sum(bool(answer.arrived) for answer in answers)
                ends["refused"] += sum(answer.HasField("refusal") for answer in answers)
                messages.add((status, message)) if status not in REFUSALS else None
            if batch % 5 == 0:
                assert not any(result.error for result in together(honest, at_b).values())
                failed = together(honest, lambda c: c.barrier("b", Vote(ok=c.member.client == 0), timeout_s=20))
                same_error(failed, errors.ClientFailedError, "client 1")
            for call in calls:
                status, message = status_of(call)
                statuses[status] += 1
                messages.add((status, message)) if status not in REFUSALS else None
        assert server.process.poll() is None
        assert rss_mb(server.process) - before < GROWTH_MB
        leave_all(honest)
    unexpected = {entry for entry in messages if entry[0] not in {"OK", "DEADLINE_EXCEEDED"}}
    assert not {entry for entry in unexpected if "DecodeError" not in entry[1]}, (
        "only what is no message may be UNKNOWN"
    )
    assert statuses["OK"] > REQUESTS / 20, statuses
    assert statuses["INVALID_ARGUMENT"] > REQUESTS / 20, statuses
    assert min(ends["OK"], ends["arrived"], ends["refused"]) > REQUESTS / 200, ends
    assert "DEADLINE_EXCEEDED" not in ends, ends  # of streams, which end by themselves
    print(f"calls {dict(statuses)}, streams {dict(ends)}")


def at_b(client):
    return client.barrier("b", timeout_s=20)
