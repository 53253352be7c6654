"""Jobs that publish and jobs that read, run in client processes. They tell each other by files that they may go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dtckpt
from dtckpt import Layout, Publisher, Subscriber
from dtckpt.checkpoint.live import sources
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.config import Config
from dtckpt.errors import CheckpointCorruptError

FEED = "policy"
SHAPES = {"w": (12, 10), "moment": (8, 6), "norm": (7,)}
WAIT_S = 120.0


def values(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step, alike everywhere."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mesh_of_all() -> dtckpt.Mesh:
    return dtckpt.create_distributed_mesh([("x", Config.from_environ().num_clients)], device_type="CPU")


def sharded(whole: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """Return matrices that are sharded along a dim over all clients; the others as they are."""
    specs = ["x", dtckpt.UNSHARDED] if dim == 0 else [dtckpt.UNSHARDED, "x"]
    layout = Layout(specs, mesh_of_all())
    return {
        name: dtckpt.dtensor.distribute_tensor(tensor, layout.mesh, layout.placements) if tensor.ndim == 2 else tensor
        for name, tensor in whole.items()
    }


def differs(target: dict[str, torch.Tensor], step: int, dim: int) -> list[str]:
    """Return the names of tensors that differ from the tensors of a step."""
    expected = sharded(values(step), dim)
    return [
        name
        for name, tensor in target.items()
        if not all(a.equal(b) for a, b in zip(parts(tensor), parts(expected[name]), strict=True))
    ]


def parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.components if isinstance(tensor, dtckpt.DTensor) else (tensor,)


def note(folder: Path, name: str) -> None:
    """Let other jobs go on that wait for a name; called by client 0."""
    if Config.from_environ().client_id == 0:
        (folder / name).write_bytes(b"")


def await_note(folder: Path, name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not (folder / name).exists():
        assert time.monotonic() < deadline, f"nobody has said {name!r}"
        time.sleep(0.01)


def publish_steps(folder: Path, steps: Sequence[int], **options: Any) -> list[int]:
    """Publish steps, each when a reader has the step before it; return the number of versions in memory each time."""
    held = []
    with Publisher(FEED, folder=folder / "memory", **options) as publisher:
        for step in steps:
            tree = {"model": sharded(values(step), 0), "step": step}
            publisher.publish(tree, step=step, wait=True)
            held.append(len(publisher._held))
            await_note(folder, f"took {step}")
    return held


def publish_and_wait(folder: Path, steps: Sequence[int], **options: Any) -> None:
    """Publish steps one after the other, and stay until a reader says that it has done."""
    with Publisher(FEED, folder=folder / "memory", **options) as publisher:
        for step in steps:
            publisher.publish({"model": sharded(values(step), 0), "step": step}, step=step, wait=True)
        note(folder, "published")
        await_note(folder, "done")


def read_steps(folder: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Take each step beside a target, look that the target is the old one, and apply it."""
    found = []
    target = {"model": sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1), "step": -1}
    addresses = [part.data_ptr() for tensor in target["model"].values() for part in parts(tensor)]
    with Subscriber(FEED, target) as subscriber:
        for number, step in enumerate(steps):
            staged = subscriber.fetch(timeout_s=WAIT_S)
            before = not number or not differs(target["model"], steps[number - 1], 1)
            is_untouched = before and target["step"] == (steps[number - 1] if number else -1)
            staged.apply()
            found.append(
                {
                    "step": subscriber.version.step,
                    "untouched": is_untouched,
                    "differs": differs(target["model"], step, 1),
                    "value": target["step"],
                    "surplus": subscriber.report.nbytes_received - share_nbytes(),
                    "stays": addresses == [p.data_ptr() for t in target["model"].values() for p in parts(t)],
                }
            )
            note(folder, f"took {step}")
    return found


def share_nbytes() -> int:
    """Return the bytes of this client's share of a target: the least that it can receive."""
    return sum(part.nbytes for tensor in sharded(values(0), 1).values() for part in parts(tensor))


