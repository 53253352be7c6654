"""What a restore found and did, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtckpt.format.manifest import PhaseCost
from dtckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor whose shape in the target is not that in the checkpoint; such are refused."""

    name: str
    saved: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor whose dtype in the target is not that in the checkpoint."""

    name: str
    saved: str
    target: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What one client's restore found and did. Names are those in the target, after renaming.

    Args:
        path: The checkpoint.
        restored: Tensors that were filled or made.
        missing: Tensors and parts of the target that the checkpoint lacks; left as they were.
        defaulted: Plain values of the target that the checkpoint lacks; left as they were.
        unexpected: Tensors and values of the checkpoint that the target does not ask for; passed over.
        reshaped: Tensors of other shapes.
        cast: Tensors of other dtypes.
        renamed: New name by name in the checkpoint.
        refusal: Why nothing was restored; empty if all went well.
        phases: What each phase took on this client: ``plan``, ``read`` (with digests), ``move`` (to devices, and to
            further copies) and ``barrier``, waiting for the others. Empty if nothing was restored.
    """

    path: Location
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    defaulted: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[Reshaped, ...] = ()
    cast: tuple[Cast, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    phases: Mapping[str, PhaseCost] = field(default_factory=dict)

    @property
    def nbytes_read(self) -> int:
        """Bytes that this client read from storage."""
        return self.phases["read"].nbytes if "read" in self.phases else 0
