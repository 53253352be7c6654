"""The coordinator's side of heartbeat streams: send answers to heartbeats and arrivals, and notices unasked.

Messages to a client are queued on its `Stream` ("owed") until they are sent. Queues are bounded: a client that does not
read gets no more notices, and its arrivals are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt.coordination.task_identity import Identity

logger = logging.getLogger("dtckpt_server")

MAX_UNSENT = 64
"""How many messages and arrivals may wait on one stream: messages for the client to read, arrivals for a verdict."""
MAX_UNSENT_NBYTES = 4 << 20
"""How many bytes of collected payloads may wait for one client to read; if it reads, at most one answer waits."""
GATHER_S = 0.02
"""How long answers to heartbeats are gathered. To wake up for each would add a third to the cost of a heartbeat."""
SETTLE_S = 1.0
"""How long streams that end have time to send the queued messages."""


class Stream:
    """The stream of one client, as its handler has it, with a queue of the messages that are owed to the client."""

    __slots__ = ("_arrivals", "_context", "_lock", "_owed", "_sending", "handler", "owner")

    def __init__(self, context: Any) -> None:
        self.handler = asyncio.current_task()
        self.owner = ""  # whose quotas it counts for
        self._context = context
        self._owed: deque[pb.HeartbeatStreamResponse] = deque()
        self._lock = asyncio.Lock()  # gRPC takes one message at a time per stream
        self._sending: asyncio.Task[None] | None = None
        self._arrivals: set[asyncio.Task[None]] = set()

    @property
    def is_owing(self) -> bool:
        return bool(self._owed)

    @property
    def is_full(self) -> bool:
        return len(self._arrivals) + len(self._owed) >= MAX_UNSENT

    @property
    def is_loaded(self) -> bool:
        """Whether so many bytes wait for the client to read that no further arrival is answered."""
        return sum(len(response.arrived) for response in self._owed) >= MAX_UNSENT_NBYTES

    def owe(self, response: pb.HeartbeatStreamResponse) -> None:
        """Queue a message; it is sent with the next messages."""
        self._owed.append(response)

    def tell(self, notice: pb.HeartbeatStreamResponse) -> None:
        """Send a notice soon; drop it if the queue is full, as the client's next call says the same."""
        if not self.is_full:
            self.owe(notice)
            self.begin_sending()

    def begin_sending(self) -> None:
        """Begin to send the queue, if that is not under way."""
        if self._owed and (self._sending is None or self._sending.done()):
            self._sending = asyncio.ensure_future(self.send_owed_if_open())

    async def send_owed(self) -> None:
        """Send the queue, and wait until all of it is sent."""
        async with self._lock:
            while self._owed:
                await self._context.write(self._owed.popleft())

    async def send_owed_if_open(self) -> None:
        """Send the queue if the stream is still open. If it is over, the client learns the same by its next call."""
        try:
            await self.send_owed()
        except Exception as error:  # gRPC has no common class for "the stream is over"
            logger.debug("a message was not sent: %s", error)

    def spawn(self, arrival: Coroutine[Any, Any, None]) -> None:
        """Let an arrival wait for its verdict, beside the stream's other arrivals."""
        task = asyncio.ensure_future(arrival)
        self._arrivals.add(task)  # the event loop has only a weak reference
        task.add_done_callback(self._arrivals.discard)

    async def settle(self) -> None:
        """Wait until all arrivals are answered and the queue is sent, or the stream is over."""
        if self._arrivals:
            await asyncio.wait(self._arrivals)
        await self.send_owed_if_open()

    def end(self) -> None:
        """Send nothing more, and wait for nothing."""
        self._owed.clear()
        for task in (self._sending, *self._arrivals):
            if task is not None:
                task.cancel()


class Streams:
    """The open streams, by client.

    Args:
        gather_s: How long answers to heartbeats are gathered.
    """

    def __init__(self, gather_s: float) -> None:
        self._streams: dict[str, dict[int, tuple[Identity, Stream]]] = {}
        self._owing: list[Stream] = []
        self._gather_s = gather_s

    def add(self, who: Identity, stream: Stream) -> None:
        """Make this the stream of a client, which has one at a time."""
        self._streams.setdefault(who.job, {})[who.task] = (who, stream)

    def remove(self, who: Identity, stream: Stream) -> None:
        job = self._streams.get(who.job, {})
        if job.get(who.task) == (who, stream):
            del job[who.task]
            if not job:
                del self._streams[who.job]

    def of(self, job: str) -> dict[int, Stream]:
        """Return a copy of the streams of a job, by task."""
        return {task: stream for task, (_, stream) in self._streams.get(job, {}).items()}

    def stream_of(self, who: Identity) -> Stream | None:
        """Return the stream of one life of a task, if that is the open one."""
        holder, stream = self._streams.get(who.job, {}).get(who.task, (None, None))
        return stream if holder == who else None

    async def answer(self, stream: Stream, response: pb.HeartbeatStreamResponse) -> None:
        """Answer a heartbeat, within ``gather_s``. Waits only if the client does not read its answers."""
        if not stream.is_owing:
            if not self._owing:
                asyncio.get_running_loop().call_later(self._gather_s, self._send_owed)
            self._owing.append(stream)
        stream.owe(response)
        if stream.is_full:
            await stream.send_owed()

    def _send_owed(self) -> None:
        owing, self._owing = self._owing, []
        for stream in owing:
            stream.begin_sending()

    async def end(self) -> None:
        """End all streams once their queues are sent, or after `SETTLE_S`; their handlers get a `CancelledError`."""
        streams = [stream for job in self._streams.values() for _, stream in job.values()]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(stream.settle() for stream in streams)), SETTLE_S)
        for stream in streams:
            if stream.handler is not None:
                stream.handler.cancel()
