"""Work beside the current CUDA streams: what waits for what, and whose memory is kept. All of CUDA is a stand-in."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dtckpt.comm.torch_device import SideStreams
from dtckpt.redistribution import execute

HOST = torch.device("cpu")


class Stream:
    """Notes its calls in a log."""

    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, HOST

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"the end of {self.name}"


@pytest.fixture
def log(monkeypatch):
    """What happens to the streams; `torch.cuda.current_stream` is called ``current``, the stream beside it ``side``."""
    lines = []
    monkeypatch.setattr("dtckpt.comm.torch_device._stream", lambda _: Stream("side", lines))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("current", lines))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return lines


def tensor(name, log):
    tensor = torch.empty(1)
    tensor.record_stream = lambda stream: log.append(f"{name} is kept for {stream.name}")
    return tensor


def test_work_is_ordered_and_memory_kept(log):
    streams = SideStreams([HOST, HOST])

    def work():
        log.append("work")
        return [tensor("result", log)]

    streams.run(work, [tensor("input", log)])
    assert log == ["side waits for current", "input is kept for side", "work"]


def test_results_are_kept_for_the_stream_that_waits(log, monkeypatch):
    streams = SideStreams([HOST])
    streams.run(lambda: [tensor("result", log)], [])
    log.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("another", log))
    streams.wait()
    assert log == ["another waits for the end of side", "result is kept for another"]


def test_inputs_are_kept_though_the_work_fails(log):
    with pytest.raises(ZeroDivisionError):
        SideStreams([HOST]).run(lambda: 1 / 0, [tensor("input", log)])
    assert log[-1] == "input is kept for side"


def test_tensors_on_the_host_may_come_with_those_on_gpus(monkeypatch):
    devices = []

    class Unused:
        def __init__(self, gpus):
            devices.extend(gpus)

        def run(self, *_): ...

    class OnGpu:
        device = torch.device("cuda", 1)

    monkeypatch.setattr(execute, "SideStreams", Unused)
    execute.redistribute_components([], [{0: torch.empty(1)}, {0: OnGpu()}, {0: OnGpu()}], is_async=True)
    assert devices == [torch.device("cuda", 1)]


def test_clients_that_only_receive_do_so_beside_the_current_stream(monkeypatch):
    enqueued = []
    monkeypatch.setattr(execute, "EnqueuedRedistribution", lambda *arguments: enqueued.append(arguments[-1]))
    change = SimpleNamespace(device=torch.device("cuda", 2), device_type="cuda")
    execute.redistribute_components([SimpleNamespace(is_local=False, change=change)], [{}], is_async=True)
    assert enqueued == [[torch.device("cuda", 2)]]
