"""CUDA streams beside the current one, for work that is not to be waited for yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache

import torch


class Beside:
    """Work that is enqueued on a stream of its own on each card, after what the current streams do so far.

    The host never waits. Memory that the work reads or writes is kept from reuse until it has run.

    Args:
        devices: The cards.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = [_stream(device) for device in dict.fromkeys(devices)]
        self._events: list[torch.cuda.Event] = []
        self._made: Sequence[torch.Tensor] = ()

    def run(self, work: Callable[[], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Enqueue ``work`` and return what it makes, to be used after `wait`."""
        with ExitStack() as streams:
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                # Before the work: what it has enqueued runs on even if it fails.
                _record(inputs, stream)
                streams.enter_context(torch.cuda.stream(stream))
            self._made = work()
        self._events = [stream.record_event() for stream in self._streams]
        return self._made

    def wait(self) -> None:
        """Order what the current streams do next after the work."""
        for stream, event in zip(self._streams, self._events, strict=True):
            # Which need not be the stream that was current when the work began.
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(event)
            _record(self._made, current)


def _record(tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Keep the memory of tensors from reuse until what the stream does with them has run."""
    for tensor in tensors:
        if tensor.device == stream.device:
            tensor.record_stream(stream)


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
