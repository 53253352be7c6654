"""Same-host transport: messages between processes of one host, through a Unix socket and reads of the sender's memory.

Small messages travel eagerly: the socket carries the payload. Large messages travel by rendezvous: the socket carries
only the payload's address, and the receiver copies the payload out of the sender's memory itself (cross memory attach,
``man 2 process_vm_readv``)::

    sender                        socket                        receiver

    eager, up to 64 KiB
      send()    ---- EAGER: tag, number, payload --------->  copies the payload into the posted buffer
      is_done   <--- ACK: number --------------------------

    rendezvous
      send()    ---- OFFER: tag, number, address, seal --->  reads the payload, then the seal, from the sender
      is_done   <--- ACK: number --------------------------  seal == number: the payload is the message

In both cases, as in Gloo, a send is done when the receiver has the message, not when the socket has it. An eager
message needs no ACK if the sender waits for a message of the receiver anyway (``is_answered``).

The words are MPI's: a *posted* receive has no message yet, an *unexpected* message has no receive yet, and the
*progress engine* moves messages. The threads that wait for messages run it; `ProgressEngine.ensure_progress` starts a
thread for messages for which no thread waits.
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
"""Largest eager message: up to this size two copies cost less than waking the sender once more."""

_HEADER = struct.Struct("=BIQQQQ")
"""Kind, tag, number of the message (0: no ACK is wanted), address and size of the payload, address of the seal."""
_EAGER, _OFFER, _ACK = range(3)
_MAX_PACKET_NBYTES = _HEADER.size + EAGER_NBYTES
_READ_NBYTES = 1 << 30
"""Bytes per system call; the kernel copies at most 2 GiB at a time."""
_MAX_COPY_WAIT_S = 10.0
"""How long `Request.abandon` waits for a thread that copies the message."""
_MAX_POLL_S = 1.0
"""How long a thread polls before it checks whether another thread has finished the message that it waits for."""


class Request:
    """A message under way; do not touch its memory until it `is_done` or was abandoned."""

    __slots__ = ("_engine", "client", "copying_thread", "error", "failures", "is_done", "memory", "seal")

    def __init__(self, engine: ProgressEngine, client: int, memory: torch.Tensor, failures: list[str] | None) -> None:
        self._engine, self.client = engine, client
        self.failures = [] if failures is None else failures
        """Errors of all messages of one exchange, which are waited for together."""
        self.memory: torch.Tensor | None = memory
        self.seal: ctypes.c_uint64 | None = None
        """The message's number for as long as ``memory`` holds an offered message, then 0. Receivers read it."""
        self.copying_thread = 0
        """Identifier of the thread that copies the received message into ``memory``; 0: no thread does yet."""
        self.is_done = False
        self.error = ""

    def wait(self) -> None:
        """Return when the message was received; a sender may then reuse the memory.

        Raises:
            RuntimeError: The other client has ended, sent another size, or did not come within the engine's timeout; or
                another message of the same exchange has failed before.
        """
        if not self.is_done:
            self._engine.wait_for(self)
        if self.error or not self.is_done:
            raise RuntimeError(self.error or self.failures[0])

    def abandon(self) -> None:
        """Give up the memory: no thread writes to it any more, and no receiver takes new content for the message."""
        self._break_seal()
        with self._engine.lock:
            if not self.copying_thread:
                self.memory = None
        # Wait for a thread that copies right now. With a bound: a signal may have interrupted this thread while it
        # holds a lock that the copying thread needs.
        deadline = time.monotonic() + _MAX_COPY_WAIT_S
        while self.copying_thread not in (0, threading.get_ident()) and not self.is_done:
            if time.monotonic() >= deadline:
                break
            time.sleep(0)
        # The other clients have not failed: they still wait until this client acknowledges their messages.
        self._engine.ensure_progress()

    def finish(self, error: str = "") -> None:
        """Mark the message as done, or as failed with ``error``."""
        self.error = error
        if error:
            self._break_seal()
            self.failures.append(error)
        self.is_done = True  # last: a waiting thread reads the error once it sees this

    def _break_seal(self) -> None:
        if self.seal is not None:
            self.seal.value = 0


