"""Credentials of a client for the coordinator: TLS certificates and tokens, as the environment names them.

============================== ======================================================================================
``DTCKPT_COORDINATOR_CA``          file of the authorities that may have signed the coordinator's certificate: use TLS
``DTCKPT_COORDINATOR_CERT``        file of this client's certificate, where the coordinator asks for one
``DTCKPT_COORDINATOR_KEY``         file of its private key
``DTCKPT_COORDINATOR_SERVER_NAME`` name in the coordinator's certificate, where it differs from the address
``DTCKPT_COORDINATOR_TOKEN_FILE``  file of the job's token
``DTCKPT_COORDINATOR_TOKEN``       the token itself
``DTCKPT_COORDINATOR_INSECURE``    1: send the token although there is no TLS, readable for others on the way
============================== ======================================================================================

A token is never an argument of a command: every user of the host can see arguments.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from dtckpt.errors import ConfigError

PREFIX = "DTCKPT_COORDINATOR_"


@dataclass(frozen=True, slots=True)
class Access:
    """A client's certificate and token, and the authorities that it trusts. Its text shows no secret."""

    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str = ""
    token: str = field(default="", repr=False)

    @classmethod
    def from_environ(cls, env: Mapping[str, str]) -> Access:
        """Read the variables and the files that they name.

        Raises:
            ConfigError: A file cannot be read or used, variables contradict each other, or a token would travel in
                plaintext.
        """
        paths = {name: Path(text) for name in ("CA", "CERT", "KEY", "TOKEN_FILE") if (text := env.get(PREFIX + name))}
        if ("CERT" in paths) != ("KEY" in paths) or ("CERT" in paths and "CA" not in paths):
            raise ConfigError(f"{PREFIX}CERT and {PREFIX}KEY come together, and with {PREFIX}CA")
        token = _token(env.get(PREFIX + "TOKEN", ""), paths.get("TOKEN_FILE"))
        if token and "CA" not in paths and env.get(PREFIX + "INSECURE") != "1":
            raise ConfigError(
                f"a token would travel in plaintext; set {PREFIX}CA to use TLS, or {PREFIX}INSECURE=1 where the "
                "network can be trusted"
            )
        _validate(paths)
        ca, cert, key = (paths[name].read_bytes() if name in paths else None for name in ("CA", "CERT", "KEY"))
        return cls(ca, cert, key, env.get(PREFIX + "SERVER_NAME", ""), token)

    def open_channel(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """Open a channel whose calls carry the token."""
        if self.ca is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            name = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
            credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
            channel = grpc.secure_channel(address, credentials, options=(*options, *name))
        return grpc.intercept_channel(channel, _Bearer(self.token)) if self.token else channel


PLAINTEXT = Access()


def _token(text: str, path: Path | None) -> str:
    """Return the token from the variable or the file; at most one of the two may be set."""
    if text and path:
        raise ConfigError(f"got both {PREFIX}TOKEN and {PREFIX}TOKEN_FILE, expected one of them")
    if path is None:
        source, token = PREFIX + "TOKEN", text.strip()
    else:
        source, token = f"{PREFIX}TOKEN_FILE, {path}", _read_token(path)
        if not token:
            raise ConfigError(f"{source}: the file is empty, expected a token")
    if not token.isascii() or any(not "!" <= letter <= "~" for letter in token):
        raise ConfigError(f"{source}: expected printable ASCII characters without blanks")
    return token


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{PREFIX}TOKEN_FILE cannot be read: {path}: {type(error).__name__}") from None


def _validate(paths: Mapping[str, Path]) -> None:
    """Refuse files that gRPC would only report in a log line."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if "CA" in paths:
            context.load_verify_locations(paths["CA"])
        if "CERT" in paths:
            context.load_cert_chain(paths["CERT"], paths["KEY"])
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(f"{PREFIX}{name}={path}" for name, path in paths.items() if name != "TOKEN_FILE")
        raise ConfigError(f"{names} cannot be used: {error.strerror or error}") from None


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the token to every call, unary or stream. gRPC's own call credentials do so for TLS only."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, client_call_details: Any) -> _Details:
        details = _Details(client_call_details)
        details.metadata = (*(client_call_details.metadata or ()), self._header)
        return details


class _Details(grpc.ClientCallDetails):
    """A mutable copy of a call's details."""

    def __init__(self, details: Any) -> None:
        for name in ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression"):
            setattr(self, name, getattr(details, name))
