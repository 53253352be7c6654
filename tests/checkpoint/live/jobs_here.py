"""Jobs of one client each, all in this process, each with its own connection to a coordinator."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dtckpt import Publisher, Subscriber
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.coordination.api import Member
from dtckpt.coordination.connect import set_coordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.grpc_client import GrpcCoordination

FEED = "policy"
WAIT_S = 20.0


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step: a function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 6, generator=generator) for name in ("a", "b", "c")}


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(8, 6) for name in ("a", "b", "c")}


def has_step(tree: dict[str, torch.Tensor], step: int) -> bool:
    return all(tree[name].equal(value) for name, value in weights(step).items())


def publish(publisher: Publisher, step: int, tree: Any = None, **options: Any) -> Any:
    return publisher.publish(weights(step) if tree is None else tree, step=step, **{"wait": True} | options)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class Jobs:
    """Jobs by name.

    Args:
        port: Of the coordinator.
        folder: Where publishers keep their versions.
        heartbeat_timeout_s: Of the jobs.
    """

    def __init__(self, port: int, folder: Path, heartbeat_timeout_s: float = 10.0) -> None:
        self.folder = folder
        self._port, self._heartbeat_timeout_s = port, heartbeat_timeout_s
        self._connections: dict[tuple[str, int], GrpcCoordination] = {}
        self._publishers: list[Publisher] = []

    def connection(self, job: str, attempt: int = 0) -> GrpcCoordination:
        found = self._connections.get((job, attempt))
        if found is None:
            member = Member(job, 0, 1, secrets.randbits(60), attempt)
            found = GrpcCoordination(f"127.0.0.1:{self._port}", member, heartbeat_timeout_s=self._heartbeat_timeout_s)
            found.register()
            self._connections[job, attempt] = found
        return found

    def feeds(self, job: str, attempt: int = 0) -> FeedClient:
        return feed_client(self.connection(job, attempt))

    @contextmanager
    def being(self, job: str, attempt: int = 0) -> Iterator[None]:
        """Be the process of a job."""
        set_coordination(self.connection(job, attempt))
        yield

    def publisher(self, job: str = "trainer", attempt: int = 0, **options: Any) -> Publisher:
        with self.being(job, attempt):
            options = {"folder": self.folder, "address": "127.0.0.1", "timeout_s": 10.0} | options
            self._publishers.append(Publisher(FEED, **options))
        return self._publishers[-1]

    def fetch(self, subscriber: Subscriber, job: str = "engine", **options: Any) -> Any:
        with self.being(job):
            return subscriber.fetch(**{"timeout_s": WAIT_S} | options)

    def update(self, subscriber: Subscriber, job: str = "engine", **options: Any) -> Any:
        with self.being(job):
            return subscriber.update(**{"timeout_s": WAIT_S} | options)

    def kill(self, job: str, attempt: int = 0) -> None:
        """Let a job end as a killed one does: silently."""
        connection = self._connections.pop((job, attempt))
        feed_client(connection).close()
        connection.abandon("killed")
        for publisher in self._publishers:
            if publisher._coordination is connection:
                publisher._server.close()
        self._publishers = [each for each in self._publishers if each._coordination is not connection]

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close(has_failed=True)
        for connection in self._connections.values():
            feed_client(connection).close()
            connection.leave()
