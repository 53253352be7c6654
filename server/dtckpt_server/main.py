"""The command ``dtckpt-coordinator``: parse options, serve, and end by a signal with its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtckpt.errors import ConfigError, DependencyError
from dtckpt_server.logs import FORMATTERS, start_logging
from dtckpt_server.quotas import DEFAULTS, Quotas
from dtckpt_server.tls import TlsFiles
from dtckpt_server.tokens import Tokens, read_tokens
from dtckpt_server.turns import MAX_CALLS

if TYPE_CHECKING:
    from dtckpt_server.server import ServerConfig

logger = logging.getLogger("dtckpt_server")

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
DEFAULT_HEALTH_PORT = 50052
TOKENS_VARIABLE = "DTCKPT_COORDINATOR_SERVE_TOKENS"
"""Variable with the tokens themselves. Not an option, because every user of the host can see arguments."""
PARENT_POLL_S = 0.25
"""How often a coordinator that ends with its parent looks whether that is gone."""

COLLECTIONS = (700, 10, 1000)
"""Thresholds of Python's cycle collector: for young objects as by default, for all objects a hundredth as often. With
10 000 clients a full collection takes half a second, in which no client gets an answer. Collections came every few
seconds, because each heartbeat replaces some older objects, which are in no cycle."""


def _write_port(path: Path, port: int) -> None:
    """Write the file whole or not at all, because some process waits for it to appear."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(f"{port}\n")
    scratch.replace(path)


async def _parent_ends(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_S)


