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

    def run(self, work: Callable[[], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Enqueue ``work`` and return what it makes, to be used after `wait`."""
        before = [torch.cuda.current_stream(stream.device) for stream in self._streams]
        with ExitStack() as streams:
            for stream, current in zip(self._streams, before, strict=True):
                stream.wait_stream(current)
                streams.enter_context(torch.cuda.stream(stream))
            made = work()
        for stream, current in zip(self._streams, before, strict=True):
            for tensor in inputs:
                if tensor.device == stream.device:
                    tensor.record_stream(stream)
            for tensor in made:
                if tensor.device == stream.device:
                    tensor.record_stream(current)
            self._events.append(stream.record_event())
        return made

    def wait(self) -> None:
        """Order what the current streams do next after the work."""
        for stream, event in zip(self._streams, self._events, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
