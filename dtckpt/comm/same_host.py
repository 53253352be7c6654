"""Messages between processes of one host, past the network: small ones eagerly, large ones by rendezvous.

A small message goes through a socket at once. Of a large one the socket carries only where it lies; the receiver
copies it from the sender's memory itself (cross memory attach: ``man 2 process_vm_readv``). Either way a sender is done
when its message is received, not before, as Gloo's are. The terms are those of MPI: eager and rendezvous messages,
posted receives and unexpected messages, and a progress engine, which runs while somebody waits.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

EAGER_NBYTES = 64 << 10
"""Up to this size a message goes through the socket: two copies cost less than another wake-up of the sender."""

_HEADER = struct.Struct("=BIQQQQ")
"""Kind, tag, number of the message or 0 if no answer is wanted, address and size of the memory, address of its seal."""
_EAGER, _OFFER, _TAKEN = range(3)
_LARGEST = _HEADER.size + EAGER_NBYTES
_READ_NBYTES = 1 << 30
"""The system copies at most 2 GiB at a time."""
_LONGEST_COPY_S = 10.0
_LONGEST_LOOK_S = 1.0
"""After so long a thread looks whether what it waits for has been ended by another one."""


class Request:
    """A message on its way; its memory must be left alone until it `is_done`, or was abandoned."""

    __slots__ = ("_engine", "client", "error", "failures", "filler", "is_done", "memory", "seal")

    def __init__(self, engine: ProgressEngine, client: int, memory: torch.Tensor, failures: list[str] | None) -> None:
        self._engine, self.client = engine, client
        self.failures = [] if failures is None else failures
        """What went wrong with messages that are waited for together."""
        self.memory: torch.Tensor | None = memory
        self.seal: ctypes.c_uint64 | None = None
        """Says, to who reads the memory, that it still holds the message."""
        self.filler = 0
        """The thread that writes what came."""
        self.is_done = False
        self.error = ""

    def wait(self) -> None:
        """Return when the message is here, or the memory that it was sent from is no longer needed.

        Raises:
            RuntimeError: The other client has ended, sent another size, or did not come within the engine's timeout; or
                a message that is waited for together with this one has failed before.
        """
        if not self.is_done:
            self._engine.wait_for(self)
        if self.error or not self.is_done:
            raise RuntimeError(self.error or self.failures[0])

    def abandon(self) -> None:
        """Have nothing more written to the memory, nor taken for a message what lies there from now on."""
        self._break_seal()
        with self._engine.lock:
            if not self.filler:
                self.memory = None
        # While another thread copies. Bounded: this one may have been interrupted where that one has to wait for it.
        deadline = time.monotonic() + _LONGEST_COPY_S
        while self.filler not in (0, threading.get_ident()) and not self.is_done and time.monotonic() < deadline:
            time.sleep(0)
        self._engine.attend()  # others, who have not failed, wait until what they send is taken

    def end(self, error: str = "") -> None:
        """Let whoever waits know."""
        self.error = error
        if error:
            self._break_seal()
            self.failures.append(error)
        self.is_done = True

    def _break_seal(self) -> None:
        if self.seal is not None:
            self.seal.value = 0


class Endpoint:
    """This end of a connection. Messages of one tag arrive in the order in which they were sent.

    Args:
        engine: What makes progress.
        connection: Of type ``SOCK_SEQPACKET``.
        client: Who is at the other end.
        pid: Its process.
    """

    def __init__(self, engine: ProgressEngine, connection: socket.socket, client: int, pid: int) -> None:
        self._engine, self.connection, self.client, self._pid = engine, connection, client, pid
        self._posted: dict[int, deque[Request]] = {}
        self._unexpected: dict[int, deque[bytes]] = {}
        self._sent: dict[int, Request] = {}
        # What the socket had no room for.
        self._backlog: deque[bytes] = deque()
        self._gone = ""
        """Why nothing can be sent any more."""
        self._is_closed = False

    @property
    def has_backlog(self) -> bool:
        """Whether there is something that the socket had no room for."""
        return bool(self._backlog)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way that this client knows of."""
        return not (self._posted or self._sent or self._backlog)

    def send(
        self, memory: torch.Tensor, tag: int, *, is_answered: bool = False, failures: list[str] | None = None
    ) -> Request:
        """Send contiguous memory on the host. Never blocks; errors are those of the request.

        Args:
            memory: The message.
            tag: The message's.
            is_answered: Whether a message comes back for which this client waits anyway, so that it need not be told
                that this one was received.
            failures: Those of the messages that are waited for together.
        """
        request, nbytes = Request(self._engine, self.client, memory, failures), memory.nbytes
        with self._engine.lock:
            number, is_sent = next(self._engine.numbers), False
            if nbytes <= EAGER_NBYTES and not self._backlog:
                header = _HEADER.pack(_EAGER, tag, 0 if is_answered else number, 0, nbytes, 0)
                is_sent = self._try(header + ctypes.string_at(memory.data_ptr(), nbytes))
            if not is_sent:
                request.seal = ctypes.c_uint64(number)
                seal_at = ctypes.addressof(request.seal)
                self._put(_HEADER.pack(_OFFER, tag, number, memory.data_ptr(), nbytes, seal_at))
            if self._gone or (is_sent and is_answered):
                request.end(self._gone)
            else:
                self._sent[number] = request
        return request

    def recv(self, memory: torch.Tensor, tag: int, *, failures: list[str] | None = None) -> Request:
        """Receive into contiguous memory on the host. Never blocks; errors are those of the request."""
        request = Request(self._engine, self.client, memory, failures)
        with self._engine.lock:
            data = _popped(self._unexpected, tag)
            if data is None and self._is_closed:
                request.end(self._gone)
            elif data is None:
                self._posted.setdefault(tag, deque()).append(request)
        if data is not None:
            self._fill(request, data)
        return request

    # --- for the engine -----------------------------------------------------------------------------------------

    def read(self) -> None:
        """Handle a message that has come."""
        try:
            data = self.connection.recv(_LARGEST)
        except (BlockingIOError, ConnectionResetError):
            return  # the other end has ended before it had read all, but what it sent is still to come
        except OSError:
            data = b""
        if data:
            self._handle(data)
        else:
            self.lose(f"client {self.client} has ended")

    def flush(self) -> None:
        """Send what the socket had no room for."""
        with self._engine.lock:
            while self._backlog and self._try(self._backlog[0]):
                self._backlog.popleft()
            if not self._backlog:
                self._engine.watch(self, has_backlog=False)

    def lose(self, why: str) -> None:
        """End all that is on its way: nothing more can come."""
        with self._engine.lock:
            self._gone, self._is_closed = why, True
            self._engine.forget(self)
            requests = [request for posted in self._posted.values() for request in posted]
            for request in (*requests, *self._sent.values()):
                request.end(why)
            self.connection.close()
            self._posted.clear()
            self._sent.clear()
            self._backlog.clear()

    def _handle(self, data: bytes) -> None:
        kind, tag, number, *_ = _HEADER.unpack_from(data)
        with self._engine.lock:
            if kind == _TAKEN:
                if (taken := self._sent.pop(number, None)) is not None:  # else it has failed meanwhile
                    taken.end()
                return
            found = _popped(self._posted, tag)
            if found is None:
                self._unexpected.setdefault(tag, deque()).append(data)
        if found is not None:
            self._fill(found, data)

    def _fill(self, request: Request, data: bytes) -> None:
        """Bring a message to its place, and let the sender know."""
        _, tag, number, *_ = _HEADER.unpack_from(data)
        error = "it was interrupted"
        try:
            with self._engine.lock:
                request.filler, memory = threading.get_ident(), request.memory
            error = "" if memory is None else self._copy(data, memory)
        finally:
            if number:
                with self._engine.lock:
                    self._put(_HEADER.pack(_TAKEN, tag, number, 0, 0, 0))
            request.end(error)

    def _copy(self, data: bytes, into: torch.Tensor) -> str:
        """Copy a message to memory; return why that cannot be done, if so."""
        kind, _, number, address, nbytes, seal_at = _HEADER.unpack_from(data)
        if nbytes != into.nbytes:
            return f"client {self.client} sent {nbytes} bytes, expected {into.nbytes}"
        if kind == _EAGER:
            ctypes.memmove(into.data_ptr(), data[_HEADER.size :], nbytes)
            return ""
        seal = ctypes.c_uint64()
        try:
            read_memory(self._pid, address, into.data_ptr(), nbytes)
            # In this order: who breaks the seal does so before anything else happens to the memory.
            read_memory(self._pid, seal_at, ctypes.addressof(seal), ctypes.sizeof(seal))
        except OSError as refused:
            return f"the memory of client {self.client} cannot be read: {refused}"
        return "" if seal.value == number else f"client {self.client} has given up what it was sending"

    def _put(self, data: bytes) -> None:
        """Send data, or keep it until there is room."""
        if self._backlog or not self._try(data):
            self._backlog.append(data)
            self._engine.watch(self, has_backlog=True)
            self._engine.attend()  # the other client waits for it, whatever this one does next

    def _try(self, data: bytes) -> bool:
        """Send data if there is room, drop it if nobody is left to take it; return False if it is still to be sent."""
        if not self._gone:
            try:
                self.connection.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:  # the end itself is noted when all that came before is read
                self._gone = f"client {self.client} has ended: {error}"
        return True


