"""Client processes for the crash tests: forked in milliseconds, their file operations recorded and made to fail.

A separate process, the nursery, imports everything once and uses nothing of it. Every client is forked from it, so it
costs milliseconds and may be killed; the nursery supervises its system calls (see `seccomp`). One test process may have
many jobs under way at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import itertools
import os
import pickle
import queue
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from support import forkserver
from support.client_processes import Answer, Task, answer_of, environment_of

from . import seccomp

IMPORTED = ["checkpoint.client_cases", "crash.crash_cases"]
_PR_SET_PDEATHSIG = 1
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fault:
    """What happens to one client at one of its file operations, before that happens.

    Args:
        client: The victim.
        kind: ``kill``, ``stop`` (SIGSTOP), ``short`` (a write of which half is done), or the name of an error number.
        at: The operation, counted from 1; of writes only for ``short``.
    """

    client: int
    kind: str
    at: int


@dataclass(frozen=True)
class Operation:
    """A file operation of a client: a system call that changes files below the job's folder, or makes that durable."""

    client: int
    call: str
    paths: Sequence[str]
    arguments: Sequence[int]
    data: bytes = b""
    offset: int = 0


@dataclass
class Job:
    """The test's side of some clients."""

    clients: int
    events: queue.SimpleQueue[tuple[str, int, Any]] = field(default_factory=queue.SimpleQueue)
    pids: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    struck: Operation | None = None
    """The operation that the fault struck."""

    def wait(self, is_enough: Callable[[Job], bool]) -> None:
        """Wait until enough has happened; bounded."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not is_enough(self):
            try:
                kind, client, fact = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for client in list(self.pids):
                    self.kill(client)
                raise AssertionError(f"clients did not answer in {ANSWER_TIMEOUT_S} s: {self}") from None
            match kind:
                case "pid":
                    self.pids[client] = fact
                case "answer":
                    self.answers[client] = fact
                    del self.pids[client]
                case "operation":
                    self.operations.append(fact)
                case "struck":
                    self.struck = fact

    def kill(self, client: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a client a signal, if it still lives."""
        if client in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[client], number)

    def finish(self) -> list[Answer]:
        """Wait for all clients; return their answers."""
        self.wait(lambda job: len(job.answers) == job.clients)
        return [self.answers[client] for client in sorted(self.answers)]


