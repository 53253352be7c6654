"""The coordinator as a server: it opens ports, loads credentials, sends ticks to the rules, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt._proto import feeds_pb2 as feeds_pb
from dtckpt._proto import feeds_pb2_grpc as feeds_pb_grpc
from dtckpt._proto import require
from dtckpt.errors import ConfigError
from dtckpt_server.feed_service import FeedService
from dtckpt_server.handlers import add_handlers
from dtckpt_server.quotas import DEFAULTS, Quotas
from dtckpt_server.rules import MAX_CLIENTS, MAX_PAUSE_S, Rules
from dtckpt_server.service import CoordinatorService
from dtckpt_server.status_page import Pages
from dtckpt_server.tls import TlsFiles, server_credentials
from dtckpt_server.tokens import Tokens, read_tokens
from dtckpt_server.turns import MAX_CALLS

logger = logging.getLogger("dtckpt_server")

STOP_GRACE_S = 2.0
RELOAD_S = 10.0
"""How often the file of tokens is read again."""
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
FEEDS_NAME = feeds_pb.DESCRIPTOR.services_by_name["Feeds"].full_name
HEALTH_NAMES = ("", SERVICE_NAME, "liveness", "readiness")
MAX_MESSAGE_NBYTES = (64 << 10) + 3 * MAX_CLIENTS
"""Largest request: an arrival that names every client of the largest job (a varint below 2^21 takes 3 bytes)."""
KEEPALIVE_S = 60.0
"""A connection that has been silent for so long gets a ping."""


def options() -> tuple[tuple[str, int], ...]:
    """Return gRPC's options for a server."""
    return (
        # All clients arrive at a barrier together; the default cap drops calls at about a thousand.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 30_000),
        ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A machine that vanishes says nothing; by default its streams would stay for two hours. gRPC 1.85 ignores
        # grpc.keepalive_timeout_ms.
        ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_S)),
        ("grpc.http2.ping_timeout_ms", int(1000 * KEEPALIVE_S / 3)),
        # Else a second coordinator would silently share the port.
        ("grpc.so_reuseport", 0),
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve. Port 0 takes any free one.

    Args:
        tls: Certificate files; None serves in plaintext.
        tokens: Tokens by job; None lets every client do everything.
        tokens_file: The file of ``tokens``, to be read again from time to time.
        health_port: Plaintext port for ``grpc.health.v1`` alone, as probes speak no TLS; None: no such port.
        metrics_port: Port for metrics and the status page, over HTTP; None: none.
        drain_timeout_s: How long open barriers may go on after the order to stop.
        max_calls: Calls under way at one time; more are refused with UNAVAILABLE, which clients repeat.
        quotas: Limits for one owner.
        reflection: Whether to offer gRPC reflection.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    heartbeat_timeout_s: float = 60.0
    tls: TlsFiles | None = None
    tokens: Tokens | None = None
    tokens_file: Path | None = None
    health_port: int | None = None
    metrics_port: int | None = None
    drain_timeout_s: float = 0.0
    max_calls: int = MAX_CALLS
    quotas: Quotas = DEFAULTS
    reflection: bool = False


class Server:
    """A coordinator that listens. Lives on one event loop.

    After `start`, ``port``, ``health_port`` and ``metrics_port`` are the ports on which it listens.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        rules = Rules(config.heartbeat_timeout_s, secrets.randbits(63), config.quotas)
        self._service = CoordinatorService(
            rules, tokens=config.tokens, max_calls=config.max_calls, quotas=config.quotas
        )
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=options())
        self._health_server: grpc.aio.Server | None = None
        self._running: list[asyncio.Task[None]] = []
        self.port = 0
        self.health_port: int | None = None
        self.metrics_port: int | None = None
        self._pages: Pages | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: An address cannot be used.
            ConfigError: The TLS files cannot be used.
            DependencyError: The installed protobuf is too old for reflection.
        """
        config = self._config
        refuse = self._service.refuse
        add_handlers(pb_grpc.add_CoordinatorServicer_to_server, self._service, self._server, refuse)
        feeds = FeedService(self._service)
        add_handlers(feeds_pb_grpc.add_FeedsServicer_to_server, feeds, self._server, refuse)
        add_handlers(health_pb2_grpc.add_HealthServicer_to_server, self._health, self._server, refuse)
        if config.reflection:
            self._reflect()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        credentials = server_credentials(config.tls) if config.tls else None
        self.port = _listen(self._server, config.host, config.port, credentials)
        if config.health_port is not None:
            self._health_server = grpc.aio.server(options=options())
            add_handlers(health_pb2_grpc.add_HealthServicer_to_server, self._health, self._health_server, refuse)
            self.health_port = _listen(self._health_server, config.host, config.health_port, None)
            await self._health_server.start()
        if config.metrics_port is not None:
            service, loop = self._service, asyncio.get_running_loop()
            where = (config.host, config.metrics_port)
            self._pages = Pages(where, lambda: service.rules, service.metrics, loop, service.clock)
            self.metrics_port = self._pages.port
        await self._server.start()
        self._running.append(asyncio.create_task(self._tick_forever()))
        if config.tokens_file is not None:
            self._running.append(asyncio.create_task(self._reload_forever(config.tokens_file)))
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def _reflect(self) -> None:
        require("grpc_reflection.v1alpha.reflection_pb2")
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

        servicer = reflection.aio.ReflectionServicer(
            (SERVICE_NAME, FEEDS_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        )
        add = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add_handlers(add, servicer, self._server, self._service.refuse)

    async def _set_health(self, status: int) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)

    async def _tick_forever(self) -> None:
        tick_s = min(self._config.heartbeat_timeout_s / 10, 0.25)
        loop = asyncio.get_running_loop()
        while True:
            await self._service.tick()
            due_at = loop.time() + tick_s
            await asyncio.sleep(tick_s)
            late_s = max(loop.time() - due_at, 0.0)
            self._service.metrics.note_lag(late_s)
            if late_s > MAX_PAUSE_S:
                logger.warning("the event loop was blocked, or the process stopped, for %.1f s", late_s)

    async def _reload_forever(self, path: Path) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                self._service.use_tokens(read_tokens(path))
            except ConfigError as error:
                logger.error("keeping the tokens that are in use: %s", error)

    async def wait_for_failure(self) -> None:
        """Return only if a background task (ticks, reading tokens again) fails; then raise its error."""
        await asyncio.wait([asyncio.shield(task) for task in self._running], return_when=asyncio.FIRST_COMPLETED)
        for task in self._running:
            if task.done():
                task.result()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop: report not ready, let open barriers end, refuse the calls that still wait, and close the ports."""
        await self._health.enter_graceful_shutdown()
        await self._service.drain(self._config.drain_timeout_s)
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)
        if self._pages is not None:
            await asyncio.to_thread(self._pages.close)
        for task in self._running:
            task.cancel()


def address(host: str, port: int) -> str:
    """Return ``host:port``, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    where = address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {where}: {error}") from error
