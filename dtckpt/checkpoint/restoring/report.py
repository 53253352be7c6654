"""`RestoreReport`: the tensors and values that a restore on one client filled, left alone, renamed and converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtckpt.checkpoint.restoring.optimizer_match import Rule
from dtckpt.checkpoint.timeline import report_picture
from dtckpt.format.manifest import PhaseCost
from dtckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A tensor whose shape in the target differs from its shape in the checkpoint; the restore is refused."""

    name: str
    saved: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor whose dtype in the target differs from its dtype in the checkpoint."""

    name: str
    saved: str
    target: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of a restore on one client. Tensors have their names in the target, after renaming.

    Args:
        path: The checkpoint.
        restored: Tensors that were filled, or allocated and filled.
        missing: Tensors and parts of the target that the checkpoint lacks; they stay unchanged.
        defaulted: Plain values of the target that the checkpoint lacks; they stay unchanged.
        unexpected: Tensors and values of the checkpoint that the target does not ask for; the restore skips them.
        reshaped: Tensors whose shapes differ.
        cast: Tensors whose dtypes differ; converted.
        renamed: New name by name in the checkpoint.
        owners: How the parts of optimizers' states found their owners, by path: a parameter
            (``optimizer/state/model/0.weight``), a group of parameters, or an option of a group. ``name`` means by the
            name of the parameter, or the names of the members. ``position`` means by the optimizer's order. ``default``
            is an option that was not saved: the target's optimizer keeps its value. All other parts of a tree are found
            by name.
        unread: Files and notes of another library that dtckpt does not read; see `dtckpt.Checkpoint.unread`.
        refusal: The reason why the restore was refused; empty if it succeeded.
        phases: Cost of each phase on this client, by name: ``plan``, ``read`` (with digests), ``move`` (to devices and
            to further copies on this client), and ``barrier`` (the wait for other clients). Empty if nothing was
            restored.
    """

    path: Location
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    defaulted: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[Reshaped, ...] = ()
    cast: tuple[Cast, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, Rule] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    refusal: str = ""
    phases: Mapping[str, PhaseCost] = field(default_factory=dict)

    @property
    def nbytes_read(self) -> int:
        """Bytes that this client read from storage."""
        return self.phases["read"].nbytes if "read" in self.phases else 0

    def _repr_svg_(self) -> str | None:
        return report_picture("restore of", self.path, self.phases)