async def run(config: ServerConfig, port_file: Path | None = None, parent: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT; a second signal ends at once.

    Args:
        config: How to serve.
        port_file: A file for the port.
        parent: Process id; when that process ends, the coordinator ends, too.

    Returns:
        The exit code, 128 and the signal's number; 70 if it failed to stop in order. The code is not 0 because a
        coordinator never completes: a Kubernetes Job would count a drained coordinator as done and start no other.
    """
    from dtckpt_server.server import Server, address

    signals = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    server = Server(config)
    await server.start()
    _warn(config)
    if port_file is not None:
        _write_port(port_file, server.port)
    click.echo(f"listening on {address(config.host, server.port)}")
    if server.health_port is not None:
        click.echo(f"health on {address(config.host, server.health_port)}")
    if server.metrics_port is not None:
        click.echo(f"metrics on http://{address(config.host, server.metrics_port)}/metrics")
    stopping = asyncio.ensure_future(signals.get())
    failing = asyncio.ensure_future(server.wait_for_failure())
    if parent is not None:
        orphaned = asyncio.ensure_future(_parent_ends(parent))
        orphaned.add_done_callback(lambda _: signals.put_nowait(signal.SIGHUP))
    await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
    logger.info("shutting down")
    again = asyncio.ensure_future(signals.get())
    stopped = asyncio.ensure_future(server.stop())
    await asyncio.wait([stopped, again], return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        failing.result()
    if stopped.done() and (error := stopped.exception()):
        logger.error("could not stop in order", exc_info=error)
        return EXIT_INTERNAL
    return 128 + stopping.result()


def _warn(config: ServerConfig) -> None:
    if config.tls is None:
        logger.warning("SERVING IN PLAINTEXT: hosts on the way can read and change all messages")
    if config.tokens is None and (config.tls is None or config.tls.client_ca is None):
        logger.warning("SERVING WITHOUT AUTHENTICATION: any process that reaches the port can take part in any job")


@click.group(context_settings={"auto_envvar_prefix": "DTCKPT_COORDINATOR", "max_content_width": 110})
def main() -> None:
    """Coordinator of dtckpt jobs: heartbeats, and barriers with votes."""


_PORT = click.IntRange(0, 65535)
_COUNT = click.IntRange(min=1)
_FILE = click.Path(dir_okay=False, path_type=Path)


@main.command(
    epilog="Every option is also a variable, as in DTCKPT_COORDINATOR_SERVE_TLS_CERT. Tokens may also be in the "
    f"variable {TOKENS_VARIABLE}. Exit codes: 143 stopped by SIGTERM, 130 by SIGINT, 2 usage, 69 an address cannot be "
    "used, 70 a bug."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=50051, show_default=True, type=_PORT, help="0 takes any free port.")
@click.option(
    "--heartbeat-timeout-s",
    default=60.0,
    show_default=True,
    envvar=["DTCKPT_COORDINATOR_SERVE_HEARTBEAT_TIMEOUT_S", "DTCKPT_HEARTBEAT_TIMEOUT_S"],
    type=click.FloatRange(min=0.1, max=86400),
    help="Silence after which a task is lost.",
)
@click.option("--port-file", type=_FILE, help="Write the port here when ready.")
@click.option("--insecure", is_flag=True, help="Serve in plaintext.")
@click.option("--tls-cert", type=_FILE, help="Certificate with its chain (PEM); read again when it changes.")
@click.option("--tls-key", type=_FILE, help="Its private key (PEM).")
@click.option("--client-ca", type=_FILE, help="Ask clients for a certificate of these authorities (PEM).")
@click.option(
    "--tokens-file",
    type=_FILE,
    help="Lines 'JOB TOKEN [reads=FEEDS] [publishes=FEEDS]'; job * may look at all. Read again every 10 s.",
)
@click.option(
    "--health-port",
    type=_PORT,
    help=f"Plaintext port for grpc.health.v1 alone [default: {DEFAULT_HEALTH_PORT} with TLS, else none].",
)
@click.option("--metrics-port", type=_PORT, help="HTTP port for /metrics and a status page at / [default: none].")
@click.option(
    "--log-format", type=click.Choice(list(FORMATTERS)), default="text", show_default=True, help="Of standard error."
)
@click.option(
    "--drain-timeout-s",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0, max=3600),
    help="How long open barriers may go on after SIGTERM.",
)
@click.option(
    "--max-calls", default=MAX_CALLS, show_default=True, type=_COUNT, help="Calls at one time, of all owners."
)
@click.option(
    "--max-owner-jobs", default=DEFAULTS.jobs, show_default=True, type=_COUNT, help="Jobs of one owner (of one token)."
)
@click.option(
    "--max-owner-barriers",
    default=DEFAULTS.barriers,
    show_default=True,
    type=_COUNT,
    help="Open barriers of one owner.",
)
@click.option(
    "--max-owner-mib",
    default=DEFAULTS.nbytes >> 20,
    show_default=True,
    type=_COUNT,
    help="MiB that the jobs of one owner take.",
)
@click.option(
    "--max-owner-streams", default=DEFAULTS.streams, show_default=True, type=_COUNT, help="Open streams of one owner."
)
@click.option(
    "--max-owner-calls", default=DEFAULTS.calls, show_default=True, type=_COUNT, help="Calls of one owner at one time."
)
@click.option(
    "--max-owner-requests-per-s",
    default=DEFAULTS.requests_per_s,
    show_default=True,
    type=_COUNT,
    help="Calls and messages of one owner in a second.",
)
@click.option("--reflection", is_flag=True, help="Describe the services to any client that asks (grpcurl).")
@click.option("--parent", type=_COUNT, help="Stop when the process of this number is no longer the parent.")
def serve(
    *,
    insecure: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    client_ca: Path | None,
    port_file: Path | None,
    tokens_file: Path | None,
    health_port: int | None,
    log_format: str,
    max_owner_jobs: int,
    max_owner_barriers: int,
    max_owner_mib: int,
    max_owner_streams: int,
    max_owner_calls: int,
    max_owner_requests_per_s: int,
    parent: int | None,
    **options: object,
) -> None:
    """Serve until SIGTERM: with a certificate (--tls-cert, --tls-key), or --insecure."""
    start_logging(log_format)
    gc.set_threshold(*COLLECTIONS)
    try:
        # Before the server is imported: its generated code may be newer than the protobuf that another package wants.
        from dtckpt._proto import COORDINATOR, require

        require(*COORDINATOR, "grpc_health.v1.health_pb2_grpc")
        from dtckpt_server.server import ServerConfig

        tls = _tls(tls_cert, tls_key, client_ca, insecure=insecure)
        config = ServerConfig(
            tls=tls,
            tokens=_tokens(tokens_file),
            tokens_file=tokens_file,
            quotas=Quotas(
                max_owner_jobs,
                max_owner_barriers,
                max_owner_mib << 20,
                max_owner_streams,
                max_owner_calls,
                max_owner_requests_per_s,
            ),
            health_port=DEFAULT_HEALTH_PORT if tls and health_port is None else health_port,
            **options,  # type: ignore[arg-type]
        )
        sys.exit(asyncio.run(run(config, port_file, parent)))
    except (ConfigError, DependencyError, OSError) as error:
        click.echo(f"dtckpt-coordinator: error: {error}", err=True)
        sys.exit(EXIT_UNAVAILABLE if isinstance(error, OSError) else EXIT_USAGE)


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None, *, insecure: bool) -> TlsFiles | None:
    if insecure and (cert or key or client_ca):
        raise ConfigError("--insecure contradicts --tls-cert, --tls-key and --client-ca; choose")
    if insecure:
        return None
    if cert is None or key is None:
        raise ConfigError("expected --tls-cert and --tls-key, or --insecure where the network can be trusted")
    return TlsFiles(cert, key, client_ca)


def _tokens(path: Path | None) -> Tokens | None:
    text = os.environ.get(TOKENS_VARIABLE)
    if path is not None and text is not None:
        raise ConfigError(f"got both --tokens-file and {TOKENS_VARIABLE}, expected one of them")
    if path is not None:
        return read_tokens(path)
    return None if text is None else Tokens.parse(text)


if __name__ == "__main__":
    main()
