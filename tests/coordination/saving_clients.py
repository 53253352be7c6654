"""Client processes that save, and halt before or after a barrier that a test names; and a network that can be cut."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from support.client_crew import Crew, serve

HEARTBEAT_S = 2.0
UNEVEN_SIZE = 2997
NUM_CLIENTS = 3


@dataclass(frozen=True)
class Halt:
    """Where a client stops and waits for its parent: before it arrives at a barrier, or after it was let through."""

    barrier: str
    side: str  # "before" or "after"


class HaltingCoordination:
    """A coordination that halts before or after one barrier."""

    def __init__(self, inner: Any, pipe: Connection) -> None:
        self._inner = inner
        self._pipe = pipe
        self.halt: Halt | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _pass(self, place: Halt) -> None:
        # The others wait for a client that is killed or frozen here: without heartbeats, for ever; and if
        # it could come back unnoticed, it would write into a checkpoint that the others have given up.
        if place == self.halt:
            self._pipe.send("halted")
            self._pipe.recv()

    def barrier(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pass(Halt(name, "before"))
        verdict = self._inner.barrier(name, *args, **kwargs)
        self._pass(Halt(name, "after"))
        return verdict


def work(port: int, client: int, store_port: int | None, job: str, pipe: Connection) -> None:
    """Do what each message in the pipe says, until one is None."""
    os.environ |= {"RANK": str(client), "WORLD_SIZE": str(NUM_CLIENTS)}
    from dtckpt.coordination.api import Member
    from dtckpt.coordination.connect import set_coordination
    from dtckpt.coordination.fallback import with_fallback
    from dtckpt.coordination.grpc_client import GrpcCoordination

    member = Member(job, client, NUM_CLIENTS, secrets.randbits(60))
    address = f"127.0.0.1:{port}"
    way: Any = GrpcCoordination(address, member, heartbeat_timeout_s=HEARTBEAT_S)
    if store_port is not None:
        os.environ |= _store_at(store_port)
        way = with_fallback(way)
    coordination = HaltingCoordination(way, pipe)
    set_coordination(coordination)
    coordination.register()

    def do(task: tuple[str, Any, Halt | None]) -> Any:
        what, argument, coordination.halt = task
        return DOES[what](argument)

    serve(pipe, do)
    coordination.leave()
    pipe.send("left")


def _save(path: str, timeout_s: float = 40.0, *, devices: int = 1, size: int = NUM_CLIENTS * 1000) -> str:
    """Save the numbers below ``size``."""
    import torch

    import dtckpt

    dtckpt.configure_virtual_devices("CPU", devices)
    mesh = dtckpt.create_distributed_mesh({"client": NUM_CLIENTS, "device": devices})
    layout = dtckpt.Layout([("client", "device")], mesh)
    regions = [layout.region(device, (size,)) for device in mesh.local_device_ids()]
    parts = [torch.arange(region.offset[0], region.offset[0] + region.shape[0]) for region in regions]
    dtckpt.save(path, {"range": dtckpt.pack(parts, layout, (size,))}, options=dtckpt.SaveOptions(timeout_s=timeout_s))
    return "saved"


def _save_unevenly(path: str) -> str:
    """Save a tensor whose chunks the clients share: only such a save has a barrier ``save/edges``."""
    return _save(path, devices=2, size=UNEVEN_SIZE)


def _hold_gil(seconds: float) -> str:
    """Keep the interpreter's lock, so that no other thread of this process runs, as some long calls into C do."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


def _meet(name: str) -> str:
    from dtckpt.coordination.connect import current_coordination

    current_coordination().barrier(name, timeout_s=40.0)
    return "met"


def _save_impatiently(path: str) -> str:
    return _save(path, timeout_s=1.0)


def _store_at(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _has_fallen_back(_: None) -> bool:
    from dtckpt.coordination.connect import current_coordination

    return current_coordination().has_fallen_back


def _go_on_without_coordinator(store_port: int) -> str:
    """Meet at a store from now on, as a training program may decide."""
    import dtckpt

    dtckpt.shutdown_multi_client()
    os.environ |= _store_at(store_port)
    return "gone on"


DOES = {
    "save": _save,
    "save unevenly": _save_unevenly,
    "save impatiently": _save_impatiently,
    "go on without": _go_on_without_coordinator,
    "has fallen back": _has_fallen_back,
    "hold_gil": _hold_gil,
    "meet": _meet,
}


class Savers(Crew):
    """All clients of one job."""

    def __init__(self, ports: Sequence[int], store_port: int | None = None, job: str = "job") -> None:
        arguments = [(port, client, store_port, job) for client, port in enumerate(ports)]
        super().__init__(work, arguments)

    def tell(self, client: int, what: str, argument: Any, halt: Halt | None = None) -> None:
        self.send(client, (what, argument, halt))

    def all(self, what: str, argument: Any) -> list[Any]:
        for client in range(NUM_CLIENTS):
            self.tell(client, what, argument)
        return [self.answer(client)[0] for client in range(NUM_CLIENTS)]

    def release(self, client: int) -> None:
        """Let a halted client go on."""
        self.send(client, "go on")


@contextmanager
def savers(*ports: int, store_port: int | None = None) -> Iterator[Savers]:
    """Start clients; each finds the coordinator at its port, and may fall back to a store where one is given."""
    started = Savers(ports, store_port)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Freeze a process."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Proxy:
    """Hands bytes on to a port of this machine.

    While `flowing` is not set, it holds them back without a word; after `cut` it closes all connections, and each new
    one, until `heal`.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.flowing = threading.Event()
        self.flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                self.num_connections += 1
                if self._is_cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # no client is there
                    near.close()
                    continue
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pump, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.flowing.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._is_cut = True
        for end in list(self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for end in [*self._sockets, self._listener]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in [*self._sockets, self._listener]:
            end.close()


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    started = Proxy(target)
    try:
        yield started
    finally:
        started.close()
