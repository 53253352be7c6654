"""A client's heartbeat stream: beats go out when they are due, and what the coordinator has to say comes back.

gRPC draws the requests in a thread of its own; the answers are read in the thread that calls `HeartbeatStream.run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

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
        self._wake = threading.Event()
        self._is_ending = False
        self._unanswered_since: float | None = None
        self._call: grpc.RpcContext | None = None

    def wake(self) -> None:
        """Send a beat now."""
        self._wake.set()

    def end(self, *, at_once: bool = False) -> None:
        """Send no more beats, and let `run` return when the coordinator has answered those that were sent."""
        self._is_ending = True
        self._wake.set()
        if at_once and self._call is not None:
            self._call.cancel()

    def run(self, stub: pb_grpc.CoordinatorStub, hear: Callable[[pb.HeartbeatStreamResponse], None]) -> None:
        """Beat until the stream ends.

        Args:
            stub: The coordinator.
            hear: Takes what comes back.

        Raises:
            grpc.RpcError: The coordinator refused it, or it broke.
        """
        call = self._call = stub.HeartbeatStream(self._beats())
        call.add_callback(self.end)  # else the thread that draws the beats would wait for the next to be due
        for response in call:
            if response.sequence:
                self.num_answers += 1
                self._unanswered_since = None
            hear(response)

    def _beats(self) -> Iterator[pb.HeartbeatStreamRequest]:
        sequence = 0
        while not self._is_ending:
            sequence += 1
            if self._unanswered_since is None:
                self._unanswered_since = self._clock()
            yield self._beat(sequence)
            self._wake.wait(self._interval_s)
            self._wake.clear()
            since = self._unanswered_since
            if since is not None and self._clock() - since >= self._interval_s:
                self.end(at_once=True)
