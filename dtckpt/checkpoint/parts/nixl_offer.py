"""`NixlOffer`: the parts that a source registers with NIXL; see `dtckpt.checkpoint.parts.nixl_reads`."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import threading
from collections import deque
from typing import Any

from dtckpt.checkpoint.parts.data_tls import PREFIX, DataTls
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.errors import ConfigError, DependencyError

VARIABLE = f"{PREFIX}NIXL"
KEPT_PARTS = 2
"""Parts that stay mapped after they are registered no more: a late reader must find memory, not end the process."""


def is_wanted() -> bool:
    """Whether the environment asks for NIXL.

    Raises:
        DependencyError: The environment asks for NIXL, and the package is missing.
        ConfigError: The environment asks for NIXL and for TLS.
    """
    if os.environ.get(VARIABLE) != "1":
        return False
    if importlib.util.find_spec("nixl") is None:
        raise DependencyError(f"{VARIABLE} is 1, and the package nixl is missing; pip install dtckpt[nixl]")
    tls = DataTls.from_environ()
    if tls.is_required or tls.cert is not None:
        raise ConfigError(f"{VARIABLE} is 1, and {PREFIX}CA or {PREFIX}CERT asks for TLS, which NIXL has not; choose")
    return True


def new_agent() -> Any:
    """Return an agent of NIXL for memory of the host, over UCX."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(f"dtckpt-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))


class NixlOffer:
    """The parts of a source that are registered with NIXL, each with an agent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offers: dict[tuple[SaveId, int], tuple[OpenPart, Any, Any, bytes]] = {}
        self._kept: deque[OpenPart] = deque(maxlen=KEPT_PARTS)

    def describe(self, save: SaveId, client: int, part: OpenPart) -> bytes:
        """Register a part, unless it is registered; return the description that a reader needs."""
        with self._lock:
            found = self._offers.get((save, client))
            if found is None or found[0] is not part:
                self._withdraw((save, client))
                agent, memory = new_agent(), part.memory
                registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
                facts = [base64.b64encode(agent.get_agent_metadata()).decode(), memory.ctypes.data, memory.nbytes]
                found = self._offers[save, client] = part, agent, registered, json.dumps(facts).encode()
            return found[3]

    def withdraw(self, save: SaveId, client: int) -> None:
        """Register a part no more: its memory may be freed."""
        with self._lock:
            self._withdraw((save, client))

    def _withdraw(self, key: tuple[SaveId, int]) -> None:
        if (found := self._offers.pop(key, None)) is not None:
            part, agent, registered, _ = found
            agent.deregister_memory(registered)
            self._kept.append(part)

    def close(self) -> None:
        """Register nothing more."""
        with self._lock:
            for key in list(self._offers):
                self._withdraw(key)
