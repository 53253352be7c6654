"""`Machine`: the speeds of the machines that a simulation takes to run on, and the seconds that bytes take there."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dtckpt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hosts that are alike, and their storage; speeds are in bytes per second.

    The defaults are a guess at hosts with eight cards each: pass what a copy, a transfer and a benchmark of your
    storage reach, not what the data sheets say.

    Args:
        devices_per_host: Devices of a host; a client owns devices of one host only.
        device_link: From one device to the memory of its host, or back.
        network: From one host to other hosts, or from them; each way at the same time.
        host_storage: From one host to storage, or back.
        storage: From all hosts to storage, or back.
        arrival_s: Seconds that one client's arrival takes at a barrier; 2 048 took 0.36 s at the coordinator of the
            benchmarks.
    """

    devices_per_host: int = 8
    device_link: float = 25e9
    network: float = 50e9
    host_storage: float = 5e9
    storage: float = 200e9
    arrival_s: float = 0.00018

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{each.name} of the machine must be a positive number; got {value!r}")
        if int(self.devices_per_host) != self.devices_per_host:
            raise ConfigError(f"devices_per_host must be a whole number; got {self.devices_per_host!r}")

    def barrier_s(self, num_clients: int) -> float:
        """Return the seconds that a barrier of so many clients takes."""
        return num_clients * self.arrival_s if num_clients > 1 else 0.0

    def storage_s(self, most_of_a_host: float, total: float) -> float:
        """Return the seconds for writing or reading: of the busiest host, or of all storage."""
        return max(most_of_a_host / self.host_storage, total / self.storage)
