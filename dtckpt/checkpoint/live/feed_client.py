"""The one `FeedClient` of this process, for its publishers and subscribers."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from dtckpt.coordination.api import Coordination
from dtckpt.coordination.fallback import FallbackCoordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.errors import ConfigError

_clients: WeakKeyDictionary[Coordination, FeedClient] = WeakKeyDictionary()


def feed_client(coordination: Coordination) -> FeedClient:
    """Return the client of feeds at a coordinator; the same for one connection.

    Raises:
        ConfigError: The clients of this job meet without a coordinator.
    """
    client = _clients.get(coordination)
    if client is None:
        primary = coordination.primary if isinstance(coordination, FallbackCoordination) else coordination
        if not isinstance(primary, GrpcCoordination):
            raise ConfigError(
                "live versions need a coordinator, which both jobs know; start `dtckpt-coordinator serve`, and set "
                "DTCKPT_COORDINATOR=host:port"
            )
        client = _clients[coordination] = FeedClient(primary)
    return client


def end_feed_client(coordination: Coordination) -> None:
    """End the renewals of the client of feeds at a coordinator, if there is one."""
    if (client := _clients.pop(coordination, None)) is not None:
        client.close()