def adapted(step: int) -> dict[str, torch.Tensor]:
    """Return a base that never changes, and an adapter of a step; large enough to be read together."""
    generator = torch.Generator().manual_seed(1)
    base = {f"base{number}": torch.randn(512, 640, generator=generator) for number in range(2)}
    return base | {"adapter": torch.full((512, 640), float(step))}


def publish_adapted(folder: Path, steps: Sequence[int]) -> None:
    with Publisher(FEED, folder=folder / "memory") as publisher:
        for step in steps:
            publisher.publish(sharded(adapted(step), 0), step=step, wait=True)
            await_note(folder, f"took {step}")


def read_adapted(folder: Path, steps: Sequence[int], *, fails_at: int = -1) -> list[tuple[int, int, bool]]:
    """Take each step on all clients, from the servers; return bytes received and unchanged, and whether it is right.

    Before a step, another try of it fails on client 1.
    """
    mesh, found = mesh_of_all(), []
    layout = Layout([dtckpt.UNSHARDED, dtckpt.UNSHARDED], mesh)
    target = {
        name: dtckpt.dtensor.distribute_tensor(torch.zeros_like(tensor), mesh, layout.placements)
        for name, tensor in adapted(0).items()
    }
    with (
        mock.patch.object(sources, "folder_of", return_value=None),
        Subscriber(FEED, target) as subscriber,
    ):
        for step in steps:
            if step == fails_at:
                fail_on_client_1(subscriber)
            subscriber.update(timeout_s=WAIT_S)
            is_right = all(parts(target[name])[0].equal(tensor) for name, tensor in adapted(step).items())
            found.append((subscriber.report.nbytes_received, subscriber.report.nbytes_unchanged, is_right))
            note(folder, f"took {step}")
    return found


def fail_on_client_1(subscriber: Subscriber) -> None:
    fails = mock.patch.object(Peer, "read", side_effect=CheckpointCorruptError("cut"))
    with fails if Config.from_environ().client_id == 1 else contextlib.nullcontext():
        try:
            subscriber.update(timeout_s=WAIT_S)
        except dtckpt.errors.DtckptError:
            return
    raise AssertionError("the update went well")


def with_reader(folder: Path, work: Callable[..., Any], *args: Any) -> Any:
    """Do the work of a reader when the versions are published. The publisher ends when all clients have done theirs."""
    config = Config.from_environ()
    await_note(folder, "published")
    try:
        return work(*args)
    finally:
        # Without a DTensor in the target each client reads alone, and client 0 may be the first to end.
        (folder / f"client {config.client_id} is done").write_bytes(b"")
        for client in range(config.num_clients if config.client_id == 0 else 0):
            await_note(folder, f"client {client} is done")
        note(folder, "done")


def restore_newest(folder: Path) -> Any:
    def work() -> Any:
        target = {"model": sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1), "step": -1}
        dtckpt.restore("live://policy", target)
        with dtckpt.open_checkpoint("live://policy@4") as checkpoint:
            older = checkpoint.read("model/w").equal(values(4)["w"]), checkpoint.format, checkpoint.values["step"]
        return differs(target["model"], 5, 1), target["step"], older

    return with_reader(folder, work)


def update_in_place(folder: Path) -> Any:
    def work() -> Any:
        target = {"model": sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1), "step": -1}
        told: list[dtckpt.RestoreReport] = []
        with Subscriber(FEED, target, options=dtckpt.RestoreOptions(report=told.append)) as subscriber:
            first = subscriber.update(in_place=True)
            none = subscriber.update(in_place=True, timeout_s=0)
            subscriber.invalidate()
            again = subscriber.update()
            return first.step, none, again == first, subscriber.is_mixed, differs(target["model"], 5, 1), len(told)

    return with_reader(folder, work)


def refuse_before_writing(folder: Path) -> Any:
    def work() -> Any:
        target = {"model": {"w": torch.zeros(3, 3)}}
        with Subscriber(FEED, target) as subscriber:
            errors = []
            for in_place in (False, True):
                try:
                    subscriber.update(in_place=in_place)
                except dtckpt.errors.DtckptError as error:
                    errors.append(type(error).__name__)
            return errors, subscriber.version, subscriber.is_mixed, target["model"]["w"].count_nonzero().item()

    return with_reader(folder, work)