class ProgressEngine:
    """Makes progress with the messages of all endpoints, in a thread that waits for one.

    Args:
        timeout_s: How long a wait may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.lock = threading.RLock()
        """Guards the endpoints."""
        # Not small: what lies in freed memory by chance shall not pass for one.
        self.numbers = itertools.count(secrets.randbits(62) + 1)
        self._timeout_s = timeout_s
        self._epoll = select.epoll()
        self._endpoints: dict[int, Endpoint] = {}
        # One thread at a time looks at the sockets; the others wait until it has made progress.
        self._turn = threading.Condition()
        self._is_taken = False
        self._is_attended = False
        _engines.add(self)

    def connect(self, connection: socket.socket, client: int, pid: int) -> Endpoint:
        """Return a new endpoint on a connection, which is its own from now on."""
        connection.setblocking(False)
        endpoint = Endpoint(self, connection, client, pid)
        with self.lock:
            self._endpoints[connection.fileno()] = endpoint
            self._epoll.register(connection, select.EPOLLIN)
        return endpoint

    def watch(self, endpoint: Endpoint, *, has_backlog: bool) -> None:
        """Look whether there is room for a backlog, or no longer."""
        self._epoll.modify(endpoint.connection, select.EPOLLIN | (select.EPOLLOUT if has_backlog else 0))

    def forget(self, endpoint: Endpoint) -> None:
        """Look no longer at an endpoint's socket."""
        if self._endpoints.pop(endpoint.connection.fileno(), None) is not None:
            self._epoll.unregister(endpoint.connection)

    def wait_for(self, request: Request) -> None:
        """Make progress until a request is done, or one that is waited for together with it has failed.

        Raises:
            RuntimeError: Neither is so within the timeout.
        """
        if not self._advance_until(lambda: request.is_done or bool(request.failures), self._timeout_s):
            raise RuntimeError(f"no message came from or was taken by client {request.client} in {self._timeout_s:g} s")

    def attend(self) -> None:
        """Make progress with all that is on its way, from a thread of its own: nobody waits here for now."""
        with self.lock:
            if self._is_attended or self._is_idle():
                return
            self._is_attended = True
        try:
            threading.Thread(target=self._attend, name="dtckpt-messages", daemon=True).start()
        except RuntimeError:  # there are no new threads when the process ends
            self._is_attended = False

    def end(self) -> None:
        """Close all connections; what is on its way fails, but for what others need not answer."""
        self._advance_until(
            lambda: not any(each.has_backlog for each in list(self._endpoints.values())), _LONGEST_LOOK_S
        )
        for endpoint in list(self._endpoints.values()):
            endpoint.lose(f"the connection with client {endpoint.client} is closed")
        self._epoll.close()

    def abandon(self) -> None:
        """Close this process's descriptors of connections that are another's. Takes no lock, which that might have."""
        while self._endpoints:
            self._endpoints.popitem()[1].connection.close()
        self._epoll.close()

    def _attend(self) -> None:
        try:
            while self._is_attended:
                self._advance_until(self._is_idle, self._timeout_s)
                with self.lock:
                    self._is_attended = not self._is_idle()
        except BaseException:
            self._is_attended = False
            raise

    def _is_idle(self) -> bool:
        with self.lock:
            return all(endpoint.is_idle for endpoint in self._endpoints.values())

    def _advance_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Make progress until something is true; return whether it is, within the timeout."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            has_turn = False
            try:
                with self._turn:
                    if self._is_taken:
                        self._turn.wait(left_s)
                        continue
                    has_turn = self._is_taken = True
                if not is_done():  # it may have come true before this thread had its turn
                    self._advance(min(left_s, _LONGEST_LOOK_S))
            finally:
                if has_turn:
                    with self._turn:
                        self._is_taken = False
                        self._turn.notify_all()
        return True

    def _advance(self, timeout_s: float) -> None:
        try:
            ready = self._epoll.poll(timeout_s)
        except ValueError:  # it was closed, and all requests are over
            return
        for descriptor, events in ready:
            endpoint = self._endpoints.get(descriptor)
            if endpoint is None:
                continue
            if events & select.EPOLLOUT:
                endpoint.flush()
            if events & ~select.EPOLLOUT:
                endpoint.read()


def read_memory(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copy memory of another process of this host to an address of this one.

    Raises:
        OSError: The process has ended, or this one may not read it.
    """
    while nbytes:
        at_once = min(nbytes, _READ_NBYTES)
        here, there = _Piece(into, at_once), _Piece(address, at_once)
        count = _process_vm_readv()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        address, into, nbytes = address + count, into + count, nbytes - count


class _Piece(ctypes.Structure):
    """C's ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    pieces = (ctypes.POINTER(_Piece), ctypes.c_ulong)
    function.restype, function.argtypes = ctypes.c_ssize_t, (ctypes.c_int, *pieces, *pieces, ctypes.c_ulong)
    return function


def _popped(queues: dict[int, deque[Any]], tag: int) -> Any:
    """Return the first of a tag's queue, None if there is none; empty queues go."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


_engines: WeakSet[ProgressEngine] = WeakSet()


def _abandon_all() -> None:
    """Let go of the connections, which are the parent's: its peers are to see when it ends."""
    for engine in list(_engines):
        engine.abandon()


os.register_at_fork(after_in_child=_abandon_all)
