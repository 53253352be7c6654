"""Find the coordinator's address: from an option, else from the environment.

The first source that is set wins. An empty variable counts as not set, because Kubernetes sets an empty one for a
missing annotation.

1. ``host:port`` given by the caller: ``--coordinator``, ``initialize_multi_client(coordinator=...)``
2. ``DTCKPT_COORDINATOR``: ``host:port``
3. ``DTCKPT_JOBSET_COORDINATOR``: the host of JobSet's annotation ``jobset.sigs.k8s.io/coordinator``, which a pod's
   manifest copies into this variable; at ``DTCKPT_COORDINATOR_PORT_NUMBER``, else at 50051
4. ``MASTER_ADDR``, else ``PET_MASTER_ADDR``: the host of client 0, if ``DTCKPT_COORDINATOR_PORT_NUMBER`` says that a
   coordinator listens there too. Every job under torchrun has the address; most have no coordinator.

``DTCKPT_COORDINATOR_PORT`` would be a shorter name, but Kubernetes uses it: with a Service ``dtckpt-coordinator``,
every pod has a variable of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtckpt.errors import ConfigError

DEFAULT_PORT = 50051
SOURCES = "DTCKPT_COORDINATOR, DTCKPT_JOBSET_COORDINATOR, or MASTER_ADDR with DTCKPT_COORDINATOR_PORT_NUMBER"
"""The variables that can name a coordinator, for error messages."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """The address of a coordinator, ``host:port``, and the option or variable that named it."""

    address: str
    source: str


def find_coordinator(env: Mapping[str, str], coordinator: str | None = None) -> CoordinatorAddress | None:
    """Return the coordinator's address, None if no source names one.

    Args:
        env: Environment variables.
        coordinator: ``host:port`` from the caller; overrides the environment.

    Raises:
        ConfigError: ``DTCKPT_COORDINATOR_PORT_NUMBER`` is needed and is no port.

    >>> find_coordinator({"MASTER_ADDR": "train-0.train", "DTCKPT_COORDINATOR_PORT_NUMBER": "50051"}).address
    'train-0.train:50051'
    """
    if coordinator:
        return CoordinatorAddress(coordinator, "an argument")
    if address := env.get("DTCKPT_COORDINATOR"):
        return CoordinatorAddress(address, "DTCKPT_COORDINATOR")
    port = env.get("DTCKPT_COORDINATOR_PORT_NUMBER")
    if host := env.get("DTCKPT_JOBSET_COORDINATOR"):
        return CoordinatorAddress(_joined(host, port or str(DEFAULT_PORT)), "DTCKPT_JOBSET_COORDINATOR")
    for name in ("MASTER_ADDR", "PET_MASTER_ADDR"):
        if port and (host := env.get(name)):
            return CoordinatorAddress(_joined(host, port), f"{name} and DTCKPT_COORDINATOR_PORT_NUMBER")
    return None


def _joined(host: str, port: str) -> str:
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"DTCKPT_COORDINATOR_PORT_NUMBER: got {port!r}, expected a port from 1 to 65535")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
