"""`OwnRegistry`: the registry of feeds that a publisher job runs, where there is no coordinator.

Client 0 starts ``dtckpt-coordinator serve`` as a separate process at the address that both jobs are given. The
process ends with the publisher, also if that is killed. If the process dies alone, it is started again, and learns all
feeds from their clients, as a coordinator that was restarted does. The clients of a job meet as they do without a
registry: it knows feeds and leases only.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.live.feed_client import end_feed_client, feed_client
from dtckpt.checkpoint.live.versions import validate_registry
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.errors import ConfigError, DtckptError

logger = logging.getLogger("dtckpt.live")

FREE_S = 10.0
"""How long to wait until the address is free: the registry of a publisher that was killed ends a moment later."""
START_S = 60.0
"""How long the process may take until it listens."""
POLL_S = 0.05
RESTART_S = 1.0
"""Pause before the process is started again."""
SERVE = "DTCKPT_COORDINATOR_SERVE_"
"""Begins the variables that are the options of the process."""

_users: Counter[tuple[int, str]] = Counter()
"""How many publishers of this process use the client of a registry, by connection and address."""
_processes: dict[str, RegistryProcess] = {}
"""The registries that this process runs, by address."""


def start_registry(own: OwnRegistry | None, collective: Collective) -> None:
    """Start the registry of a publisher job on client 0, if its clients want one.

    Collective: Round ``registry`` of the operation.

    Raises:
        ConfigError: The address cannot be used, or clients pass different ones.
    """

    def start() -> bytes:
        if own is not None and collective.is_leader:
            own.start()
        return b"" if own is None else own.address.encode()

    passed = {client: data.decode() for client, data in collective.run_round("registry", start, phase="plan").items()}
    if len(set(passed.values())) > 1:
        raise ConfigError(f"Publisher: clients pass different registries; got {passed}, expected the same on all")


class OwnRegistry:
    """The registry of a publisher job, as one client uses it.

    Args:
        address: ``host:port``.
        coordination: How the clients of the job meet.

    Raises:
        ConfigError: The address is malformed.
    """

    def __init__(self, address: str, coordination: Coordination) -> None:
        validate_registry(address)
        self.address, self._coordination = address, coordination
        self._key = id(coordination), address
        self._has_process = self._is_used = False

    def start(self) -> None:
        """Start the process, unless another feed of the job has started it.

        Raises:
            ConfigError: The address cannot be used.
        """
        process = _processes.get(self.address)
        if process is None:
            process = _processes[self.address] = RegistryProcess(self.address)
        process.num_users += 1
        self._has_process = True

    def feeds(self) -> FeedClient:
        """Return the client of feeds at the registry."""
        if not self._is_used:
            self._is_used = True
            _users[self._key] += 1
        return feed_client(self._coordination, self.address)

    def end(self, wait_s: float) -> None:
        """Leave the registry. On client 0, end the process if it serves no other feed of the job.

        Args:
            wait_s: How long client 0 waits until the other clients have left.
        """
        if self._is_used:
            self._is_used = False
            _users[self._key] -= 1
            is_last = not _users[self._key]
            if is_last and self._has_process and _processes[self.address].num_users == 1:
                self._await_others(wait_s)
            if is_last:
                end_feed_client(self._coordination, self.address)
        if self._has_process:
            self._has_process = False
            process = _processes[self.address]
            process.num_users -= 1
            if not process.num_users:
                del _processes[self.address]
                process.end()

    def _await_others(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        feeds = feed_client(self._coordination, self.address)
        with suppress(DtckptError):
            while feeds.has_other_publishers() and time.monotonic() < deadline:
                time.sleep(POLL_S)


class RegistryProcess:
    """A process of this one that serves a registry, until `end`, or until this process is gone.

    Args:
        address: ``host:port``.

    Raises:
        ConfigError: The address cannot be used.
    """

    def __init__(self, address: str) -> None:
        self.num_users = 0
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._await_free()
        self._process = self._started()
        logger.info("the registry of feeds listens at %s", address)
        threading.Thread(target=self._keep_alive, daemon=True, name="dtckpt-registry").start()

    def _await_free(self) -> None:
        deadline = time.monotonic() + FREE_S
        while True:
            try:
                family, kind, protocol, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[
                    0
                ]
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(where)
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"Publisher: the registry cannot listen at {self._address}: {error.strerror or error}; is "
                        "another publisher or coordinator there? End it, or choose an address of this host that is free"
                    ) from None
            time.sleep(POLL_S)

    def _command(self, port_file: Path) -> list[str]:
        arguments = ["--host", self._host, "--port", str(self._port), "--port-file", str(port_file)]
        arguments += ["--parent", str(os.getpid()), "--drain-timeout-s", "0"]
        if os.environ.get(f"{SERVE}TLS_CERT"):
            arguments += ["--health-port", "0"]  # no two registries of a host shall want the same
        elif _is_loopback(self._host):
            arguments.append("--insecure")
        return [sys.executable, "-P", "-m", "dtckpt_server.main", "serve", *arguments]

    def _started(self) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            port_file = Path(folder) / "port"
            # Signals of the terminal end the publisher, which ends the registry.
            process = subprocess.Popen(  # noqa: S603  the command is this module's
                self._command(port_file),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            deadline = time.monotonic() + START_S
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise ConfigError(
                        f"Publisher: the registry at {self._address} did not start; exit code {process.wait()}, and "
                        f"the reason is on standard error. Its options are variables: away from this host it needs "
                        f"{SERVE}TLS_CERT and {SERVE}TLS_KEY, or {SERVE}INSECURE=1 where the network can be trusted"
                    )
                time.sleep(POLL_S)
        return process

    def _keep_alive(self) -> None:
        while True:
            code = self._process.wait()
            if self._ending.wait(RESTART_S):
                return
            logger.error("the registry at %s has ended with exit code %d; it is started again", self._address, code)
            try:
                with self._lock:
                    if not self._ending.is_set():
                        self._process = self._started()
            except (ConfigError, OSError) as error:
                logger.error("%s", error)

    def end(self) -> None:
        """End the process."""
        self._ending.set()
        with self._lock:
            self._process.terminate()
            try:
                self._process.wait(START_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
