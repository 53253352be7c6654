"""The plan of a restore on one client: memory to fill, the stored tensor for each, and the remaining work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from dtckpt.checkpoint.leaves import Leaf
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.optimizer_match import Rule
from dtckpt.checkpoint.restoring.rename_rules import renamed
from dtckpt.checkpoint.restoring.report import Cast, Reshaped, RestoreReport
from dtckpt.errors import (
    DTypeError,
    ShapeMismatchError,
    TensorNotFoundError,
    UnexpectedTensorError,
    capped,
    close_prefixes,
)
from dtckpt.format.dtypes import is_convertible, is_lossless

MAX_COMPARED = 4096
"""Bound on the names that are compared with a missing name to find the nearest: some tenths of a second."""


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """The tensors that a restore fills, and how it ends.

    Args:
        leaves: The memory to be filled, each with the tensor's name in the checkpoint.
        finish: Called after all memory is filled; returns the result of the restore.
        renamed: New name by name in the checkpoint.
        missing: As in `RestoreReport`.
        defaulted: As in `RestoreReport`.
        unexpected: As in `RestoreReport`, of this client alone.
        owners: As in `RestoreReport`.
        is_new: Whether the tensors are new ones, in place of a target's.
    """

    leaves: Sequence[tuple[str, Leaf]]
    finish: Callable[[], Any] = field(repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    defaulted: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    owners: Mapping[str, Rule] = field(default_factory=dict)
    is_new: bool = False

    def new_names_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the new names, sorted, of values with these names in the checkpoint."""
        return tuple(sorted(self.renamed.get(name, name) for name in names))

    def report(self, checkpoint: Checkpoint) -> RestoreReport:
        """Return the report of the restore if it succeeds, with phases yet to be measured."""
        restored: list[str] = []
        reshaped: list[Reshaped] = []
        cast: list[Cast] = []
        tensors = checkpoint.tensors
        for source, leaf in self.leaves:
            name, info = self.renamed.get(source, source), tensors[source]
            restored.append(name)
            if info.shape != leaf.shape:
                reshaped.append(Reshaped(name, info.shape, leaf.shape))
            if info.dtype_name != leaf.dtype:
                cast.append(Cast(name, info.dtype_name, leaf.dtype))
        return RestoreReport(
            path=checkpoint.path,
            restored=tuple(restored),
            missing=tuple(self.missing),
            defaulted=tuple(self.defaulted),
            unexpected=tuple(self.unexpected),
            reshaped=tuple(reshaped),
            cast=tuple(cast),
            renamed=dict(self.renamed),
            owners=dict(self.owners),
            unread=tuple(checkpoint.unread),
        )


def new_names(checkpoint: Checkpoint, options: RestoreOptions) -> dict[str, str]:
    """Return the new names of the checkpoint's tensors and values that ``options.rename`` renames."""
    if options.rename is None:
        return {}
    return renamed(options.rename, [*checkpoint.tensors, *checkpoint.values])


def validate_report(report: RestoreReport, options: RestoreOptions) -> None:
    """Refuse a restore that the options do not allow, by its report.

    Raises:
        TensorNotFoundError: The checkpoint lacks a name that the target asks for.
        ShapeMismatchError: A tensor's shape differs.
        DTypeError: A conversion is impossible, or not allowed.
    """
    missing = sorted((*report.missing, *report.defaulted))
    if missing and not options.allow_missing:
        raise TensorNotFoundError(
            f"checkpoint {report.path} has nothing at {capped(map(repr, missing))}{_nearest(missing[0], report)}; "
            "RestoreOptions(allow_missing=True) leaves the target as it is there",
            name=missing[0],
        )
    if report.reshaped:
        first, *more = report.reshaped
        raise ShapeMismatchError(
            f"tensor {first.name!r} has another shape; got {first.target} in the target, expected {first.saved}"
            f"{_others(more)}"
        )
    unnamed = [part for part, rule in report.owners.items() if rule != "name"]
    if unnamed and options.strict == "names":
        raise TensorNotFoundError(
            f"checkpoint {report.path} and the target have no common name for {capped(map(repr, unnamed))}; found by "
            f"{report.owners[unnamed[0]]}, which strict='names' refuses; pass the optimizer together with its module, "
            "or make it of module.named_parameters()",
            name=unnamed[0],
        )
    impossible = [cast for cast in report.cast if not is_convertible(cast.saved, cast.target)]
    if impossible:
        raise DTypeError(
            f"tensor {impossible[0].name!r} cannot be converted; got {impossible[0].target} in the target, saved as "
            f"{impossible[0].saved}{_others(impossible[1:])}; restore it as {impossible[0].saved} and convert it then"
        )
    refused = [
        cast
        for cast in report.cast
        if options.cast == "exact" or (options.cast == "lossless" and not is_lossless(cast.saved, cast.target))
    ]
    if refused:
        raise DTypeError(
            f"tensor {refused[0].name!r} would be converted; got {refused[0].target} in the target, saved as "
            f"{refused[0].saved}{_others(refused[1:])}; conversions allowed now: {options.cast}; "
            "RestoreOptions(cast='any') allows all"
        )


def _nearest(name: str, report: RestoreReport) -> str:
    """Return, for an error, the names nearest to a name among the checkpoint's names that the target does not take."""
    near = get_close_matches(name, report.unexpected[:MAX_COMPARED], n=3) or close_prefixes(name, report.unexpected)
    return f" (of the unmatched names, {capped(map(repr, near))} is nearest to {name!r})" if near else ""


def validate_expected(report: RestoreReport) -> None:
    """Refuse a restore that would skip a part of the checkpoint, by its report.

    Raises:
        UnexpectedTensorError: The checkpoint holds a name that no client asks for.
    """
    if report.unexpected:
        raise UnexpectedTensorError(
            f"checkpoint {report.path} holds tensors or values that the target does not ask for: "
            f"{capped(map(repr, report.unexpected))}; RestoreOptions(allow_unexpected=True) passes over it; if other "
            "clients restore the rest, name all of them in group=",
            names=report.unexpected,
        )


def _others(tensors: Sequence[Reshaped | Cast]) -> str:
    return f" (and so have {capped(repr(tensor.name) for tensor in tensors)})" if tensors else ""