class Nursery:
    """The test's side of the nursery.

    Args:
        prepare: Importable function that the nursery calls first, while it has one thread.
        arguments: Its arguments.
    """

    def __init__(self, prepare: Callable[..., None] | None = None, *arguments: Any) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count(1)
        self._jobs: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()
        self._sending = threading.Lock()
        self._connection, theirs = forkserver.Pipe()
        self._process = forkserver.start(tend, theirs, prepare, *arguments, name="nursery")
        theirs.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(10)
        self._reader.join(10)
        self._connection.close()

    def start(
        self,
        case: Callable[..., Any],
        *args: Any,
        clients: int,
        folder: str = "",
        fault: Fault | None = None,
        is_recorded: bool = False,
        heartbeat_timeout_s: float = 10.0,
        attempt: int = 0,
        **kwargs: Any,
    ) -> Job:
        """Start ``case(*args, **kwargs)`` on every client of a new job.

        Args:
            case: Importable function.
            args: The same for every client.
            clients: Number of clients.
            folder: The folder whose file operations count.
            fault: What happens to one of them.
            is_recorded: Whether to keep all operations that happen, in the order of their beginning.
            heartbeat_timeout_s: When a client counts as lost.
            attempt: Which start of the job this is.
            kwargs: The same for every client.
        """
        number, job = next(self._numbers), Job(clients)
        name = f"crash-{os.getpid()}-{number}"
        environments = [
            environment_of(client, clients, name, self._store.port, heartbeat_timeout_s) for client in range(clients)
        ]
        tasks = [
            Task(case, args, kwargs, environment | {"DTCKPT_ATTEMPT": str(attempt)}, None)
            for environment in environments
        ]
        self._jobs[number] = job
        with self._sending:
            self._connection.send((number, tasks, folder, fault, is_recorded))
        return job

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Answer]:
        """As `start`; return the answers."""
        return self.start(case, *args, **kwargs).finish()

    def values(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`, for cases that succeed on all clients; return their results."""
        answers = self.run(case, *args, **kwargs)
        assert not any(answer.has_died or answer.error for answer in answers), answers
        return [answer.value for answer in answers]

    def _read(self) -> None:
        try:
            while True:
                number, *event = self._connection.recv()
                if job := self._jobs.get(number):
                    job.events.put(tuple(event))
        except (EOFError, OSError):
            pass  # the end, or the nursery died: a process that waits for it runs into a timeout


# --- in the nursery -------------------------------------------------------------------------------------------------


def tend(connection: Connection, prepare: Callable[..., None] | None, *arguments: Any) -> None:
    """Fork clients and supervise them, until the test process hangs up."""
    if prepare is not None:
        prepare(*arguments)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) is not key:
                continue  # what was done a moment ago has closed it
            if key.data is not None:
                key.data()
                continue
            try:
                request = connection.recv()
            except EOFError:
                return
            _Supervisor(selector, connection, *request)


class _Supervisor:
    """The nursery's side of one job."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: Connection,
        number: int,
        tasks: Sequence[Task],
        folder: str,
        fault: Fault | None,
        is_recorded: bool,
    ) -> None:
        self._selector, self._connection, self._number = selector, connection, number
        self._folder, self._fault, self._is_recorded = folder, fault, is_recorded
        self._count = 0
        for client, task in enumerate(tasks):
            self._fork(client, task)

    def _tell(self, kind: str, client: int, fact: Any) -> None:
        self._connection.send((self._number, kind, client, fact))

    def _fork(self, client: int, task: Task) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _live(theirs, task, is_supervised=bool(self._folder))
        theirs.close()
        self._tell("pid", client, pid)
        listener = socket.recv_fds(ours, 1, 1)[1][0] if self._folder else -1
        if self._folder:
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._decide(client, pid, listener))
        answer = bytearray()
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._listen(client, pid, listener, ours, answer))

    def _listen(self, client: int, pid: int, listener: int, link: socket.socket, answer: bytearray) -> None:
        """Take more of a client's answer, and leave of the client."""
        if more := link.recv(1 << 16):
            answer += more
            return
        self._selector.unregister(link)
        link.close()
        if listener >= 0:
            self._selector.unregister(listener)
            os.close(listener)
        os.waitpid(pid, 0)
        self._tell("answer", client, pickle.loads(answer) if answer else Answer(has_died=True))

    def _decide(self, client: int, pid: int, listener: int) -> None:
        """Answer a system call of a client."""
        call = seccomp.receive(listener)
        if call is None:
            return
        try:
            if not any(path.startswith(self._folder) for path in call.paths):
                call.proceed()
                return
            data, offset = (call.data, call.offset) if self._is_recorded and call.writes else (b"", 0)
        except (FileNotFoundError, ProcessLookupError):
            return  # the client was killed meanwhile
        operation = Operation(client, call.name, call.paths, call.arguments, data, offset)
        if self._is_struck(client, call):
            self._tell("struck", client, operation)
            _strike(self._fault.kind, pid, call)
            return
        if self._is_recorded:
            self._tell("operation", client, operation)
        call.proceed()

    def _is_struck(self, client: int, call: seccomp.Call) -> bool:
        fault = self._fault
        if fault is None or fault.client != client or (fault.kind == "short" and not call.writes):
            return False
        self._count += 1
        return self._count == fault.at


def _strike(kind: str, pid: int, call: seccomp.Call) -> None:
    match kind:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "stop":
            os.kill(pid, signal.SIGSTOP)  # it asks again when it goes on
        case "short":
            call.write_part(len(call.data) // 2)
        case _:
            call.fail(getattr(errno, kind))


def _live(link: socket.socket, task: Task, *, is_supervised: bool) -> None:
    """Be a client; never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if is_supervised:
            listener = seccomp.listen()
            socket.send_fds(link, [b"!"], [listener])
            os.close(listener)
        link.sendall(pickle.dumps(answer_of(task)))
    finally:
        os._exit(0)