class Endpoint:
    """One end of a connection with another client. Messages of one tag arrive in the order of their sends.

    Args:
        engine: Makes progress with the messages.
        connection: A Unix socket of type ``SOCK_SEQPACKET``, so that one read returns one packet.
        client: The client at the other end.
        pid: Its process.
    """

    def __init__(self, engine: ProgressEngine, connection: socket.socket, client: int, pid: int) -> None:
        self._engine, self.connection, self.client, self._pid = engine, connection, client, pid
        # By tag. At most one of the two has an entry for a tag: a message meets its receive as soon as both exist.
        self._posted: dict[int, deque[Request]] = {}
        self._unexpected: dict[int, deque[bytes]] = {}
        # Sends by number, until their ACK comes.
        self._sent: dict[int, Request] = {}
        # Packets without payloads that wait until the socket has space. If the socket is full, this client offers even
        # a small message, so the backlog never holds a payload.
        self._backlog: deque[bytes] = deque()
        self._disconnect_reason = ""
        """Why nothing can be sent any more."""
        self._is_closed = False
        """Whether this client cannot receive any more, either."""

    @property
    def has_backlog(self) -> bool:
        """Whether packets wait until the socket has space."""
        return bool(self._backlog)

    @property
    def is_idle(self) -> bool:
        """Whether this client neither waits for a message nor has a message to send."""
        return not (self._posted or self._sent or self._backlog)

    def send(
        self, memory: torch.Tensor, tag: int, *, is_answered: bool = False, failures: list[str] | None = None
    ) -> Request:
        """Send a message. Never blocks; the request raises the errors.

        Args:
            memory: The message: a contiguous tensor in host memory.
            tag: The message's tag.
            is_answered: Whether this client waits for a message of the other client anyway, and so notices its absence.
                Then an eager send is done at once, without an ACK.
            failures: Errors of all messages that the caller waits for together with this message.
        """
        request, nbytes = Request(self._engine, self.client, memory, failures), memory.nbytes
        with self._engine.lock:
            number, is_sent = next(self._engine.numbers), False
            # Behind a backlog even a small message is offered, because packets must keep their order.
            if nbytes <= EAGER_NBYTES and not self._backlog:
                header = _HEADER.pack(_EAGER, tag, 0 if is_answered else number, 0, nbytes, 0)
                is_sent = self._try_send(header + ctypes.string_at(memory.data_ptr(), nbytes))
            if not is_sent:
                request.seal = ctypes.c_uint64(number)
                seal_address = ctypes.addressof(request.seal)
                self._send_or_queue(_HEADER.pack(_OFFER, tag, number, memory.data_ptr(), nbytes, seal_address))
            if self._disconnect_reason or (is_sent and is_answered):
                request.finish(self._disconnect_reason)
            else:
                self._sent[number] = request
        return request

    def recv(self, memory: torch.Tensor, tag: int, *, failures: list[str] | None = None) -> Request:
        """Receive a message into a contiguous tensor in host memory. Never blocks; the request raises the errors."""
        request = Request(self._engine, self.client, memory, failures)
        with self._engine.lock:
            packet = _pop_first(self._unexpected, tag)
            if packet is None and self._is_closed:
                request.finish(self._disconnect_reason)
            elif packet is None:
                self._posted.setdefault(tag, deque()).append(request)
        if packet is not None:
            self._deliver(packet, request)
        return request

    # --- called by the engine -----------------------------------------------------------------------------------

    def read(self) -> None:
        """Read one packet from the socket and handle it."""
        try:
            packet = self.connection.recv(_MAX_PACKET_NBYTES)
        except (BlockingIOError, ConnectionResetError):
            # The system reports a reset if the other client ended and left packets unread. The packets that it sent
            # will still arrive.
            return
        except OSError:
            packet = b""
        if packet:
            self._handle(packet)
        else:
            self.disconnect(f"client {self.client} has ended")

    def flush(self) -> None:
        """Send the backlog, as far as the socket has space."""
        with self._engine.lock:
            while self._backlog and self._try_send(self._backlog[0]):
                self._backlog.popleft()
            if not self._backlog:
                self._engine.watch(self, has_backlog=False)

    def disconnect(self, reason: str) -> None:
        """Close the connection; all requests that are not done fail with ``reason``.

        Unexpected messages stay: the other client may have sent them, and ended, before this client asks for them.
        """
        with self._engine.lock:
            self._disconnect_reason, self._is_closed = reason, True
            self._engine.forget(self)
            requests = [request for posted in self._posted.values() for request in posted]
            for request in (*requests, *self._sent.values()):
                request.finish(reason)
            self.connection.close()
            self._posted.clear()
            self._sent.clear()
            self._backlog.clear()

    def _handle(self, packet: bytes) -> None:
        kind, tag, number, *_ = _HEADER.unpack_from(packet)
        with self._engine.lock:
            if kind == _ACK:
                if (sent := self._sent.pop(number, None)) is not None:  # None: the request has failed meanwhile
                    sent.finish()
                return
            request = _pop_first(self._posted, tag)
            if request is None:
                self._unexpected.setdefault(tag, deque()).append(packet)
        if request is not None:
            self._deliver(packet, request)

    def _deliver(self, packet: bytes, request: Request) -> None:
        """Copy a message into the memory of its request, and acknowledge it.

        Copies without the engine's lock, because a large copy takes long. The message is acknowledged in any case,
        also if the receive was abandoned or failed: the sender has done its part.
        """
        _, tag, number, *_ = _HEADER.unpack_from(packet)
        error = "it was interrupted"
        try:
            with self._engine.lock:
                request.copying_thread, memory = threading.get_ident(), request.memory
            error = "" if memory is None else self._copy(packet, memory)
        finally:
            if number:
                with self._engine.lock:
                    self._send_or_queue(_HEADER.pack(_ACK, tag, number, 0, 0, 0))
            request.finish(error)

    def _copy(self, packet: bytes, buffer: torch.Tensor) -> str:
        """Copy a message into a buffer; return the reason of a failure, or an empty string."""
        kind, _, number, address, nbytes, seal_address = _HEADER.unpack_from(packet)
        if nbytes != buffer.nbytes:
            return f"client {self.client} sent {nbytes} bytes, expected {buffer.nbytes}"
        if kind == _EAGER:
            ctypes.memmove(buffer.data_ptr(), packet[_HEADER.size :], nbytes)
            return ""
        seal = ctypes.c_uint64()
        try:
            # The payload first, then the seal. A sender breaks the seal before it touches the payload, so an intact
            # seal proves that the payload was intact when it was copied. The other order proves nothing.
            read_memory(self._pid, address, buffer.data_ptr(), nbytes)
            read_memory(self._pid, seal_address, ctypes.addressof(seal), ctypes.sizeof(seal))
        except OSError as error:
            return f"the memory of client {self.client} cannot be read: {error}"
        return "" if seal.value == number else f"client {self.client} has given up its message"

    def _send_or_queue(self, packet: bytes) -> None:
        """Send a packet, or append it to the backlog if the socket is full."""
        if self._backlog or not self._try_send(packet):
            self._backlog.append(packet)
            self._engine.watch(self, has_backlog=True)
            # The other client waits for this packet, even if this client never waits for a message again.
            self._engine.ensure_progress()

    def _try_send(self, packet: bytes) -> bool:
        """Send a packet; return False if the socket is full. Drops the packet if the other client has ended."""
        if not self._disconnect_reason:
            try:
                self.connection.send(packet, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                # Only sending ends here: packets that the other client sent before may still be unread. `read` closes
                # the connection after the last one.
                self._disconnect_reason = f"client {self.client} has ended: {error}"
        return True


class ProgressEngine:
    """Makes progress with the messages of all endpoints, in a thread that waits for a message.

    Invariant: at most one thread polls the sockets and handles packets. The other threads sleep until it has handled
    some. Then each thread checks whether its own message is done, and one of them polls next.

    Args:
        timeout_s: How long a wait may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.lock = threading.RLock()
        """Guards the endpoints' queues. Held for short times: no large message is copied under it."""
        # Random and large: memory that was freed and reused must not look like an intact seal by chance.
        self.numbers = itertools.count(secrets.randbits(62) + 1)
        self._timeout_s = timeout_s
        self._epoll = select.epoll()
        self._endpoints: dict[int, Endpoint] = {}
        """By file descriptor."""
        self._polling = threading.Condition()
        """Guards ``_is_polled``; notified when a thread stops polling."""
        self._is_polled = False
        self._has_thread = False
        """Whether `ensure_progress` has a thread running."""
        _engines.add(self)

    def connect(self, connection: socket.socket, client: int, pid: int) -> Endpoint:
        """Return a new endpoint on a connection, and take the connection over."""
        connection.setblocking(False)
        endpoint = Endpoint(self, connection, client, pid)
        with self.lock:
            self._endpoints[connection.fileno()] = endpoint
            self._epoll.register(connection, select.EPOLLIN)
        return endpoint

    def watch(self, endpoint: Endpoint, *, has_backlog: bool) -> None:
        """Poll an endpoint's socket for packets, and for space too if there is a backlog."""
        self._epoll.modify(endpoint.connection, select.EPOLLIN | (select.EPOLLOUT if has_backlog else 0))

    def forget(self, endpoint: Endpoint) -> None:
        """Stop polling an endpoint's socket."""
        if self._endpoints.pop(endpoint.connection.fileno(), None) is not None:
            self._epoll.unregister(endpoint.connection)

    def wait_for(self, request: Request) -> None:
        """Make progress until a request is done, or another message of the same exchange has failed.

        Raises:
            RuntimeError: Neither happens within the timeout.
        """
        if not self._progress_until(lambda: request.is_done or bool(request.failures), self._timeout_s):
            raise RuntimeError(f"no message came from or was taken by client {request.client} in {self._timeout_s:g} s")

    def ensure_progress(self) -> None:
        """Start a thread that makes progress until all endpoints are idle, unless one runs or all are idle now."""
        with self.lock:
            if self._has_thread or self._is_idle():
                return
            self._has_thread = True
        try:
            threading.Thread(target=self._run_thread, name="dtckpt-messages", daemon=True).start()
        except RuntimeError:  # the interpreter shuts down and starts no threads any more
            self._has_thread = False

    def close(self) -> None:
        """Send the backlogs, for a second at most, then close all connections; requests that are not done fail."""
        self._progress_until(
            lambda: not any(endpoint.has_backlog for endpoint in list(self._endpoints.values())), _MAX_POLL_S
        )
        for endpoint in list(self._endpoints.values()):
            endpoint.disconnect(f"the connection with client {endpoint.client} is closed")
        self._epoll.close()

    def close_in_child(self) -> None:
        """Close a forked process's copies of its parent's connections.

        Takes no lock: a thread of the parent may have held it during the fork, and no thread releases it here.
        """
        while self._endpoints:
            self._endpoints.popitem()[1].connection.close()
        self._epoll.close()

    def _run_thread(self) -> None:
        try:
            while self._has_thread:
                self._progress_until(self._is_idle, self._timeout_s)
                with self.lock:
                    self._has_thread = not self._is_idle()
        except BaseException:
            self._has_thread = False
            raise

    def _is_idle(self) -> bool:
        with self.lock:
            return all(endpoint.is_idle for endpoint in self._endpoints.values())

    def _progress_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Make progress until ``is_done()``; return False if the timeout is over before."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            is_mine = False
            try:
                with self._polling:
                    if self._is_polled:
                        self._polling.wait(left_s)
                        continue
                    is_mine = self._is_polled = True
                # Again: the thread that polled before may have finished the message since the first check.
                if not is_done():
                    self._poll(min(left_s, _MAX_POLL_S))
            finally:
                if is_mine:
                    with self._polling:
                        self._is_polled = False
                        self._polling.notify_all()
        return True

    def _poll(self, timeout_s: float) -> None:
        try:
            ready = self._epoll.poll(timeout_s)
        except ValueError:  # the engine is closed, and all requests are done or have failed
            return
        for descriptor, events in ready:
            endpoint = self._endpoints.get(descriptor)
            if endpoint is None:
                continue
            if events & select.EPOLLOUT:
                endpoint.flush()
            if events & ~select.EPOLLOUT:
                endpoint.read()


def read_memory(pid: int, remote_address: int, address: int, nbytes: int) -> None:
    """Copy memory of another process of this host into this process.

    Args:
        pid: The other process.
        remote_address: Where the memory starts there.
        address: Where to copy it to here.
        nbytes: How much.

    Raises:
        OSError: The process has ended, or this process may not read it.
    """
    while nbytes:
        count = min(nbytes, _READ_NBYTES)
        local, remote = _IoVec(address, count), _IoVec(remote_address, count)
        num_read = _process_vm_readv()(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if num_read <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        remote_address, address, nbytes = remote_address + num_read, address + num_read, nbytes - num_read


class _IoVec(ctypes.Structure):
    """C's ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vectors = (ctypes.POINTER(_IoVec), ctypes.c_ulong)
    function.restype, function.argtypes = ctypes.c_ssize_t, (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
    return function


def _pop_first(queues: dict[int, deque[Any]], tag: int) -> Any:
    """Remove and return the first item of a tag's queue, None if there is none; drop the queue when it is empty."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


_engines: WeakSet[ProgressEngine] = WeakSet()


def _close_all_in_child() -> None:
    """Close the parent's connections in a forked process, so that the peers see when the parent ends."""
    for engine in list(_engines):
        engine.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
