"""``dtckpt-coordinator``: the command."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt_server.rules import Rules
from dtckpt_server.service import CoordinatorService

logger = logging.getLogger("dtckpt_server")

EXIT_UNAVAILABLE = 69
STOP_GRACE_S = 2.0
HEALTH_NAMES = ("", pb.DESCRIPTOR.services_by_name["Coordinator"].full_name, "liveness", "readiness")
OPTIONS = (
    # All clients arrive at a barrier together; the default cap drops calls at about a thousand.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 30_000),
    ("grpc.max_receive_message_length", 256 << 10),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without this a second coordinator would silently share the port.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve. Port 0 takes any free one."""

    host: str = "127.0.0.1"
    port: int = 50051
    heartbeat_timeout_s: float = 60.0
    port_file: Path | None = None


class Server:
    """A coordinator that listens. Lives on one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._service = CoordinatorService(Rules(config.heartbeat_timeout_s, secrets.randbits(63)))
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=OPTIONS)
        self._ticking: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be used.
        """
        pb_grpc.add_CoordinatorServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = _address(self._config.host, self._config.port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        self._ticking = asyncio.create_task(self._tick_forever())
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: int) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)

    async def _tick_forever(self) -> None:
        tick_s = min(self._config.heartbeat_timeout_s / 10, 0.25)
        while True:
            self._service.tick()
            await asyncio.sleep(tick_s)

    async def wait_for_failure(self) -> None:
        """Return never, unless what judges heartbeats and deadlines fails."""
        assert self._ticking is not None  # noqa: S101  set by start()
        await asyncio.shield(self._ticking)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Become not ready, send waiters away, and end."""
        await self._health.enter_graceful_shutdown()
        self._service.drain()
        await self._server.stop(grace_s)
        if self._ticking is not None:
            self._ticking.cancel()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _write_port(path: Path, port: int) -> None:
    """Write whole or not at all, since someone waits for the file to appear."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(f"{port}\n")
    scratch.replace(path)


async def run(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends at once."""
    signals = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    server = Server(config)
    await server.start()
    logger.warning("serving in plaintext and without authentication; keep the port inside a trusted network")
    if config.port_file is not None:
        _write_port(config.port_file, server.port)
    click.echo(f"listening on {_address(config.host, server.port)}")
    stopping = asyncio.ensure_future(signals.get())
    failing = asyncio.ensure_future(server.wait_for_failure())
    await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
    logger.info("shutting down")
    again = asyncio.ensure_future(signals.get())
    await asyncio.wait([asyncio.ensure_future(server.stop()), again], return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        failing.result()


@click.group()
def main() -> None:
    """Coordinator of dtckpt jobs: heartbeats, and barriers with votes."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=50051, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free port.")
@click.option(
    "--heartbeat-timeout-s",
    default=60.0,
    show_default=True,
    envvar="DTCKPT_HEARTBEAT_TIMEOUT_S",
    type=click.FloatRange(min=0.1, max=86400),
    help="Silence after which a task is lost.",
)
@click.option("--port-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the port here when ready.")
def serve(host: str, port: int, heartbeat_timeout_s: float, port_file: Path | None) -> None:
    """Serve until SIGTERM. Exit codes: 0 stopped, 2 usage, 69 the address cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    config = ServerConfig(host, port, heartbeat_timeout_s, port_file)
    try:
        asyncio.run(run(config))
    except OSError as error:
        click.echo(f"dtckpt-coordinator: error: {error}", err=True)
        sys.exit(EXIT_UNAVAILABLE)


if __name__ == "__main__":
    main()
