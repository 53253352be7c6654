"""Pairwise messages of CPU tensors among clients: within a host past the network, between hosts through Gloo.

Two clients find out at their first exchange, through Gloo, whether they run on one host and may read each other's
memory (`dtckpt.comm.same_host`). Where they may not, Gloo goes on to carry what they have for each other. Both see the
same answers, so both decide alike.
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
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
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
"""Tags of messages are below this one, with which clients find out about each other."""

_HOST_NBYTES = _PROBE_NBYTES = 16
_FACTS = struct.Struct(f"={_HOST_NBYTES}s16sQQ{_PROBE_NBYTES}s")
"""Host, address to connect to, process, and where a probe lies in its memory, and what it is."""
_CREDENTIALS = struct.Struct("=iII")
"""C's ``struct ucred``: process, user, group."""


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Return when it is done. Raises RuntimeError: the other client is gone, or did not come in time."""


class Carrier:
    """Carries messages of one exchange between this client and others.

    Args:
        endpoints: What leads to clients on this host.
        gloo: The backend that reaches all of them.
        ranks: Their ranks there.
    """

    __slots__ = ("_endpoints", "_failures", "_gloo", "_ranks", "_requests")

    def __init__(
        self, endpoints: Mapping[int, Endpoint | None], gloo: Any, ranks: Mapping[int, int] | Sequence[int]
    ) -> None:
        self._endpoints, self._gloo, self._ranks = endpoints, gloo, ranks
        self._requests: list[Request] = []
        self._failures: list[str] = []

    def send(self, memory: torch.Tensor, client: int, tag: int, *, is_answered: bool = False) -> Work:
        """Send contiguous memory; see `Endpoint.send`. Raises RuntimeError: Gloo's client is gone."""
        endpoint = self._endpoints.get(client)
        if endpoint is None:
            sending: Work = self._gloo.send([memory], self._ranks[client], tag)
            return sending
        self._requests.append(endpoint.send(memory, tag, is_answered=is_answered, failures=self._failures))
        return self._requests[-1]

    def recv(self, memory: torch.Tensor, client: int, tag: int) -> Work:
        """Receive into contiguous memory. Raises RuntimeError: Gloo's client is gone."""
        endpoint = self._endpoints.get(client)
        if endpoint is None:
            receiving: Work = self._gloo.recv([memory], self._ranks[client], tag)
            return receiving
        self._requests.append(endpoint.recv(memory, tag, failures=self._failures))
        return self._requests[-1]

    def abandon(self) -> None:
        """Let the memory of messages that are on their way be used for something else; those of Gloo's have no way."""
        for request in self._requests:
            request.abandon()


def carrier(members: Sequence[int], peers: Set[int]) -> Carrier:
    """Return what carries tagged messages between this client and some others.

    Collective: Over ``members`` as `groups.messenger`; the first time that this client and a peer have messages for
    each other they exchange some small ones first, bounded by the process group's timeout.

    Args:
        members: Clients, of which this is one.
        peers: Those of them that this client has messages for or gets messages from, as they do, too.

    Raises:
        CoordinationError: There is no default group that spans the clients, this client is not among them, or a peer
            is gone or did not come in time.
    """
    gloo, ranks = process_groups.messenger(members)
    if not isinstance(gloo, dist.ProcessGroupGloo):
        return Carrier({}, gloo, ranks)
    neighbours = _neighbours()
    if not neighbours.endpoints.keys() >= peers:
        neighbours.meet(peers, gloo, ranks)
    return Carrier(neighbours.endpoints, gloo, ranks)


def attend() -> None:
    """Make progress with messages that are under way although nobody waits for them here."""
    _neighbours().engine.attend()


class Neighbours:
    """What this client knows of others, for as long as a default process group lasts."""

    def __init__(self, timeout_s: float) -> None:
        self.engine = ProgressEngine(timeout_s)
        self.endpoints: dict[int, Endpoint | None] = {}
        """By client; None for those that Gloo leads to."""
        self._contacts: dict[int, Contact] = {}
        self._lock = threading.Lock()
        self._timeout_s = timeout_s

    def meet(self, peers: Set[int], gloo: Any, ranks: Mapping[int, int] | Sequence[int]) -> None:
        """Find out about clients. They do the same, whoever else they find out about."""
        with self._lock:
            new = sorted(set(peers) - self.endpoints.keys())
            for client in new:
                if client not in self._contacts:
                    self._contacts[client] = Contact(client, gloo, ranks[client])
            contacts = [self._contacts[client] for client in new]
        # All go through theirs in ascending order, so whoever waits longest waits for nobody who waits for it.
        for client, contact in zip(new, contacts, strict=True):
            try:
                self.endpoints[client] = contact.endpoint(self.engine, self._timeout_s)
            except (RuntimeError, OSError) as error:
                raise CoordinationError(f"meeting client {client} failed: {error}") from error
            self._contacts.pop(client, None)  # it holds the backend


