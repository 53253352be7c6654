"""A client's heartbeat stream: heartbeats and arrivals to the coordinator, and answers and notices back.

Three threads meet here::

    thread of gRPC             draws requests from `_messages`: a heartbeat when it is due, an arrival at once
    thread that calls `run`    reads answers; gives each to the arrival of its sequence number, notices to a callback
    threads that call `arrive` wait for their answers

A request and its answer have the same sequence number. Notices have none (0).
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import grpc

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc


class HeartbeatStream:
    """One stream, from its first heartbeat until it breaks or is ended.

    A stream counts as broken if a heartbeat has no answer for an interval, even if the connection looks whole: a
    network that drops all packets reports no error.

    Args:
        beat: Makes the heartbeat of a sequence number.
        interval_s: Seconds between two heartbeats; also the longest time that the answer to a heartbeat may take.
        clock: Monotonic seconds.
    """

    def __init__(
        self, beat: Callable[[int], pb.HeartbeatStreamRequest], interval_s: float, clock: Callable[[], float]
    ) -> None:
        self.num_answers = 0
        self._beat = beat
        self._interval_s = interval_s
        self._clock = clock
        self._sequence = itertools.count(1)
        self._due: queue.SimpleQueue[pb.HeartbeatStreamRequest | None] = queue.SimpleQueue()
        """Requests to send before the next heartbeat is due; None: a heartbeat now."""
        self._is_ending = False
        self._unanswered_since: float | None = None
        """Time of the first heartbeat since the last answer. Arrivals do not set it, because they may wait long."""
        self._lock = threading.Lock()
        self._is_over = False
        self._arrivals: dict[int, Future[pb.HeartbeatStreamResponse | None]] = {}
        self._call: grpc.RpcContext | None = None

    def wake(self) -> None:
        """Send a heartbeat now."""
        self._due.put(None)

    def arrive(self, request: pb.ArriveRequest, timeout_s: float) -> pb.HeartbeatStreamResponse | None:
        """Send an arrival, and wait for its answer.

        Returns:
            The coordinator's answer. None if the stream has not had any answer yet, has ended, or does not answer
            within ``timeout_s``. Then the arrival may have succeeded or not, and a repeated arrival is safe.
        """
        answer: Future[pb.HeartbeatStreamResponse | None] = Future()
        with self._lock:
            if self._is_over or not self.num_answers:
                return None
            sequence = next(self._sequence)
            self._arrivals[sequence] = answer
        self._due.put(pb.HeartbeatStreamRequest(task=request.task, sequence=sequence, arrival=request))
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError:
            return None
        finally:
            self._arrivals.pop(sequence, None)

    def end(self, *, at_once: bool = False) -> None:
        """Send no more heartbeats, and let `run` return when the coordinator has answered all requests.

        Args:
            at_once: Break the stream instead, without waiting for answers.
        """
        self._is_ending = True
        self.wake()
        if at_once and self._call is not None:
            self._call.cancel()

    def run(self, stub: pb_grpc.CoordinatorStub, take: Callable[[pb.HeartbeatStreamResponse], None]) -> None:
        """Send heartbeats until the stream ends.

        Args:
            stub: The coordinator.
            take: Called with each response that is not the answer to an arrival.

        Raises:
            grpc.RpcError: The coordinator refused the stream, or it broke.
        """
        try:
            call = self._call = stub.HeartbeatStream(self._messages())
            call.add_callback(self.end)  # else the thread that draws the messages would wait for the next heartbeat
            for response in call:
                if response.sequence:
                    self.num_answers += 1
                    self._unanswered_since = None
                if (answer := self._arrivals.pop(response.sequence, None)) is not None:
                    answer.set_result(response)
                else:
                    take(response)
        finally:
            with self._lock:
                self._is_over = True
                unanswered = list(self._arrivals.values())
            for answer in unanswered:
                answer.set_result(None)

    def _messages(self) -> Iterator[pb.HeartbeatStreamRequest]:
        due, beat_at = None, 0.0
        while not self._is_ending:
            if due is None:
                now = self._clock()
                beat_at = now + self._interval_s  # arrivals in between do not delay the next heartbeat
                if self._unanswered_since is None:
                    self._unanswered_since = now
                due = self._beat(next(self._sequence))
            yield due
            wait_s = beat_at - self._clock()
            try:
                due = self._due.get(timeout=wait_s) if wait_s > 0 else None
            except queue.Empty:
                due = None
            since = self._unanswered_since
            if since is not None and self._clock() - since >= self._interval_s:
                self.end(at_once=True)
