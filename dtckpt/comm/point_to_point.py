"""Point-to-point messages of CPU tensors between clients: by same-host transport if it works, else by Gloo.

Before two clients exchange their first message they make a handshake through Gloo. The handshake finds out whether both
run on one host and may read each other's memory. If so, `dtckpt.comm.same_host` carries their messages, else Gloo
does::

    client 0                        (all through Gloo)                        client 1

    binds a listening socket
    host, socket address, pid, probe  ---------------->
                                      <----------------  host, socket address, pid, probe
    reads client 1's probe                               reads client 0's probe, connects to the socket
    1: it could, 0: it could not      ---------------->
                                      <----------------  1: it could, 0: it could not
    both 1: accepts the connection                       both 1: uses the connection

Both clients see the same two answers, so they choose the same transport.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dtckpt.comm import process_groups
from dtckpt.comm.same_host import Endpoint, ProgressEngine, Request, read_memory
from dtckpt.config import Config
from dtckpt.errors import CoordinationError

logger = logging.getLogger("dtckpt.point_to_point")

END_OF_TAGS = 2**31 - 1
"""Tag of handshakes; tags of messages are lower."""

_HOST_NBYTES = _PROBE_NBYTES = 16
_HELLO = struct.Struct(f"={_HOST_NBYTES}s16sQQ{_PROBE_NBYTES}s")
"""Host, address of the listening socket, process, address of the probe in its memory, bytes of the probe."""
_CREDENTIALS = struct.Struct("=iII")
"""C's ``struct ucred``: process, user, group."""


