"""TLS between clients: the certificate that a client serves its parts with, and the authorities that readers trust.

* ``DTCKPT_DATA_CERT`` names the file of this client's certificate, with its chain (PEM). Then it serves parts by TLS.
* ``DTCKPT_DATA_KEY`` names the file of the private key.
* ``DTCKPT_DATA_CA`` names the file of the authorities that may have signed the certificates of sources. Then parts are
  taken by TLS only. Without it, ``DTCKPT_COORDINATOR_CA`` counts for the sources that serve by TLS.
* ``DTCKPT_DATA_SERVER_NAME`` is the name in the certificates of sources, where it differs from their addresses.

The address of a source says whether it serves by TLS. Readers on the host of a source map its memory, and need no TLS.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtckpt.errors import ConfigError, StorageError, StoragePermissionError

logger = logging.getLogger("dtckpt.tiers")

PREFIX = "DTCKPT_DATA_"
SCHEME = "https://"
"""Begins the address of a source that serves by TLS."""
Stamps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DataTls:
    """The TLS settings of a client.

    Args:
        cert: File of its certificate; None: it serves in plaintext.
        key: File of its private key.
        ca: File of the authorities that it trusts.
        ca_variable: The variable that names this file.
        is_required: Whether it takes parts by TLS only.
        server_name: Name in the certificates of sources; empty: their addresses.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    ca_variable: str = ""
    is_required: bool = False
    server_name: str = ""

    @classmethod
    def from_environ(cls, env: Mapping[str, str] | None = None) -> DataTls:
        """Read the variables; default: of the process.

        Raises:
            ConfigError: Variables contradict each other.
        """
        env = os.environ if env is None else env
        cert, key = (Path(text) if (text := env.get(PREFIX + name)) else None for name in ("CERT", "KEY"))
        ca_variable = next((name for name in (PREFIX + "CA", "DTCKPT_COORDINATOR_CA") if env.get(name)), "")
        if (cert is None) != (key is None) or (cert is not None and not ca_variable):
            # The clients of a job read each other's parts.
            raise ConfigError(f"{PREFIX}CERT and {PREFIX}KEY come together, and with {PREFIX}CA")
        ca = Path(env[ca_variable]) if ca_variable else None
        return cls(cert, key, ca, ca_variable, bool(env.get(PREFIX + "CA")), env.get(PREFIX + "SERVER_NAME", ""))

    def validate_plaintext(self, host: str) -> None:
        """Refuse a source that serves in plaintext, if this client takes parts by TLS only.

        Raises:
            StoragePermissionError: The source is refused.
        """
        if self.is_required:
            raise StoragePermissionError(
                f"host {host} serves its parts in plaintext, and {PREFIX}CA asks for TLS; start it with {PREFIX}CERT "
                f"and {PREFIX}KEY"
            )

    def secure(self, connection: socket.socket, address: str, host: str) -> ssl.SSLSocket:
        """Begin TLS on a connection to a source, and verify its certificate.

        Args:
            connection: The connection; closed after a failure.
            address: The address of the source.
            host: Name of its host, for messages.

        Raises:
            ConfigError: No authorities are named, or their file cannot be used.
            StoragePermissionError: The certificate is not to be trusted.
            StorageError: The source does not speak TLS.
        """
        if self.ca is None:
            raise ConfigError(f"host {host} serves its parts by TLS; set {PREFIX}CA to the file of its authorities")
        context = _client_context(self.ca_variable, self.ca, _stamps(self.ca))
        name = self.server_name or address
        try:
            return context.wrap_socket(connection, server_hostname=name)
        except ssl.SSLCertVerificationError as error:
            raise StoragePermissionError(
                f"host {host} is not to be trusted at {address}, as {self.ca_variable} says: {error.verify_message}; "
                f"expected a valid certificate of these authorities for {name!r} (or set {PREFIX}SERVER_NAME)"
            ) from error
        except ssl.SSLError as error:
            raise StorageError(f"host {host}: no TLS with its server at {address}: {error.reason or error}") from error


class ServerCertificate:
    """The certificate of a server, read again when its files change. Thread-safe.

    Raises:
        ConfigError: The files cannot be used. Later, files that cannot be used are logged, and the old ones stay.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._lock = threading.Lock()
        self._stamps = _stamps(cert, key)
        self._context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key)
        except OSError as error:  # ssl.SSLError is one
            names = f"{PREFIX}CERT={self._cert}, {PREFIX}KEY={self._key}"
            raise ConfigError(f"{names} cannot be used: {error.strerror or error}") from None
        return context

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        with self._lock:
            if (stamps := _stamps(self._cert, self._key)) != self._stamps:
                self._stamps = stamps
                try:
                    self._context = self._load()
                    logger.info("the TLS files have changed")
                except ConfigError as error:
                    logger.error("keeping the certificate that is in use: %s", error)
            return self._context


@functools.lru_cache(maxsize=4)
def _client_context(variable: str, ca: Path, _stamps: Stamps) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{variable}={ca} cannot be used: {error.strerror or error}") from None
    return context


def _stamps(*paths: Path) -> Stamps:
    """Return facts that change when a file is replaced; (0, 0) for a missing file."""
    found = []
    for path in paths:
        try:
            facts = path.stat()
            found.append((facts.st_ino, facts.st_mtime_ns))
        except OSError:
            found.append((0, 0))
    return tuple(found)
