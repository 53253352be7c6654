"""What a barrier at the coordinator is measured beside: the transport alone, torch's store barrier, and etcd.

All return the median of the seconds that rounds took, from the first client's first call until the last one is through.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CHANNELS = 16
LIMIT_S = 120.0
ECHO = "from benchmarks.rivals import serve_echo; serve_echo()"
_Field = descriptor_pb2.FieldDescriptorProto
_BYTES, _BOOL, _INT64 = _Field.TYPE_BYTES, _Field.TYPE_BOOL, _Field.TYPE_INT64
ETCD_MESSAGES: dict[str, dict[str, tuple[int, int | str]]] = {
    "Header": {"revision": (3, _INT64)},
    "PutRequest": {"key": (1, _BYTES), "value": (2, _BYTES)},
    "PutResponse": {"header": (1, "Header")},
    "RangeRequest": {"key": (1, _BYTES), "range_end": (2, _BYTES), "count_only": (9, _BOOL)},
    "RangeResponse": {"header": (1, "Header"), "count": (4, _INT64)},
    "WatchCreateRequest": {"key": (1, _BYTES), "start_revision": (3, _INT64)},
    "WatchRequest": {"create_request": (1, "WatchCreateRequest")},
    "WatchResponse": {"header": (1, "Header"), "created": (3, _BOOL)},
}
"""As much of etcd's protocol as is needed here: fields by name, each with its number and type."""


async def connect(stack: AsyncExitStack, port: int) -> list[grpc.aio.Channel]:
    """Open connections that all clients share, so that what they cost is not what is measured."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    return [
        await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options))
        for _ in range(CHANNELS)
    ]


async def rounds_of(rounds: int, num_clients: int, client: Callable[[int, int], Awaitable[object]]) -> float:
    """Let all clients go through rounds together; the first one, which opens connections, does not count."""
    seconds = []
    for number in range(rounds + 1):
        begin = time.monotonic()
        await asyncio.gather(*(client(task, number) for task in range(num_clients)))
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds[1:])


@contextmanager
def running(command: list[str], *, says_port: bool) -> Iterator[int]:
    """Run a server, and return the port that it says first, if it says one."""
    pipe = subprocess.PIPE if says_port else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield int(process.stdout.readline()) if process.stdout is not None else 0
        finally:
            process.kill()


# --- the transport alone ------------------------------------------------------------------------------------


async def echo_rounds(num_clients: int, rounds: int) -> float:
    """As many calls at one time, to a server of the same kind that answers each with what it got."""
    with running([sys.executable, "-c", ECHO], says_port=True) as port:
        async with AsyncExitStack() as stack:
            calls = [channel.unary_unary("/echo/Echo") for channel in await connect(stack, port)]
            request = bytes(48)  # about an arrival

            async def client(task: int, _: int) -> None:
                await calls[task % CHANNELS](request, timeout=LIMIT_S)

            return await rounds_of(rounds, num_clients, client)


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:  # noqa: ARG002  the base class's
        async def echo(request: bytes, context: Any) -> bytes:  # noqa: ARG001  gRPC's
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


def serve_echo() -> None:
    """Serve until killed."""
    from dtckpt_server.server import options

    async def serve() -> None:
        server = grpc.aio.server(options=options())
        server.add_generic_rpc_handlers((_Echo(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(serve())


# --- torch --------------------------------------------------------------------------------------------------


def store_barriers(num_clients: int, rounds: int) -> float:
    """`torch.distributed.elastic.utils.store.barrier`; each client is a thread with its own connection."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.utils.store import barrier

    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    ready = threading.Barrier(num_clients + 1)

    def client() -> None:
        store = TCPStore("127.0.0.1", host.port, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
        for number in range(rounds + 1):
            ready.wait()
            barrier(store, num_clients, f"b{number}", LIMIT_S)
            ready.wait()

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=client, daemon=True) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    seconds = []
    for _ in range(rounds + 1):
        ready.wait()
        begin = time.monotonic()
        ready.wait()
        seconds.append(time.monotonic() - begin)
    for thread in threads:
        thread.join()
    return statistics.median(seconds[1:])


# --- etcd ---------------------------------------------------------------------------------------------------


def has_etcd() -> bool:
    return shutil.which("etcd") is not None


async def etcd_barriers(num_clients: int, rounds: int) -> float:
    """etcd's own recipe: each client puts a key and counts all; the last one puts the key that the others watch."""
    messages = _etcd_messages()

    def method(channel: grpc.aio.Channel, path: str, kind: str, is_stream: bool = False) -> Any:
        make = channel.stream_stream if is_stream else channel.unary_unary
        request, response = messages[f"{kind}Request"], messages[f"{kind}Response"]
        serialize, parse = request.SerializeToString, response.FromString
        return make(f"/etcdserverpb.{path}", request_serializer=serialize, response_deserializer=parse)

    with _etcd() as port:
        async with AsyncExitStack() as stack:
            channels = await connect(stack, port)
            puts = [method(channel, "KV/Put", "Put") for channel in channels]
            ranges = [method(channel, "KV/Range", "Range") for channel in channels]
            watches = [method(channel, "Watch/Watch", "Watch", is_stream=True) for channel in channels]
            options = {"timeout": LIMIT_S, "wait_for_ready": True}

            async def client(task: int, number: int) -> None:
                own, prefix, go = task % CHANNELS, b"b/%d/" % number, b"go/%d" % number
                put, count = messages["PutRequest"], messages["RangeRequest"]
                await puts[own](put(key=b"%s%d" % (prefix, task), value=b"1"), **options)
                end = prefix[:-1] + b"0"  # what follows the slash
                found = await ranges[own](count(key=prefix, range_end=end, count_only=True), **options)
                if found.count == num_clients:
                    await puts[own](put(key=go, value=b"1"), **options)
                    return
                watch = watches[own](**options)
                since = messages["WatchCreateRequest"](key=go, start_revision=found.header.revision + 1)
                await watch.write(messages["WatchRequest"](create_request=since))
                while (await watch.read()).created:
                    pass
                watch.cancel()

            return await rounds_of(rounds, num_clients, client)


@contextmanager
def _etcd() -> Iterator[int]:
    with socket.socket() as one, socket.socket() as other, tempfile.TemporaryDirectory() as folder:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        port, peers = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
        number = one.getsockname()[1]
        one.close()
        other.close()
        command = ["etcd", "--data-dir", folder, "--initial-cluster", f"default={peers}"]
        for name, value in (("client", port), ("peer", peers)):
            command += [f"--listen-{name}-urls", value]
        command += ["--advertise-client-urls", port, "--initial-advertise-peer-urls", peers]
        with running(command, says_port=False):
            yield number


def _etcd_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="etcd.proto", package="etcdserverpb", syntax="proto3")
    for name, fields in ETCD_MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            added = message.field.add(name=field, number=number, label=_Field.LABEL_OPTIONAL)
            if isinstance(kind, str):
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".etcdserverpb.{kind}"
            else:
                added.type = kind  # an enumeration in the stubs
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"etcdserverpb.{name}") for name in ETCD_MESSAGES)
    return {each.name: message_factory.GetMessageClass(each) for each in found}
