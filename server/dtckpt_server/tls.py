"""The coordinator's TLS certificates: read from files, and read again when these change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dtckpt.errors import ConfigError

logger = logging.getLogger("dtckpt_server")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the coordinator's certificate (with its chain) and key.

    Clients must show a certificate of ``client_ca``'s authorities, if it is given.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return the contents of the files: certificate, key, authorities of clients.

        Raises:
            ConfigError: A file cannot be read, or certificate and key do not match.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
            client_ca = self.client_ca.read_bytes() if self.client_ca else None
            return self.cert.read_bytes(), self.key.read_bytes(), client_ca
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(str(path) for path in (self.cert, self.key, self.client_ca) if path)
            raise ConfigError(f"TLS files cannot be used: {files}: {error.strerror or error}") from None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow the files: each new connection gets their contents at that time.

    Raises:
        ConfigError: The files cannot be used. Later, files that cannot be used are logged, and the old ones stay.
    """
    current = files.read()

    def refresh() -> Any:  # the stubs do not know that None means no change
        nonlocal current
        try:
            contents = files.read()
        except ConfigError as error:
            logger.error("keeping the certificate that is in use: %s", error)
            return None
        if contents == current:
            return None
        current = contents
        logger.info("the TLS files have changed")
        return _configuration(contents)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(current), refresh, require_client_authentication=files.client_ca is not None
    )


def _configuration(contents: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    cert, key, client_ca = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)
