"""The `FeedClient`s of this process, for its publishers and subscribers: one for each registry."""

from __future__ import annotations

import atexit
import os
from weakref import WeakKeyDictionary

from dtckpt._proto import COORDINATOR, require
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.fallback import FallbackCoordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.grpc_credentials import Access
from dtckpt.errors import ConfigError

PATIENCE_S = 10.0
"""How long a call looks for a registry that a publisher runs."""

_clients: WeakKeyDictionary[Coordination, dict[str, FeedClient]] = WeakKeyDictionary()


def feed_client(coordination: Coordination, registry: str = "") -> FeedClient:
    """Return the client of feeds at the coordinator of a connection, or at a registry; the same for one connection.

    Args:
        coordination: How the clients of this job meet.
        registry: ``host:port`` of a publisher's registry; empty: the coordinator.

    Raises:
        ConfigError: The clients of this job meet without a coordinator, and no registry is named.
    """
    clients = _clients.setdefault(coordination, {})
    if registry not in clients:
        clients[registry] = _at_registry(coordination, registry) if registry else FeedClient(_primary(coordination))
    return clients[registry]


def _primary(coordination: Coordination) -> GrpcCoordination:
    primary = coordination.primary if isinstance(coordination, FallbackCoordination) else coordination
    if not isinstance(primary, GrpcCoordination):
        raise ConfigError(
            "live versions need a coordinator, which both jobs know; start `dtckpt-coordinator serve`, and set "
            "DTCKPT_COORDINATOR=host:port; or let the publisher run the registry: registry='host:port' on both sides"
        )
    return primary


def _at_registry(coordination: Coordination, registry: str) -> FeedClient:
    require(*COORDINATOR)
    access = Access.from_environ(os.environ)
    # Twice the timeout is how long a client looks for the registry when it registers.
    own = GrpcCoordination(registry, coordination.member, access=access, heartbeat_timeout_s=PATIENCE_S / 2)
    return FeedClient(own, PATIENCE_S, is_publishers=True)


def end_feed_client(coordination: Coordination, registry: str | None = None) -> None:
    """End the clients of feeds of a connection, and say goodbye to registries.

    Args:
        coordination: The connection, which stays the caller's.
        registry: Only the client of this registry; default: all clients.
    """
    clients = _clients.get(coordination, {})
    for name in list(clients) if registry is None else [registry]:
        if (client := clients.pop(name, None)) is not None:
            client.close()
            if name:
                client.leave()


def _leave_all() -> None:
    for coordination in list(_clients):
        end_feed_client(coordination)


atexit.register(_leave_all)