class Contact:
    """The first messages between this client and another: where each is, then whether they reach each other.

    Args:
        client: The other one.
        gloo: Carries the messages.
        rank: The other client's rank there.
    """

    def __init__(self, client: int, gloo: Any, rank: int) -> None:
        self._client, self._gloo, self._rank = client, gloo, rank
        self._host = _host()
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_NBYTES), _PROBE_NBYTES)
        address = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        if dist.get_rank() < client and any(self._host):
            self._listener = _socket()
            self._listener.bind(_path(address))
            self._listener.listen()
        facts = self._host, address, os.getpid(), ctypes.addressof(self._probe), self._probe.raw
        self._facts = self._exchange(_FACTS.pack(*facts))
        self._found: tuple[Endpoint | None] | None = None
        self._lock = threading.Lock()

    def endpoint(self, engine: ProgressEngine, timeout_s: float) -> Endpoint | None:
        """Return the endpoint of the connection with the other client, None if it is Gloo that leads there.

        Raises:
            RuntimeError: The other client is gone, or did not come in time.
        """
        with self._lock:
            if self._found is None:
                try:
                    self._found = (self._meet(engine, timeout_s),)
                finally:
                    if self._listener is not None:
                        self._listener.close()
            return self._found[0]

    def _meet(self, engine: ProgressEngine, timeout_s: float) -> Endpoint | None:
        host, address, pid, probed_at, probe = _FACTS.unpack(self._facts())
        if host != self._host or not any(host):
            return None
        connection = None if self._listener else _socket()
        reaches = False
        with suppress(OSError):  # hosts may look alike, and may forbid it
            found = ctypes.create_string_buffer(_PROBE_NBYTES)
            read_memory(pid, probed_at, ctypes.addressof(found), _PROBE_NBYTES)
            if connection is not None:
                connection.connect(_path(address))
            reaches = found.raw == probe
        is_reached = self._exchange(bytes([reaches]))() == b"\1"
        if not (reaches and is_reached):
            logger.info("client %d is on this host, but one of the two may not read the other's memory", self._client)
            if connection is not None:
                connection.close()
            return None
        if self._listener is not None:
            connection = _accept(self._listener, pid, timeout_s)
        assert connection is not None  # noqa: S101  one of the two has made it
        logger.debug("messages to client %d, process %d of this host, go past the network", self._client, pid)
        return engine.connect(connection, self._client, pid)

    def _exchange(self, data: bytes) -> Callable[[], bytes]:
        """Start to exchange some bytes; return what waits for the other client's."""
        ours, theirs = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (data, bytes(len(data))))
        requests = self._gloo.recv([theirs], self._rank, END_OF_TAGS), self._gloo.send([ours], self._rank, END_OF_TAGS)

        def wait() -> bytes:
            for request in requests:
                request.wait()
            return theirs.numpy().tobytes()

        return wait


_neighbours_of: WeakKeyDictionary[dist.ProcessGroup, Neighbours] = WeakKeyDictionary()
_lock = threading.Lock()


def _neighbours() -> Neighbours:
    """Return what is known for the present default process group."""
    world = dist.group.WORLD
    assert world is not None  # noqa: S101  messengers are among its clients
    known = _neighbours_of.get(world)
    if known is None:
        with _lock:
            known = _neighbours_of.get(world)
            if known is None:
                known = _neighbours_of[world] = Neighbours(process_groups.timeout_of(world).total_seconds())
                weakref.finalize(world, known.engine.end)
    return known


def _host() -> bytes:
    """Return what processes have in common that may reach each other past the network; zeros: nothing does."""
    if sys.platform != "linux" or not Config.from_environ().uses_host_transport:
        return bytes(_HOST_NBYTES)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid")]
    except OSError:
        return bytes(_HOST_NBYTES)
    return hashlib.blake2b(boot + repr(namespaces).encode(), digest_size=_HOST_NBYTES).digest()


def _accept(listener: socket.socket, pid: int, timeout_s: float) -> socket.socket:
    """Return the connection that a process has made already; others of this host could find the address, too."""
    listener.settimeout(timeout_s)
    while True:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[0] == pid:
            return connection
        connection.close()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _path(address: bytes) -> bytes:
    """Return a name that lies in no file system (``man 7 unix``), readable for those who list the system's sockets."""
    return b"\0dtckpt-" + address.hex().encode()