class PendingMessage(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Return when it is done. Raises RuntimeError: the other client is gone, or did not come in time."""


class Transport:
    """Sends and receives the messages of one exchange.

    Args:
        endpoints: Connections within this host, by client; None or missing: Gloo carries the client's messages.
        gloo: A Gloo backend that reaches all clients.
        ranks: The clients' ranks in the backend.
    """

    __slots__ = ("_endpoints", "_failures", "_gloo", "_ranks", "_requests")

    def __init__(
        self, endpoints: Mapping[int, Endpoint | None], gloo: Any, ranks: Mapping[int, int] | Sequence[int]
    ) -> None:
        self._endpoints, self._gloo, self._ranks = endpoints, gloo, ranks
        self._requests: list[Request] = []
        self._failures: list[str] = []

    def send(self, memory: torch.Tensor, client: int, tag: int, *, is_answered: bool = False) -> PendingMessage:
        """Send a contiguous CPU tensor; see `Endpoint.send`. Raises RuntimeError: the client is gone (Gloo only)."""
        endpoint = self._endpoints.get(client)
        if endpoint is None:
            work: PendingMessage = self._gloo.send([memory], self._ranks[client], tag)
            return work
        self._requests.append(endpoint.send(memory, tag, is_answered=is_answered, failures=self._failures))
        return self._requests[-1]

    def recv(self, memory: torch.Tensor, client: int, tag: int) -> PendingMessage:
        """Receive into a contiguous CPU tensor. Raises RuntimeError: the client is gone (Gloo only)."""
        endpoint = self._endpoints.get(client)
        if endpoint is None:
            work: PendingMessage = self._gloo.recv([memory], self._ranks[client], tag)
            return work
        self._requests.append(endpoint.recv(memory, tag, failures=self._failures))
        return self._requests[-1]

    def abandon(self) -> None:
        """Free the memory of unfinished messages for other use. Gloo cannot do that: its messages go on."""
        for request in self._requests:
            request.abandon()


def open_transport(members: Sequence[int], peers: Set[int]) -> Transport:
    """Return a transport between this client and some peers.

    Collective: Over ``members`` as `process_groups.point_to_point_backend`. Before the first message between this
    client and a peer, the two make a handshake, bounded by the process group's timeout.

    Args:
        members: Clients, this one among them.
        peers: The members that this client sends to or receives from. Each of them calls with this client as a peer.

    Raises:
        CoordinationError: There is no default group that spans the clients, this client is not among them, or a peer
            is gone or did not come in time.
    """
    gloo, ranks = process_groups.point_to_point_backend(members)
    if not isinstance(gloo, dist.ProcessGroupGloo):
        return Transport({}, gloo, ranks)
    connections = _current_connections()
    if not connections.endpoints.keys() >= peers:
        connections.connect(peers, gloo, ranks)
    return Transport(connections.endpoints, gloo, ranks)


def ensure_progress() -> None:
    """Have messages progress even if no thread of this client waits for them; see `ProgressEngine.ensure_progress`."""
    _current_connections().engine.ensure_progress()


class Connections:
    """The outcomes of this client's handshakes, for as long as a default process group lives."""

    def __init__(self, timeout_s: float) -> None:
        self.engine = ProgressEngine(timeout_s)
        self.endpoints: dict[int, Endpoint | None] = {}
        """By client; None for clients that only Gloo reaches."""
        self._handshakes: dict[int, Handshake] = {}
        """By client, unfinished handshakes. Another thread, or a call after a failure, uses the same handshake again,
        because the other client has its half of it."""
        self._lock = threading.Lock()
        self._timeout_s = timeout_s

    def connect(self, peers: Set[int], gloo: Any, ranks: Mapping[int, int] | Sequence[int]) -> None:
        """Make the handshakes that are missing with some peers.

        Each peer does the same with this client; its other peers may differ from this client's.
        """
        with self._lock:
            new = sorted(set(peers) - self.endpoints.keys())
            # All handshakes begin before any is waited for, so that their latencies overlap.
            for client in new:
                if client not in self._handshakes:
                    with _failures_named(client):  # the client may be gone already
                        self._handshakes[client] = Handshake(client, gloo, ranks[client])
            handshakes = [self._handshakes[client] for client in new]
        # No deadlock, because every client finishes its handshakes in ascending order of the peers. If A waits for B,
        # and B still waits for C, then C < A, since B would take A after C. So along a chain of waits, each client is
        # lower than the client two places before, and the chain never closes to a cycle.
        for client, handshake in zip(new, handshakes, strict=True):
            with _failures_named(client):
                self.endpoints[client] = handshake.finish(self.engine, self._timeout_s)
            self._handshakes.pop(client, None)  # it holds the backend


@contextmanager
def _failures_named(client: int) -> Iterator[None]:
    """Raise a failed handshake as a `CoordinationError` that names the other client."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise CoordinationError(f"meeting client {client} failed: {error}") from error


class Handshake:
    """The first messages between this client and another; they decide which transport the two use.

    The constructor starts the handshake and does not wait; `finish` waits.

    Args:
        client: The other client.
        gloo: The backend that carries the handshake.
        rank: The other client's rank in the backend.
    """

    def __init__(self, client: int, gloo: Any, rank: int) -> None:
        self._client, self._gloo, self._rank = client, gloo, rank
        self._host = host_id()
        # A process that finds these random bytes at this address can indeed read this process's memory.
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_NBYTES), _PROBE_NBYTES)
        address = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        # The client with the lower rank listens, the other client connects.
        if dist.get_rank() < client and any(self._host):
            self._listener = _socket()
            self._listener.bind(_socket_name(address))
            self._listener.listen()
        hello = self._host, address, os.getpid(), ctypes.addressof(self._probe), self._probe.raw
        try:
            self._wait_for_hello = self._exchange(_HELLO.pack(*hello))
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            raise
        # In a tuple, because None is also an outcome: Gloo carries the messages.
        self._outcome: tuple[Endpoint | None] | None = None
        self._lock = threading.Lock()

    def finish(self, engine: ProgressEngine, timeout_s: float) -> Endpoint | None:
        """Return the endpoint of the connection with the other client, None if Gloo carries the messages.

        Blocks: On the other client's handshake with this one.

        Raises:
            RuntimeError: The other client is gone, or did not come in time.
        """
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = (self._connect(engine, timeout_s),)
                finally:
                    if self._listener is not None:
                        self._listener.close()
            return self._outcome[0]

    def _connect(self, engine: ProgressEngine, timeout_s: float) -> Endpoint | None:
        host, address, pid, probe_address, expected_probe = _HELLO.unpack(self._wait_for_hello())
        if host != self._host or not any(host):
            return None
        connection = None if self._listener else _socket()
        can_reach = False
        with suppress(OSError):  # two hosts may have equal ids, and a host may forbid reading or connecting
            probe = ctypes.create_string_buffer(_PROBE_NBYTES)
            read_memory(pid, probe_address, ctypes.addressof(probe), _PROBE_NBYTES)
            if connection is not None:
                connection.connect(_socket_name(address))
            can_reach = probe.raw == expected_probe
        can_be_reached = self._exchange(bytes([can_reach]))() == b"\1"
        if not (can_reach and can_be_reached):
            logger.info("client %d is on this host, but one of the two may not read the other's memory", self._client)
            if connection is not None:
                connection.close()
            return None
        if self._listener is not None:
            # The other client has connected before it sent its answer, so this does not wait.
            connection = _accept(self._listener, pid, timeout_s)
        assert connection is not None  # noqa: S101  (a client without a listener has made one above)
        logger.debug("messages to client %d, process %d of this host, go past the network", self._client, pid)
        return engine.connect(connection, self._client, pid)

    def _exchange(self, data: bytes) -> Callable[[], bytes]:
        """Start to exchange equally many bytes with the other client; return a function that waits for its bytes."""
        ours, theirs = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (data, bytes(len(data))))
        # Two rounds with one tag do not mix: Gloo keeps the order of one pair's messages.
        works = self._gloo.recv([theirs], self._rank, END_OF_TAGS), self._gloo.send([ours], self._rank, END_OF_TAGS)

        def wait() -> bytes:
            for work in works:
                work.wait()
            return theirs.numpy().tobytes()

        return wait


_connections: WeakKeyDictionary[dist.ProcessGroup, Connections] = WeakKeyDictionary()
_lock = threading.Lock()


def _current_connections() -> Connections:
    """Return the connections that belong to the present default process group; make them at the first call."""
    world = dist.group.WORLD
    assert world is not None  # noqa: S101  (only clients of a process group have messages)
    connections = _connections.get(world)
    if connections is None:
        with _lock:
            connections = _connections.get(world)
            if connections is None:
                connections = _connections[world] = Connections(process_groups.timeout_of(world).total_seconds())
                weakref.finalize(world, connections.engine.close)
    return connections


def host_id() -> bytes:
    """Return an id that processes share if the same-host transport can work between them; zeros: it never can."""
    if sys.platform != "linux" or not Config.from_environ().uses_host_transport:
        return bytes(_HOST_NBYTES)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        # Abstract socket names belong to a network namespace, process ids to a process namespace.
        namespaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return bytes(_HOST_NBYTES)
    return hashlib.blake2b(boot + repr(namespaces).encode(), digest_size=_HOST_NBYTES).digest()


def _accept(listener: socket.socket, pid: int, timeout_s: float) -> socket.socket:
    """Return the connection that a process has made already; close connections of any other process."""
    listener.settimeout(timeout_s)
    while True:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[0] == pid:
            return connection
        connection.close()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _socket_name(address: bytes) -> bytes:
    """Return an abstract socket name (``man 7 unix``): outside of any file system, but visible to users."""
    return b"\0dtckpt-" + address.hex().encode()
