"""A job that publishes to many hosts, and readers that serve its versions on; each host is a process with a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from dtckpt import Publisher, Subscriber
from dtckpt.checkpoint.parts import server

from .live_cases import FEED, WAIT_S, await_note, note

NUM_TENSORS, NUM_ELEMENTS = 24, 40_000
NBYTES = NUM_TENSORS * NUM_ELEMENTS * 4


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step: several answers long."""
    generator = torch.Generator().manual_seed(step)
    return {f"w{number}": torch.randn(NUM_ELEMENTS, generator=generator) for number in range(NUM_TENSORS)}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def differs(target: dict[str, torch.Tensor], step: int) -> list[str]:
    return [name for name, tensor in weights(step).items() if not tensor.equal(target[name])]


def named(host: str) -> None:
    """Give the host of this process a name: without it, all processes of the tests were on one host."""
    os.environ["DTCKPT_HOST"] = host


def counted_answers() -> list[int]:
    """Count the bytes of each answer that this process's server sends from now on."""
    sizes, answer = [], server._PartHandler._answer

    def counting(self: Any, parts: Any, status: int = 200) -> None:
        sizes.append(sum(map(len, parts)))
        answer(self, parts, status)

    server._PartHandler._answer = counting
    return sizes


def slow_answers(seconds: float) -> None:
    """Let this process's server wait before each answer, so that others come in the middle."""
    answer = server._PartHandler._answer

    def waiting(self: Any, parts: Any, status: int = 200) -> None:
        time.sleep(seconds)
        answer(self, parts, status)

    server._PartHandler._answer = waiting


def publish(folder: Path, ends: list[str], steps: tuple[int, ...] = (1,), slow_s: float = 0.0) -> int:
    """Publish steps, and stay until readers have said the last words; return the bytes that the server sent."""
    named("trainer")
    answer = server._PartHandler._answer
    sizes = counted_answers()
    if slow_s:
        slow_answers(slow_s)
    try:
        with Publisher(FEED, folder=folder / "trainer") as publisher:
            for step in steps:
                publisher.publish(weights(step), step=step, wait=True)
                note(folder, f"published {step}")
            for end in ends:
                await_note(folder, end)
    finally:
        server._PartHandler._answer = answer
    return sum(sizes)


def read_on(folder: Path, host: str, ends: list[str], **options: Any) -> dict[str, Any]:
    """Take a version and serve it on; stay until all readers have it."""
    named(host)
    await_note(folder, "published 1")
    target = zeros()
    start = time.monotonic()
    with Subscriber(FEED, target, **{"serve": True, "folder": folder / host} | options) as subscriber:
        try:
            subscriber.update(timeout_s=WAIT_S)
        finally:
            note(folder, f"{host} has it")  # or has failed: nobody else shall wait
        seconds = time.monotonic() - start
        for end in ends:
            await_note(folder, end)
        report = subscriber.report
        assert report is not None
        return {
            "differs": differs(target, 1),
            "pulled": dict(report.nbytes_pulled_by_host),
            "mapped": report.nbytes_mapped,
            "sent": dict(report.nbytes_by_host),
            "passed_over": list(report.passed_over),
            "seconds": seconds,
        }
