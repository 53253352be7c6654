"""A job that publishes to many hosts, and readers that serve its versions on; each host is a process with a folder."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dtckpt import Publisher, Subscriber
from dtckpt.checkpoint.live import fan_out, pulls
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.checkpoint.live.pulls import HeldPart
from dtckpt.checkpoint.parts import server
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.config import Config
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import StorageFullError

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


def named(host: str, *, is_patient: bool = False) -> None:
    """Give the host of this process a name: without it, all processes of the tests were on one host.

    Args:
        host: The name.
        is_patient: Whether no relay takes another way because of the time that it waits: for tests that count bytes.
    """
    os.environ["DTCKPT_HOST"] = host
    pulls.ANSWER_NBYTES = 500_000
    if is_patient:
        fan_out.LONELY_S = fan_out.INSIST_S = fan_out.STALL_S = fan_out.IDLE_S = WAIT_S


def counted_answers() -> list[int]:
    """Count the bytes of each answer that this process's server sends from now on."""
    sizes, answer = [], server._PartHandler._answer

    def counting(self: Any, parts: Any, status: int = 200) -> None:
        sizes.append(sum(map(len, parts)))
        answer(self, parts, status)

    server._PartHandler._answer = counting
    return sizes


def publish(folder: Path, ends: list[str], steps: tuple[int, ...] = (1,), *, is_patient: bool = False) -> int:
    """Publish steps, and stay until readers have said the last words; return the bytes that the server sent."""
    named("trainer", is_patient=is_patient)
    answer = server._PartHandler._answer
    sizes = counted_answers()
    try:
        with Publisher(FEED, folder=folder / "trainer") as publisher:
            for step in steps:
                publisher.publish(weights(step), step=step, wait=True)
                note(folder, f"published {step}")
                if step != steps[-1]:
                    await_note(folder, f"took {step}")
            for end in ends:
                await_note(folder, end)
    finally:
        server._PartHandler._answer = answer
    return sum(sizes)


def read_on(folder: Path, host: str, ends: list[str], *, is_patient: bool = False, **options: Any) -> dict[str, Any]:
    """Take a version and serve it on; stay until all readers have it."""
    named(host, is_patient=is_patient)
    client = Config.from_environ().client_id
    await_note(folder, "published 1")
    target = zeros()
    start = time.monotonic()
    with Subscriber(FEED, target, **{"serve": True, "folder": folder / host} | options) as subscriber:
        try:
            subscriber.update(timeout_s=WAIT_S)
        finally:
            (folder / f"{host}{client or ''} has it").write_bytes(b"")  # or has failed: no other client shall wait
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


def die_in_the_middle(folder: Path, host: str) -> None:
    """Be a relay that ends without a word when it has a quarter of the pieces, and another one has some of them."""
    named(host)
    await_note(folder, "published 1")
    received, receive = [], HeldPart.receive
    has_sent, answer = threading.Event(), server._PartHandler._answer

    def telling(self: Any, parts: Any, status: int = 200) -> None:
        answer(self, parts, status)
        if sum(map(len, parts)) > 4 * NUM_ELEMENTS:
            has_sent.set()  # the kernel delivers it, also when this process is dead

    def dying(self: HeldPart, *args: Any) -> None:
        if len(received) == NUM_TENSORS // 4:
            note(folder, f"{host} is in the middle")
            assert has_sent.wait(WAIT_S)
            os.kill(os.getpid(), signal.SIGKILL)
        receive(self, *args)
        received.append(args)

    HeldPart.receive = dying
    server._PartHandler._answer = telling
    with Subscriber(FEED, zeros(), serve=True, folder=folder / host) as subscriber:
        subscriber.update(timeout_s=WAIT_S)


def read_on_after(folder: Path, word: str, host: str, ends: list[str], **options: Any) -> dict[str, Any]:
    """As `read_on`, after another reader has said a word."""
    await_note(folder, word)
    return read_on(folder, host, ends, **options)


def read_on_when_lost(folder: Path, word: str, host: str, ends: list[str]) -> dict[str, Any]:
    """As `read_on_after`, when the registry knows that the publisher is lost."""
    await_note(folder, word)
    named(host)
    feeds, deadline = feed_client(current_coordination()), time.monotonic() + WAIT_S
    while any(feed.num_publishers for feed in feeds.list()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return read_on(folder, host, ends)


def read_on_without_memory(folder: Path, host: str, ends: list[str]) -> dict[str, Any]:
    """As `read_on`, on a host whose memory is full."""
    take = HostFolder.take

    def refuse(self: HostFolder, nbytes: int) -> Any:
        raise StorageFullError(f"no room for {nbytes} bytes")

    HostFolder.take = refuse
    try:
        return read_on(folder, host, ends)
    finally:
        HostFolder.take = take


def damage_after(folder: Path, host: str, ends: list[str]) -> dict[str, Any]:
    """Be a relay whose memory changes when it has the version; return whether it serves that on in the end."""
    named(host)
    await_note(folder, "published 1")
    target = zeros()
    with Subscriber(FEED, target, serve=True, folder=folder / host) as subscriber:
        subscriber.update(timeout_s=WAIT_S)
        (data,) = (folder / host).glob("*/*/0.data")
        with data.open("r+b") as file:
            file.seek(NBYTES // 2)
            file.write(b"wrong")
        note(folder, f"{host} is damaged")
        for end in ends:
            await_note(folder, end)
        relay = subscriber._relay
        assert relay is not None
        return {"held": len(relay._held), "differs": differs(target, 1), "files": len(list(data.parent.glob("*.data")))}


def publish_and_die(folder: Path, word: str) -> None:
    """Publish a version, and end without a word when a reader has said that it has it."""
    named("trainer")
    publisher = Publisher(FEED, folder=folder / "trainer")
    publisher.publish(weights(1), step=1, wait=True)
    note(folder, "published 1")
    await_note(folder, word)
    os.kill(os.getpid(), signal.SIGKILL)


def read_again(folder: Path, host: str) -> tuple[int, list[list[str]], int, list[int]]:
    """Serve two steps on, one after the other; return the relay's memory then, and after its end."""
    named(host)
    target, found = zeros(), []
    with Subscriber(FEED, target, serve=True, folder=folder / host) as subscriber:
        for step in (1, 2):
            await_note(folder, f"published {step}")
            subscriber.update(timeout_s=WAIT_S)
            found.append(differs(target, step))
            note(folder, f"took {step}")
        relay = subscriber._relay
        assert relay is not None
        versions = len(relay.folder.parts().voted)
        mapped = [len(relay._pulls._whole), len(relay.folder._filled)]
    return versions, found, len(list((folder / host).glob("*/*/*.data"))), mapped
