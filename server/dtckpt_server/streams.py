"""Open heartbeat streams, on which clients arrive, and are told what they have not asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt_server.events import Identity

logger = logging.getLogger("dtckpt_server")

MAX_UNSENT = 64
"""What waits for one client to read, or for a verdict to tell it; more is not begun, as its next call says the same."""


class Stream:
    """The stream of one client, as its handler holds it.

    gRPC takes one message at a time per stream, and answers and notices come from different asyncio tasks: hence the
    lock.
    """

    __slots__ = ("_context", "_lock", "handler", "tasks")

    def __init__(self, context: Any) -> None:
        self.handler = asyncio.current_task()
        self.tasks: set[asyncio.Task[None]] = set()
        """What is to be sent, and ends with the stream."""
        self._context = context
        self._lock = asyncio.Lock()

    @property
    def is_full(self) -> bool:
        return len(self.tasks) >= MAX_UNSENT

    async def send(self, response: pb.HeartbeatStreamResponse) -> None:
        async with self._lock:
            await self._context.write(response)

    async def send_if_open(self, response: pb.HeartbeatStreamResponse) -> None:
        """Send what the client learns in another way, too, if the stream is over."""
        try:
            await self.send(response)
        except Exception as error:  # gRPC has no common class for "the stream is over"
            logger.debug("a message was not sent: %s", error)


class Streams:
    """The open streams, by client."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[int, tuple[Identity, Stream]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, who: Identity, stream: Stream) -> None:
        """Make this the stream of a client, which has one at a time."""
        self._streams.setdefault(who.job, {})[who.task] = (who, stream)

    def remove(self, who: Identity, stream: Stream) -> None:
        for task in stream.tasks:
            task.cancel()
        job = self._streams.get(who.job, {})
        if job.get(who.task) == (who, stream):
            del job[who.task]
            if not job:
                del self._streams[who.job]

    def tell_tasks(self, job: str, tasks: Iterable[int], notice: pb.Notice) -> None:
        """Tell the tasks of a job that have a stream."""
        streams = self._streams.get(job)
        if streams:
            self._tell((streams[task][1] for task in tasks if task in streams), notice)

    def tell(self, who: Identity, notice: pb.Notice) -> None:
        """Tell one life of a task, if its stream is the open one."""
        holder, stream = self._streams.get(who.job, {}).get(who.task, (None, None))
        if stream is not None and holder == who:
            self._tell((stream,), notice)

    def _tell(self, streams: Iterable[Stream], notice: pb.Notice) -> None:
        response = pb.HeartbeatStreamResponse(notice=notice)
        for stream in streams:
            if not stream.is_full:
                self.spawn(stream, stream.send_if_open(response))

    def spawn(self, stream: Stream, sending: Coroutine[Any, Any, None]) -> None:
        """Send something when it is there; never, if the stream ends before."""
        task = asyncio.ensure_future(sending)
        for tasks in (self._tasks, stream.tasks):  # the event loop alone would not keep it
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def end(self) -> None:
        """End all streams when what was to be told is told; their handlers see a `CancelledError`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for job in self._streams.values():
            for _, stream in job.values():
                if stream.handler is not None:
                    stream.handler.cancel()
