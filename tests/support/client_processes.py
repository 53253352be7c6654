"""Client processes that stay: started once, they run one case after the other, as the clients of a new job each time.

The test process hosts the store where they meet, so the death of a client takes nothing away from the others. A case
is a function of some test module; it runs on every client, and what it returns or raises comes back as an `Answer`.
Every wait is bounded; clients that died, or did not answer, are replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import forkserver

CASE_TIMEOUT_S = 180.0
START_TIMEOUT_S = 180.0
READY = b"ready"


@dataclass(frozen=True)
class Task:
    """One client's part of a case."""

    case: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    environment: dict[str, str]
    store: tuple[str, int] | None
    """Where to make a process group; None makes none."""
    backend: str = "gloo"
    """The group's."""


@dataclass(frozen=True)
class Answer:
    """What became of a case on one client: it returned, it raised, or (neither) it died."""

    value: Any = None
    error: str = ""
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    trace: str = ""
    has_died: bool = False


_job_numbers = itertools.count()
"""Of all pools: several jobs may meet at one coordinator."""


def environment_of(client: int, clients: int, job: str, port: int, heartbeat_timeout_s: float) -> dict[str, str]:
    """Return what torchrun tells a client whose job meets at the store of ``port``."""
    return {
        "RANK": str(client),
        "WORLD_SIZE": str(clients),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job,
        "DTCKPT_HEARTBEAT_TIMEOUT_S": str(heartbeat_timeout_s),
    }


class Worker:
    """The parent's side of one process.

    Args:
        number: Tells it from others.
        connection: To a process that runs `serve` already; default: a new one is started.
        process: That process.
    """

    def __init__(self, number: int, connection: Any = None, process: Any = None) -> None:
        self._connection, self.process, self._is_ready = connection, process, False
        if connection is None:
            self._connection, theirs = forkserver.Pipe()
            self.process = forkserver.start(serve, theirs, name=f"client-process-{number}")
            theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until it has started, which takes seconds that no case should pay for: the server may be importing."""
        if not self._is_ready:
            assert self._connection.poll(START_TIMEOUT_S), f"{self.process.name} did not start"
            self._is_ready = self._connection.recv_bytes() == READY

    def start(self, task: Task) -> None:
        self._connection.send_bytes(pickle.dumps(task))

    def answer(self, deadline: float) -> Answer | None:
        """Return the answer; None if there was none in time."""
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return None
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(10)
            return Answer(has_died=True)

    def stop(self, kind: signal.Signals = signal.SIGKILL) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, kind)
        self.process.join(10)
        self._connection.close()


class Pool:
    """Processes that are the clients of one case after another."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()
        self._workers: list[Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        clients: int,
        group: bool = False,
        backend: str = "gloo",
        coordinator: str = "",
        heartbeat_timeout_s: float = 10.0,
        by_client: dict[int, tuple[Any, ...]] | None = None,
        timeout_s: float = CASE_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Answer]:
        """Run ``case(*args, **kwargs)`` on every client of a new job; return the answers in client order.

        Args:
            case: Importable function.
            args: The same for every client.
            clients: Number of clients.
            group: Whether to make a process group of `torch.distributed` first.
            backend: The group's.
            coordinator: Address of a coordinator; else clients meet at the store.
            heartbeat_timeout_s: When a client counts as lost.
            by_client: Further arguments of some clients.
            timeout_s: How long the clients may take.
            kwargs: The same for every client.
        """
        while len(self._workers) < clients:
            self._workers.append(Worker(next(self._numbers)))
        for worker in self._workers[:clients]:
            worker.wait_until_ready()
        job = f"job-{os.getpid()}-{next(_job_numbers)}"
        for client, worker in enumerate(self._workers[:clients]):
            environment = environment_of(client, clients, job, self._store.port, heartbeat_timeout_s)
            environment |= {"DTCKPT_COORDINATOR": coordinator} if coordinator else {}
            more = (by_client or {}).get(client, ())
            store = (job, self._store.port) if group else None
            worker.start(Task(case, (*args, *more), kwargs, environment, store, backend))
        deadline = time.monotonic() + timeout_s
        answers = [worker.answer(deadline) for worker in self._workers[:clients]]
        for client, answer in enumerate(answers):
            if answer is None:
                self._workers[client].stop(signal.SIGABRT)  # faulthandler says where it hangs
        gone = [client for client, answer in enumerate(answers) if answer is None or answer.has_died]
        for client in gone:
            self._workers[client] = Worker(next(self._numbers))
        silent = [client for client, answer in enumerate(answers) if answer is None]
        assert not silent, f"clients {silent} did not answer within {timeout_s} s; the others: {answers}"
        return [answer for answer in answers if answer is not None]

    def values(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `run`, for cases that succeed on all clients; return their results."""
        answers = self.run(case, *args, **kwargs)
        for client, answer in enumerate(answers):
            assert not answer.has_died, f"client {client} died"
            assert not answer.error, f"client {client}: {answer.error}: {answer.text}\n{answer.trace}"
        return [answer.value for answer in answers]


# --- in the client processes --------------------------------------------------------------------------------------


def serve(connection: Any) -> None:
    """Run cases until the parent hangs up."""
    faulthandler.enable()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    connection.send_bytes(READY)
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(answer_of(task)))
        del task
        # Not before: until here an error may hold process groups by its frames. Modules and caches are left. They stay,
        # so the collector need not look at them after each case.
        gc.collect()
        gc.freeze()


def answer_of(task: Task) -> Answer:
    """Do a client's part of a case."""
    start = time.monotonic()
    before = dict(os.environ)
    os.environ.update(task.environment)
    try:
        if task.store:
            _make_group(task)
        start = time.monotonic()
        value = task.case(*task.args, **task.kwargs)
        return Answer(value=value, seconds=time.monotonic() - start)
    except BaseException as error:
        facts = {name: getattr(error, name) for name in ("clients", "missing") if hasattr(error, name)}
        return Answer(
            error=type(error).__name__,
            text=str(error),
            facts=facts,
            seconds=time.monotonic() - start,
            trace=traceback.format_exc(),
        )
    finally:
        _tidy_up()
        os.environ.clear()
        os.environ.update(before)


def _make_group(task: Task) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    job, port = task.store or ("", 0)
    store = dist.PrefixStore(job, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    rank, clients = (int(task.environment[name]) for name in ("RANK", "WORLD_SIZE"))
    timeout = timedelta(seconds=30)
    try:
        dist.init_process_group(task.backend, store=store, rank=rank, world_size=clients, timeout=timeout)
        # A case that exchanges nothing may be over, and its connections with it, before the last client has all of its.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{client}" for client in range(clients)], timeout)
    except BaseException:
        dist.distributed_c10d._world.group_count = (
            0  # names the next one; a group that came to be resets it when it goes
        )
        raise


def _tidy_up() -> None:
    import torch.distributed as dist

    from dtckpt.comm.torch_private import forget_meshes
    from dtckpt.coordination.connect import shutdown_multi_client
    from dtckpt.layout import clients

    shutdown_multi_client()
    clients._virtual_devices.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A mesh holds its process groups, and the threads of each wake a hundred times a second.
    forget_meshes()
