"""What clients of jobs do in the situations that need several processes of one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dtckpt import Publisher, Subscriber
from dtckpt.checkpoint.live import own_registry
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.config import Config
from dtckpt.errors import DtckptError

from .live_cases import FEED, SHAPES, WAIT_S, await_note, differs, note, sharded, values


def publish_and_stay(folder: Path, steps: list[int], **options: Any) -> None:
    """Publish steps, each when the readers want it, and stay until they have done."""
    with Publisher(FEED, folder=folder / "memory", address="127.0.0.1", **options) as publisher:
        for step in steps:
            await_note(folder, f"want {step}")
            publisher.publish({"model": sharded(values(step), 0)}, step=step, wait=True)
        await_note(folder, "done")


def read_while_one_fails(folder: Path, in_place: bool) -> Any:
    """Take a step; then client 1 fails amid the next one; then all take it."""
    target = {"model": sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1)}
    is_victim, found = Config.from_environ().client_id == 1, []

    def fail(*_: Any) -> None:
        raise OSError("client 1 fails")

    try:
        with Subscriber(FEED, target) as subscriber:
            note(folder, "want 3")
            subscriber.update(timeout_s=WAIT_S)
            note(folder, "want 4")
            with mock.patch.multiple(OpenPart, copy=fail, elements=fail) if is_victim else mock.patch("os.getpid"):
                try:
                    subscriber.update(in_place=in_place, timeout_s=WAIT_S)
                except (DtckptError, OSError) as error:
                    found.append(type(error).__name__)
            step = subscriber.version and subscriber.version.step
            found += [step, subscriber.is_mixed, subscriber.ready(), bool(differs(target["model"], 3, 1))]
            subscriber.update(timeout_s=WAIT_S)
            found += [subscriber.version.step, subscriber.is_mixed, differs(target["model"], 4, 1)]
    finally:
        note(folder, "done")
    return found


def publish_at_own_registry(folder: Path, taken: str, address: str) -> Any:
    """Begin at an address that is taken, and where clients pass others; then publish at a free one."""
    found = []
    for registry in (taken, (address, None)[Config.from_environ().client_id], address):
        try:
            with (
                mock.patch.object(own_registry, "FREE_S", 0.2),
                Publisher(FEED, folder=folder / "memory", address="127.0.0.1", registry=registry) as publisher,
            ):
                publisher.publish(sharded(values(3), 0), step=3, wait=True)
                note(folder, "published")
                await_note(folder, "done")
                found.append("published")
        except DtckptError as error:
            texts = ("is another publisher or coordinator there?", "clients pass different registries")
            found.append((type(error).__name__, [text in str(error) for text in texts]))
    return found


def publish_within_bounds(folder: Path) -> Any:
    """Publish versions of which one fits into the bound of the host, and two do not."""
    tree = {"w": sharded({"w": torch.ones(256, 256)}, 0)["w"]}
    found = []
    # Two clients of one host: each alone would find room for its part of the second version.
    with Publisher(
        FEED, folder=folder / "memory", address="127.0.0.1", max_nbytes=400 << 10, when_full="raise"
    ) as publisher:
        for step in range(3):
            try:
                handle = publisher.publish(tree, step=step, wait=True)
                found.append("skipped" if handle is None else "published")
            except DtckptError as error:
                found.append(type(error).__name__)
            publisher._when_full = "raise" if step == 0 else "skip"
        dist.barrier()  # the other client gives back the memory of the last version that failed
        used = sum(path.stat().st_blocks * 512 for path in (folder / "memory").rglob("*.data"))
        dist.barrier()
        return found, used <= 400 << 10


def publish_differently(folder: Path) -> Any:
    """Pass other tags, and other casts, on each client."""
    client, found = Config.from_environ().client_id, []
    tree = sharded(values(1), 0)
    with Publisher(FEED, folder=folder / "memory", address="127.0.0.1") as publisher:
        for options in ({"layout_tags": {"w": str(client)}}, {"cast": {"w": ("float16", "bfloat16")[client]}}):
            try:
                publisher.publish(tree, step=1, wait=True, **options)
            except DtckptError as error:
                found.append((type(error).__name__, "layout_tags" in str(error)))
        publisher.publish(tree, step=2, wait=True)
    return found
