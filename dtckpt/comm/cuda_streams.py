"""CUDA side streams: work that runs beside the current stream until somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache

import torch


class SideStreams:
    """Work on a stream of its own per card, after everything that the current streams have been given so far.

    The host never waits. The caching allocator does not reuse memory that the work reads or writes before it has run.

    Args:
        devices: The cards.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = [_stream(device) for device in dict.fromkeys(devices)]
        self._events: list[torch.cuda.Event] = []
        self._outputs: Sequence[torch.Tensor] = ()

    def run(self, work: Callable[[], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Enqueue ``work`` on the side streams and return its outputs; use them only after `wait`.

        Args:
            work: Enqueues kernels and returns the output tensors.
            inputs: The tensors that it reads.
        """
        with ExitStack() as streams:
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                # Before the work, not after it: kernels that it has enqueued still run if it fails halfway.
                _record(inputs, stream)
                streams.enter_context(torch.cuda.stream(stream))
            self._outputs = work()
        self._events = [stream.record_event() for stream in self._streams]
        return self._outputs

    def wait(self) -> None:
        """Order the next work of the current streams after the side streams' work."""
        for stream, event in zip(self._streams, self._events, strict=True):
            # The stream that is current now; it need not be the one that was current in `run`.
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(event)
            _record(self._outputs, current)


def _record(tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Have the caching allocator keep the tensors' memory until the stream's present work has run."""
    for tensor in tensors:
        if tensor.device == stream.device:
            tensor.record_stream(stream)


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
