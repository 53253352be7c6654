"""A client's heartbeat stream: beats go out when they are due, arrivals at once, and what the coordinator has to say
comes back.

gRPC draws the requests in a thread of its own; the answers are read in the thread that calls `HeartbeatStream.run`.
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
    """One stream, from its first beat until it breaks or is ended.

    A stream that stays silent for an interval after a beat is broken, whatever the connection says: a network that
    swallows everything reports nothing.

    Args:
        beat: Makes the request of a sequence number.
        interval_s: Between two beats, and how long an answer may take.
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
        """What is to be sent before the next beat is due; None: a beat."""
        self._is_ending = False
        self._unanswered_since: float | None = None
        """When a beat was sent that is not answered; an arrival's answer takes as long as the others."""
        self._lock = threading.Lock()
        self._is_over = False
        self._arrivals: dict[int, Future[pb.HeartbeatStreamResponse | None]] = {}
        self._call: grpc.RpcContext | None = None

    def wake(self) -> None:
        """Send a beat now."""
        self._due.put(None)

    def arrive(self, request: pb.ArriveRequest, timeout_s: float) -> pb.HeartbeatStreamResponse | None:
        """Arrive, and wait as the request says.

        Returns:
            The coordinator's answer. None if nothing has come on this stream yet, if it ended before, or if there is
            none for so long; the arrival may have come through or not, and may be repeated.
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
        """Send no more beats, and let `run` return when the coordinator has answered those that were sent."""
        self._is_ending = True
        self.wake()
        if at_once and self._call is not None:
            self._call.cancel()

    def run(self, stub: pb_grpc.CoordinatorStub, hear: Callable[[pb.HeartbeatStreamResponse], None]) -> None:
        """Beat until the stream ends.

        Args:
            stub: The coordinator.
            hear: Takes what comes back, but the answers to arrivals.

        Raises:
            grpc.RpcError: The coordinator refused it, or it broke.
        """
        try:
            call = self._call = stub.HeartbeatStream(self._messages())
            call.add_callback(self.end)  # else the thread that draws the messages would wait for the next to be due
            for response in call:
                if response.sequence:
                    self.num_answers += 1
                    self._unanswered_since = None
                if (answer := self._arrivals.pop(response.sequence, None)) is not None:
                    answer.set_result(response)
                else:
                    hear(response)
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
                beat_at = now + self._interval_s  # whatever arrives meanwhile
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
