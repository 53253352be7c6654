"""Track the objects of a `DTensorCheckpoint`, and remember which of them a restore has reached.

Objects may be added and removed after a restore. So the status of a restore compares the checkpoint with the objects
that exist when the program asks.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from dtckpt.checkpoint.leaves import FixedState, is_tensor
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.match import plan_target, saved_names
from dtckpt.checkpoint.restoring.plan import RestorePlan
from dtckpt.checkpoint.restoring.target import is_stateful_target, items_of_target, visit_target
from dtckpt.errors import CheckpointConflictError, RestoreMismatchError, TreeError, capped
from dtckpt.format.tree import MAX_DEPTH
from dtckpt.storage.location import Location

Path = tuple[str, ...]

PLAIN = object()
"""Stands for the owner of a plain value, which has no identity."""


class Node(ABC, FixedState):
    """An object with named objects below it, which notices when an object is assigned: a `DTensorCheckpoint`."""

    @abstractmethod
    def _tracked(self) -> Iterator[tuple[Path, Any, Any]]:
        """Yield the path below the node, the object and its owner, None for none, of all objects of the node."""

    @abstractmethod
    def _await(self, restoration: Restoration, path: Path) -> None:
        """Note a restore, of which the node is at ``path``: objects that are assigned later may be in it."""


def tracked(value: Any, path: Path, owner: Any = None) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the owner of every node, tensor and plain value of a tree.

    The owner of a tensor is the tensor itself, unless it is part of the state of an object: of the object then.

    Raises:
        TreeError: The tree is too deep.
    """
    if len(path) > MAX_DEPTH:
        raise TreeError(f"the objects are nested deeper than {MAX_DEPTH} levels; do they contain themselves?")
    if isinstance(value, Node):
        yield path, value
        for below, child, child_owner in value._tracked():
            yield from tracked(child, (*path, *below), child_owner)
    elif is_tensor(value):
        yield path, value if owner is None else owner
    elif is_stateful_target(value):
        yield from tracked(value.state_dict(), path, value)
    elif (items := items_of_target(value)) is None:
        yield path, PLAIN if owner is None else owner
    else:
        for key, child in items.items() if isinstance(items, Mapping) else enumerate(items):
            yield from tracked(child, (*path, str(key)), owner)


class Restoration:
    """One restore: the contents of the checkpoint, and the objects that it has reached so far.

    Args:
        checkpoint: The checkpoint, open.
        options: Options of the restore.

    Attributes:
        location: The path of the checkpoint.
        options: Options of the restore.
        unexpected: Names of tensors and values of the checkpoint that no object has taken so far.
    """

    def __init__(self, checkpoint: Checkpoint, options: RestoreOptions) -> None:
        self.location = checkpoint.path
        self.options = options
        self._identity = checkpoint.identity
        self._saved = saved_names(checkpoint, options)
        self.unexpected = set(self._saved)
        self._reached: dict[str, Callable[[], Any]] = {}

    def plan(self, checkpoint: Checkpoint, target: Any, path: Path, client: ClientNumber) -> RestorePlan:
        """Plan to fill a target from the part of the checkpoint at a path.

        Raises:
            CheckpointConflictError: A save has replaced the checkpoint since the restore.
        """
        if checkpoint.identity != self._identity:
            raise CheckpointConflictError(
                f"checkpoint {self.location} was replaced since it was restored, so {'/'.join(path)!r} would get a "
                "value of another state; restore again"
            )
        return plan_target(checkpoint, visit_target(target, path), self.options, client, at=path)

    def is_waiting(self, path: Path) -> bool:
        """Whether the checkpoint holds something at or below a path, and no object has taken any of that."""
        below = _below("/".join(path), self._saved)
        return bool(below) and below <= self.unexpected

    def note(self, plan: RestorePlan, target: Any, path: Path) -> None:
        """Note that a target has been filled by a plan."""
        self.unexpected -= _below("/".join(path), self._saved) - set(plan.unexpected)
        lacking = {*plan.missing, *plan.defaulted}
        for where, owner in tracked(target, path):
            if isinstance(owner, Node):
                owner._await(self, where)
            if not any("/".join(where[:end]) in lacking for end in range(1, len(where) + 1)):
                self._reached["/".join(where)] = _reference(owner)

    def missing(self, target: Any) -> tuple[str, ...]:
        """Return the names of the objects that got nothing from the checkpoint."""
        names = (("/".join(path), owner) for path, owner in tracked(target, ()))
        return tuple(
            sorted(name for name, owner in names if name not in self._reached or self._reached[name]() is not owner)
        )

    def matched(self) -> set[str]:
        """Return the names of tensors and values of the checkpoint that objects have taken."""
        return self._saved - self.unexpected


