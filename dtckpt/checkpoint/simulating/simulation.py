"""`Machine`, on which a simulation takes place, and `Simulation`, its result: bytes, seconds, the best interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from dtckpt.checkpoint.managing.interval import lost_share
from dtckpt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The bytes that one kind of link carries in an operation.

    Args:
        link: ``device`` (between a device and its host's memory), ``network`` (of one host, one way) or ``storage``
            (of one host).
        total_nbytes: Bytes of all links of the kind; estimated from the planned hosts, if not all were planned.
        max_nbytes: Bytes of the busiest link.
        seconds: Seconds that these bytes take.
    """

    link: str
    total_nbytes: int
    max_nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SimulatedOperation:
    """One simulated operation.

    Args:
        name: ``save``, ``restore``, ``restore, read once``, ``redistribute`` or ``reshard``.
        parts: Seconds of its parts, one after the other.
        loads: Bytes and seconds per kind of link.
        by_client: Bytes of each planned client that read from storage or written to it; for a redistribution received.
    """

    name: str
    parts: Mapping[str, float]
    loads: Sequence[LinkLoad]
    by_client: Sequence[int] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the whole operation."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of `dtckpt.simulate`.

    Args:
        model: Name of the model.
        num_parameters: Elements of its parameters.
        mesh: Axes and sizes of the mesh that saves.
        target_mesh: Of the mesh that restores.
        num_clients: Clients that save.
        devices_per_client: Devices that each of them owns.
        num_hosts: Hosts that they run on.
        num_tensors: Tensors of the checkpoint.
        num_chunks: Chunks that they are stored in.
        nbytes: Bytes of tensor data in the checkpoint.
        max_client_nbytes: Bytes of state on the devices of the client that holds most.
        digests_nbytes: Bytes of the digests of chunks in the manifest, which every client of a restore reads.
        plan_s: Seconds that the plan of the save took in this process; every client plans the first save of a run.
        planned_clients: Clients whose restore was planned; the other clients are taken to be like them.
        operations: The operations.
        blocking_s: Seconds for which a save in the background stops training.
        lag_s: Seconds from the begin of a save until it is complete.
        mtbf_s: Mean seconds between failures of the whole job.
        interval_s: The interval between saves that loses the least time.
        notes: Problems that a real run would have.
    """

    model: str
    num_parameters: int
    mesh: Mapping[str, int]
    target_mesh: Mapping[str, int]
    num_clients: int
    devices_per_client: int
    num_hosts: int
    num_tensors: int
    num_chunks: int
    nbytes: int
    max_client_nbytes: int
    digests_nbytes: int
    plan_s: float
    planned_clients: Sequence[int]
    operations: Sequence[SimulatedOperation]
    blocking_s: float
    lag_s: float
    mtbf_s: float
    interval_s: float
    notes: Sequence[str]

    def lost_share(self, interval_s: float) -> float:
        """Return the share of the time that saves and repeated steps take with another interval between saves."""
        return lost_share(interval_s, self.blocking_s, self.mtbf_s, lag_s=self.lag_s)

    def operation(self, name: str) -> SimulatedOperation:
        """Return one operation.

        Raises:
            KeyError: The operation was not simulated.
        """
        return {each.name: each for each in self.operations}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hosts that are alike, and their storage; speeds are in bytes per second.

    The defaults are a guess at hosts with eight GPUs each. Pass measured speeds of copies, of transfers and of your
    storage, not the numbers of data sheets.

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
