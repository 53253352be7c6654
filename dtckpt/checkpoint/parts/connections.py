"""`ServerConnections`: the connections of a server of parts: few at a time, each with a deadline.

A stranger must not keep the server from others, however slowly it sends. So each connection has a deadline for its next
step: a head of a request, its body, the taking of an answer. A connection beyond the bound waits in the kernel until
another one ends. If it waits, the oldest connection that has shown no token ends, once it had time for that.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

MAX_TICK_S = 1.0
"""Longest time between two looks that counts. A process that stood still has not read what others have sent."""
SHOW_S = 5.0
"""How long a connection has to show a token before others may take its place."""


class ServerConnection:
    """One connection.

    Attributes:
        socket: Its socket.
        is_admitted: Whether it has shown a token or a ticket.
        began_at: When it began, in seconds of `ServerConnections`.
        due_at: When it ends unless it gets on; None: it has time.
    """

    __slots__ = ("began_at", "due_at", "is_admitted", "socket")

    def __init__(self, connected: socket.socket, began_at: float) -> None:
        self.socket = connected
        self.is_admitted = False
        self.began_at = began_at
        self.due_at: float | None = None

    def secure(self, context: ssl.SSLContext) -> None:
        """Begin TLS."""
        secured = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.socket = secured
        secured.do_handshake()

    def cut(self) -> None:
        """End the connection, whatever its thread waits for."""
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # also of TLS: without a word more


class ServerConnections:
    """The connections of one server. Thread-safe.

    Args:
        limit: How many there are at a time.
        clock: Monotonic seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._all: set[ServerConnection] = set()
        self._changed = threading.Condition()
        self._seen_at = clock()
        self._now = 0.0

    def begin(self, connected: socket.socket, seconds: float, wait_s: float) -> ServerConnection | None:
        """Give a connection a place.

        Args:
            connected: Its socket.
            seconds: How long its first step may take.
            wait_s: How long to wait for a place.

        Returns:
            The connection; None if there is no place yet.
        """
        with self._changed:
            if len(self._all) >= self._limit:
                self._cut_stranger()
                self._changed.wait(wait_s)
            if len(self._all) >= self._limit:
                return None
            connection = ServerConnection(connected, self._now)
            connection.due_at = self._now + seconds
            self._all.add(connection)
            return connection

    def _cut_stranger(self) -> None:
        strangers = [each for each in self._all if not each.is_admitted and self._now - each.began_at >= SHOW_S]
        if strangers:
            min(strangers, key=lambda each: each.began_at).cut()

    def end(self, connection: ServerConnection) -> None:
        """Give the place of a connection to another one."""
        with self._changed:
            self._all.discard(connection)
            self._changed.notify()

    def expect(self, connection: ServerConnection, seconds: float | None) -> None:
        """Say how long the next step of a connection may take; None: any time."""
        connection.due_at = None if seconds is None else self._now + seconds

    def tick(self) -> None:
        """Let time pass, and end the connections that are overdue. The server calls this again and again."""
        with self._changed:
            now = self._clock()
            self._now += min(now - self._seen_at, MAX_TICK_S)
            self._seen_at = now
            for connection in self._all:
                if connection.due_at is not None and self._now >= connection.due_at:
                    connection.cut()
