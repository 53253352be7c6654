"""`SaveReport`: the cost of a save on one client, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtckpt.checkpoint.timeline import report_picture
from dtckpt.format.manifest import PhaseCost
from dtckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save, as one client measured it.

    Args:
        path: The checkpoint.
        nbytes: Bytes of tensor data in it, from all clients.
        phases: Cost of each phase on this client, by name: ``plan``, ``edges``, ``write`` (with digests), ``merge`` (on
            the leader, with the commit), and ``barrier`` (the wait for the others). In ``edges`` clients hand over
            pieces of chunks that several clients' shards share, where there are such chunks. In ``compare`` a save with
            a base digests what looks unchanged. No other phase includes the wait.
        nbytes_reused: Bytes of the tensor data that the save's base had already, so that no client wrote them.
    """

    path: Location
    nbytes: int
    phases: Mapping[str, PhaseCost]
    nbytes_reused: int = 0

    @property
    def nbytes_written(self) -> int:
        """Bytes of tensor data that the clients wrote."""
        return self.nbytes - self.nbytes_reused

    @property
    def client_nbytes(self) -> int:
        """Bytes that this client wrote."""
        return self.phases["write"].nbytes

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases.values())

    def _repr_svg_(self) -> str | None:
        return report_picture("save of", self.path, self.phases)
