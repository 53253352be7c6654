"""A save in the local tier, as values: the request, the save when it has begun, and the payload of its first round."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.staging import ALIGNMENT, written_regions
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.checkpoint.tiers.host_folder import PartFile
from dtckpt.checkpoint.tiers.near_copies import near_copies
from dtckpt.checkpoint.tiers.records import SaveId
from dtckpt.format.dtypes import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A step that is to be saved in the tier.

    Args:
        step: The step.
        collect: Returns this client's description of the state.
        options: How checkpoints are written.
        metrics: The step's metrics, on client 0.
        is_durable: Whether the step is written to the root, too; called on client 0, whose answer counts.
        compares_copies: Whether replicas are digested, to be compared when the step is written to the root.
    """

    step: int
    collect: Callable[[], State]
    options: SaveOptions
    metrics: Mapping[str, float]
    is_durable: Callable[[], bool]
    compares_copies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A local save whose elements are in the tier; nobody has voted on the parts yet.

    Args:
        save: Its identity.
        plan: What all clients write.
        state: This client's state, in the tensors' own memory.
        staged: The same, in the tier; or why this client could not copy it after all.
        file: The file that holds it.
        metrics: The metrics of the step, on client 0.
        protected: By client, the newest saves that had all copies of the client's part.
        is_agreed: Whether all clients send copies of it; see `dtckpt.checkpoint.tiers.replicator`.
        has_compared: Whether all clients have digested their replicas.
    """

    save: SaveId
    plan: SavePlan
    state: State
    staged: State | Exception | None
    file: PartFile | None
    metrics: Mapping[str, float]
    protected: Mapping[int, Sequence[SaveId]]
    is_agreed: bool
    has_compared: bool

    @property
    def staged_state(self) -> State:
        """The state in the tier. Raises: DtckptError: This client could not copy it."""
        if isinstance(self.staged, Exception):
            raise self.staged
        assert self.staged is not None  # noqa: S101  one or the other
        return self.staged


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A client's part of ``local/begin``: its state, the plan that it expects, the staged state, its description."""

    state: State
    plan: SavePlan
    digest: int
    staged: State | Exception | None = None


@dataclass(frozen=True, slots=True)
class BeginVote:
    """The payload of ``local/begin``: the fields of `Begun`, the save from the leader, and the `Summary`."""

    protected: tuple[SaveId, ...]
    is_free: bool
    compares: bool
    save: SaveId | None
    summary: bytes

    def to_bytes(self) -> bytes:
        """Return the payload."""
        protected, save = [each.name for each in self.protected], self.save and self.save.name
        facts = [protected, self.is_free, self.compares, save, self.summary.decode()]
        return json.dumps(facts, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BeginVote:
        """Read a payload."""
        protected, is_free, compares, save, summary = json.loads(data)
        saves = tuple(SaveId.parse(name) for name in protected)
        return cls(saves, is_free, compares, SaveId.parse(save) if save else None, summary.encode())


def is_on_host(state: State) -> bool:
    """Whether all elements are in host memory: only there replicas are digested where they are."""
    source = state.source
    return isinstance(source, MemorySource) and not source.is_elsewhere


@lru_cache(maxsize=4)
def part_nbytes(plan: SavePlan, client: int, neighbours: tuple[int, ...]) -> int:
    """Return the bytes that a client's part and its near copies take at most, with every box aligned."""
    copies = near_copies(plan, client, neighbours)
    return sum(
        -(-region.numel * DTYPES[tensor.dtype].itemsize // ALIGNMENT) * ALIGNMENT
        for tensor in plan.tensors
        for region in (*written_regions(tensor, client), *copies.get(tensor.name, ()))
    )
