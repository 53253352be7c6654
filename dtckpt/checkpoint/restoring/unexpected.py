"""Names that no client of a restore asks for: clients exchange the names of the checkpoint that they skip.

The stages of a pipeline ask for different parts of one checkpoint. If one stage skips a name, another stage usually
takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.plan import RestorePlan
from dtckpt.coordination.api import MAX_PAYLOAD_BYTES
from dtckpt.format.digest import bytes_digest

_NOTHING = 0
"""The digest of a client that asks for the whole checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Unasked:
    """The names of a checkpoint that one client does not ask for.

    Args:
        names: The names, as the checkpoint has them, sorted.
        digest: Their digest.
    """

    names: tuple[str, ...]
    digest: int

    @classmethod
    def of(cls, plan: RestorePlan) -> Unasked:
        """Return the names that a client does not ask for, from its plan."""
        sources = {new: name for name, new in plan.renamed.items()}
        names = tuple(sorted(sources.get(name, name) for name in plan.unexpected))
        return cls(names, bytes_digest("\0".join(names).encode("utf-8", "surrogatepass")) if names else _NOTHING)

    def by_all(self, collective: Collective, checkpoint: Checkpoint, digests: Mapping[int, int]) -> tuple[str, ...]:
        """Return the names that no client asks for, sorted.

        Collective: Over the participants; barriers ``restore/asked``, unless one of them asks for everything, or all
        for the same.

        Args:
            collective: The restore.
            checkpoint: The checkpoint, the same on all clients.
            digests: The digest of every client.
        """
        if _NOTHING in digests.values():
            return ()
        if len(set(digests.values())) == 1:
            return self.names
        own = set(self.names)
        names = sorted({*checkpoint.tensors, *checkpoint.values, *checkpoint.refused})
        bits = np.packbits(np.array([name in own for name in names]))
        common = [
            _common(collective, bits[at : at + MAX_PAYLOAD_BYTES]) for at in range(0, len(bits), MAX_PAYLOAD_BYTES)
        ]
        is_unasked = np.unpackbits(np.concatenate(common), count=len(names))
        return tuple(name for name, is_set in zip(names, is_unasked.tolist(), strict=True) if is_set)


def _common(collective: Collective, bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return bits, each set if all clients have it set."""
    payloads = collective.run_round("asked", bits.tobytes)
    common = bits.copy()
    for data in payloads.values():
        common &= np.frombuffer(data, np.uint8)
    return common
