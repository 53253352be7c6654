"""The result of a simulation: operations with their bytes per link and seconds, and the best interval between saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtckpt.checkpoint.managing.interval import lost_share


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
class Operation:
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
    """What `dtckpt.simulate` finds out.

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
        notes: What would not work, or not well.
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
    operations: Sequence[Operation]
    blocking_s: float
    lag_s: float
    mtbf_s: float
    interval_s: float
    notes: Sequence[str]

    def lost_share(self, interval_s: float) -> float:
        """Return the share of the time that saves and repeated steps take with another interval between saves."""
        return lost_share(interval_s, self.blocking_s, self.mtbf_s, lag_s=self.lag_s)

    def operation(self, name: str) -> Operation:
        """Return one operation.

        Raises:
            KeyError: It was not simulated.
        """
        return {each.name: each for each in self.operations}[name]
