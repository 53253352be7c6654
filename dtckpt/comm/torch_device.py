"""The `torch.device` of a mesh device, and `SideStreams`: work beside the current streams of GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache

import torch

from dtckpt.errors import LayoutError


def device_of(name: str) -> torch.device:
    """Return the torch device of a mesh device, given by name such as ``/job:worker/task:0/device:GPU:1``.

    Mesh GPUs with an index beyond the number of physical GPUs share these.

    Raises:
        LayoutError: This client has no such device.
    """
    kind, _, index = name.rpartition("device:")[2].partition(":")
    if kind.upper() == "CPU":
        return torch.device("cpu")
    if kind.upper() == "TPU" and "torch_xla" in sys.modules:
        return torch.device("xla", int(index or 0))
    if kind.upper() == "GPU" and torch.cuda.is_available():
        return torch.device("cuda", int(index or 0) % torch.cuda.device_count())
    raise LayoutError(f"there is no torch device for mesh device {name!r} on its client")


class SideStreams:
    """Work on a separate stream per GPU, after all work that the current streams have so far.

    The host never waits. The caching allocator does not reuse memory that the work reads or writes before it has run.

    Args:
        devices: The GPUs.
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
            # The stream that is current now; it need not be the stream that was current in `run`.
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
