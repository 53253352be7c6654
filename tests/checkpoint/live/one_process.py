"""A job that publishes and a job that reads, both in this process, each on virtual devices and with its connection."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.states import bits_of, differences, packed, zeros_of

from dtckpt import DTensor, Layout, LentVersion, Publisher, Subscriber, create_mesh
from dtckpt.checkpoint.live import sources
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.coordination.api import Member
from dtckpt.coordination.connect import set_coordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.layout.clients import virtual_devices

FEED = "policy"
Specs = tuple[Any, ...] | None


class Jobs:
    """Both jobs.

    Args:
        port: Of the coordinator.
        folder: The publisher's memory.
    """

    def __init__(self, port: int, folder: Path) -> None:
        self.folder = folder
        self._connections = {}
        for job in ("trainer", "engine"):
            member = Member(job, 0, 1, secrets.randbits(60), 0)
            self._connections[job] = GrpcCoordination(f"127.0.0.1:{port}", member, heartbeat_timeout_s=10.0)
            self._connections[job].register()
        self.publisher: Publisher | None = None

    @contextmanager
    def job(self, name: str) -> Iterator[None]:
        """Be a process of a job."""
        set_coordination(self._connections[name])
        yield

    def feeds(self, name: str) -> FeedClient:
        return feed_client(self._connections[name])

    def publish(self, tree: Any, step: int) -> None:
        self._open_publisher().publish({"model": tree}, step=step, wait=True)

    def lend(self, tree: Any, step: int) -> LentVersion:
        return self._open_publisher().publish({"model": tree}, step=step, copy=False)

    def _open_publisher(self) -> Publisher:
        if self.publisher is None:
            with self.job("trainer"):
                self.publisher = Publisher(FEED, folder=self.folder, address="127.0.0.1")
        return self.publisher

    def subscriber(self, target: Any, **options: Any) -> Subscriber:
        return Subscriber(FEED, {"model": target}, **options)

    def update(self, subscriber: Subscriber, **options: Any) -> Any:
        """Update the target; return the report."""
        with self.job("engine"):
            subscriber.update(timeout_s=20.0, **options)
        return subscriber.report

    def close(self) -> None:
        with self.job("trainer"):
            if self.publisher is not None:
                self.publisher.close(has_failed=True)
        for connection in self._connections.values():
            feed_client(connection).close()
            connection.leave()


def use_http(monkeypatch) -> None:
    """Let readers find no part on this host."""
    monkeypatch.setattr(sources, "folder_of", lambda _: None)


def on_mesh(whole: Mapping[str, torch.Tensor], axes: Mapping[str, int], specs: Mapping[str, Specs]) -> dict[str, Any]:
    """Return tensors on a mesh of virtual devices of this process; tensors without specs stay plain."""
    devices = 1
    for size in axes.values():
        devices *= size
    with virtual_devices(CPU=devices):
        mesh = create_mesh(dict(axes), device_type="CPU")
        return {
            name: tensor.clone() if specs[name] is None else packed(tensor, Layout(list(specs[name]), mesh))
            for name, tensor in whole.items()
        }


def wrong(tree: Mapping[str, Any], whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Return what differs in a tree from whole tensors, converted to its dtypes."""
    found = []
    for name, tensor in tree.items():
        expected = whole[name].to(tensor.dtype)
        if isinstance(tensor, DTensor):
            found += [f"{name}: {text}" for text in differences(tensor, expected)]
        elif bits_of(tensor) != bits_of(expected):
            found.append(name)
    return found


def blank(whole: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] = {}) -> dict[str, torch.Tensor]:
    return {name: zeros_of(tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in whole.items()}


def nbytes_of(tree: Mapping[str, Any]) -> int:
    """Return the bytes of the distinct regions of a tree: the least that its reader can take."""
    total = 0
    for tensor in tree.values():
        if isinstance(tensor, DTensor):
            shape, mesh = tuple(tensor.shape), tensor.layout.mesh
            regions = {tensor.layout.region(device, shape) for device in mesh.local_device_ids()}
            total += sum(region.numel for region in regions) * tensor.itemsize
        else:
            total += tensor.nbytes
    return total