def _below(name: str, names: Collection[str]) -> set[str]:
    """Return the names that are ``name``, or are below it; all for no name."""
    return {each for each in names if not name or each == name or each.startswith(f"{name}/")}


def _reference(owner: Any) -> Callable[[], Any]:
    """Return a function that returns an object, and does not keep it alive if that can be avoided."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


class RestoreStatus:
    """The result of a restore of a `DTensorCheckpoint`.

    An assertion checks which objects have got their values from the checkpoint by the time of the call, and returns the
    status.

    Args:
        target: The node that was restored.
        restoration: The restore; None if there was nothing to be restored.
        counter: Name of the save counter, which matches in any case.
    """

    def __init__(self, target: Node, restoration: Restoration | None, counter: str) -> None:
        self._target = target
        self._restoration = restoration
        self._counter = counter
        self._missing_at_first = frozenset(self.missing)
        self._is_accepted = not (self._missing_at_first or self.unexpected)

    @property
    def path(self) -> Location | None:
        """The checkpoint; None if nothing was restored."""
        return None if self._restoration is None else self._restoration.location

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the tensors, values and checkpoints among the objects that got nothing from the checkpoint."""
        return () if self._restoration is None else self._restoration.missing(self._target)

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Names of tensors and values of the checkpoint that no object has taken."""
        return () if self._restoration is None else tuple(sorted(self._restoration.unexpected))

    def assert_consumed(self) -> RestoreStatus:
        """Check that the checkpoint has everything that the objects have, and nothing else.

        Raises:
            RestoreMismatchError: Checkpoint and objects do not match, or nothing was restored. The error is an
                `AssertionError`, too.
        """
        return self._check(self.missing, self.unexpected)

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that the checkpoint has everything that the objects have; it may have more.

        Raises:
            RestoreMismatchError: Checkpoint and objects do not match, or nothing was restored. The error is an
                `AssertionError`, too.
        """
        return self._check(self.missing, ())

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Check that an object has got something from the checkpoint, other than the save counter.

        Raises:
            RestoreMismatchError: No object has, or nothing was restored. The error is an `AssertionError`, too.
        """
        self._validate_restored()
        if self._restoration is not None and not self._restoration.matched() - {self._counter}:
            raise RestoreMismatchError(
                f"no object has got anything from the checkpoint; {self._describe(self.missing, self.unexpected)}",
                missing=self.missing,
                unexpected=self.unexpected,
            )
        return self

    def expect_partial(self) -> RestoreStatus:
        """Accept that the objects and the checkpoint do not match."""
        self._is_accepted = True
        return self

    def validate_settled(self) -> None:
        """Refuse a save that would lose parts that the restore passed over, until the caller has accepted the mismatch.

        Raises:
            RestoreMismatchError: The checkpoint has parts that no object has taken, or an object of the time of the
                restore has got nothing.
        """
        if self._is_accepted:
            return  # without a walk through the objects
        missing = tuple(name for name in self.missing if name in self._missing_at_first)
        if missing or self.unexpected:
            raise RestoreMismatchError(
                f"this save would drop restored data: {self._describe(missing, self.unexpected)}; if that is meant, "
                "call expect_partial() on the status that restore() returned",
                missing=missing,
                unexpected=self.unexpected,
            )

    def mismatch(self) -> str:
        """Return the mismatch in words; empty if the caller has accepted it, or all matched at first."""
        return "" if self._is_accepted else self._describe(self.missing, self.unexpected)

    def _check(self, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> RestoreStatus:
        self._validate_restored()
        if missing or unexpected:
            raise RestoreMismatchError(
                f"{self._describe(missing, unexpected)}; expect_partial() accepts that",
                missing=missing,
                unexpected=unexpected,
            )
        return self.expect_partial()

    def _validate_restored(self) -> None:
        if self._restoration is None:
            raise RestoreMismatchError("nothing was restored: restore() got no path")

    def _describe(self, missing: Collection[str], unexpected: Collection[str]) -> str:
        parts = [
            f"it lacks {capped(map(repr, missing))}" if missing else "",
            f"no object has its {capped(map(repr, unexpected))}" if unexpected else "",
        ]
        return f"checkpoint {self.path} and the objects do not match: " + " and ".join(filter(None, parts))
