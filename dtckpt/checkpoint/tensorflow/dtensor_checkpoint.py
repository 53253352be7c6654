"""`DTensorCheckpoint`: save and restore objects together, with the calls of ``tf.experimental.dtensor``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from dtckpt.checkpoint.leaves import Stateful, is_tensor, mesh_of, state_of_object
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.plan import RestorePlan
from dtckpt.checkpoint.restoring.restore import run_restore
from dtckpt.checkpoint.restoring.targets import plan_target
from dtckpt.checkpoint.saving.save import save_state
from dtckpt.checkpoint.saving.state import State, state_of_tensors
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import ConfigError, MeshError, MeshTypeError, RestoreMismatchError, TreeError, capped
from dtckpt.format import tree as trees
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

COUNTER = "save_counter"


@dataclass(slots=True)
class RestoreStatus:
    """The result of a restore of a `DTensorCheckpoint`. The assertions return the status.

    Args:
        path: The checkpoint; None if nothing was restored.
        missing: Names of tensors and values of the objects that the checkpoint lacks; they stayed as they were.
        unexpected: Names of tensors and values of the checkpoint that no object has; they were passed over.
        is_settled: Whether all matched, or the caller has accepted the mismatch.
    """

    path: Location | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    is_settled: bool = False

    def assert_consumed(self) -> RestoreStatus:
        """Check that the checkpoint has everything that the objects have, and nothing else.

        Raises:
            RestoreMismatchError: It has not, or nothing was restored. It is an `AssertionError`, too.
        """
        return self._check(self.missing, self.unexpected)

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that the checkpoint has everything that the objects have; it may have more.

        Raises:
            RestoreMismatchError: It has not, or nothing was restored. It is an `AssertionError`, too.
        """
        return self._check(self.missing, ())

    def expect_partial(self) -> RestoreStatus:
        """Accept that the objects and the checkpoint do not match."""
        self.is_settled = True
        return self

    def _check(self, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> RestoreStatus:
        if self.path is None:
            raise RestoreMismatchError("nothing was restored: restore() got no path")
        if missing or unexpected:
            raise RestoreMismatchError(
                f"{self.describe(missing, unexpected)}; expect_partial() accepts that",
                missing=missing,
                unexpected=unexpected,
            )
        self.is_settled = True
        return self

    def describe(self, missing: Collection[str], unexpected: Collection[str]) -> str:
        """Return the mismatch in words."""
        parts = [
            f"it lacks {capped(map(repr, missing))}" if missing else "",
            f"no object has its {capped(map(repr, unexpected))}" if unexpected else "",
        ]
        return f"checkpoint {self.path} and the objects do not match: " + " and ".join(filter(None, parts))


class DTensorCheckpoint:
    """Objects on one mesh that are saved and restored together.

    If objects and checkpoint do not match, the restore says so in its status and in the log. The next save would lose
    the parts that were passed over; it fails until the caller has accepted the mismatch, by ``expect_partial()`` or an
    assertion that passes.

    Args:
        mesh: The mesh that all DTensors are on; its clients take part.
        root: Objects by name: a dict, or an object with ``state_dict()`` and ``load_state_dict()``.
        objects: Further objects by name, which become attributes: tensors, DTensors, variables, objects with
            ``state_dict()`` and ``load_state_dict()``, plain values, and dicts and lists of them.

    Raises:
        MeshTypeError: ``mesh`` is no mesh.
        TreeError: ``root`` is neither kind.
        ConfigError: An object has the name of one of ``root``, or ``save_counter``.

    >>> import tempfile, torch, dtckpt
    >>> mesh = dtckpt.abstract_mesh({"x": 2})
    >>> weight = dtckpt.DVariable(torch.arange(4.0), dtckpt.Layout(["x"], mesh))
    >>> checkpoint = dtckpt.DTensorCheckpoint(mesh, weight=weight)
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
    >>> path.rpartition("/")[2]
    'ckpt-1'
    >>> _ = weight.assign(torch.zeros(4))
    >>> _ = checkpoint.restore(path).assert_consumed()
    >>> weight.full_tensor().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    def __init__(self, mesh: Mesh, root: Any = None, **objects: Any) -> None:
        if not isinstance(mesh, Mesh):
            raise MeshTypeError(f"the first argument must be a Mesh; got {type(mesh).__name__}")
        self._mesh = mesh
        self._root = root
        self._objects = objects
        self._counter = 0
        self._latest = RestoreStatus(None, is_settled=True)
        taken = {COUNTER, *self._children()} & set(objects)
        if taken or COUNTER in self._children():
            raise ConfigError(f"objects need names of their own; {capped(sorted(taken or {COUNTER}))} is taken")

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"DTensorCheckpoint has no attribute and no object {name!r}")
        return objects[name]

    @property
    def save_counter(self) -> int:
        """Number of saves so far; it is saved and restored with the objects."""
        return self._counter

    def _children(self) -> Mapping[str, Any]:
        if self._root is None:
            return {}
        children = self._root.state_dict() if isinstance(self._root, Stateful) else self._root
        if not isinstance(children, Mapping):
            raise TreeError(f"root must be a dict or have state_dict(); got {type(self._root).__name__}")
        return children

    def _tree(self, counter: int) -> dict[str, Any]:
        return {**self._children(), **self._objects, COUNTER: counter}

    def save(self, prefix: str | Location, *, options: SaveOptions | None = None) -> str:
        """Save all objects as the checkpoint ``<prefix>-<n>``, where n is the save counter plus one; then count.

        Collective: Over the mesh's clients; barriers and further errors as for `dtckpt.save`.

        Returns:
            The checkpoint's path.

        Raises:
            RestoreMismatchError: The latest restore passed something over, and the caller has not accepted that.
            CheckpointExistsError: The checkpoint exists already, from a run that was not restored.
            MeshError: A tensor is on another mesh.
        """
        options = options or SaveOptions()
        counter = self._counter + 1

        def collect() -> State:
            self._validate_settled()
            leaves, structure = trees.flatten(self._tree(counter), is_tensor, state_of_object)
            for name, tensor in leaves.items():
                if mesh_of(tensor) not in (None, self._mesh):
                    raise MeshError(
                        f"tensor {name!r} is on another mesh; got {mesh_of(tensor)}, expected {self._mesh.to_string()}"
                    )
            entries = [(name, tensor, "") for name, tensor in leaves.items()]
            return state_of_tensors(entries, options, clients=self._mesh.clients, tree=trees.dump(structure))

        path = f"{prefix}-{counter}"
        save_state(path, collect, options=options, participants=self._mesh.clients)
        self._counter = counter
        return path

    def _validate_settled(self) -> None:
        status = self._latest
        if not status.is_settled:
            raise RestoreMismatchError(
                f"this save would lose data: {status.describe(status.missing, status.unexpected)}; if that is meant, "
                "call expect_partial() on what restore() returned",
                missing=status.missing,
                unexpected=status.unexpected,
            )

    def restore(self, path: str | Location | None, *, options: RestoreOptions | None = None) -> RestoreStatus:
        """Restore the objects, and the save counter, from a checkpoint in any layout.

        Tensors are filled in place. A tensor of another shape, or of a dtype that ``options.cast`` does not allow, is
        an error.

        Collective: Over the mesh's clients; barriers and errors as for `dtckpt.restore`.

        Args:
            path: The checkpoint; None does nothing.
            options: See `RestoreOptions`; missing and unexpected parts are no errors, they are in the status.

        Returns:
            The status of the restore.
        """
        if path is None:
            return RestoreStatus(None, is_settled=True)
        options = replace(options or RestoreOptions(), allow_missing=True, allow_unexpected=True)

        def plan(checkpoint: Checkpoint) -> RestorePlan:
            tree = self._tree(self._counter)
            matched = plan_target(checkpoint, tree, options)
            missing = tuple(sorted({*matched.missing, *matched.defaulted} - {COUNTER}))
            unexpected = tuple(matched.unexpected)
            status = RestoreStatus(checkpoint.path, missing, unexpected, is_settled=not missing + unexpected)
            return replace(matched, finish=lambda: self._take(matched.finish(), status))

        status: RestoreStatus = run_restore(path, plan, options, current_coordination(), self._mesh.clients)
        return status

    def _take(self, tree: dict[str, Any], status: RestoreStatus) -> RestoreStatus:
        """Give the restored values to the counter, the objects and the root, and keep the status."""
        self._counter = tree.pop(COUNTER)
        self._objects = {name: tree.pop(name) for name in self._objects}
        if isinstance(self._root, Stateful):
            self._root.load_state_dict(tree)
        elif isinstance(self._root, MutableMapping):
            self._root.update(tree)
        if not status.is_settled:
            logger.warning("%s", status.describe(status.missing, status.unexpected))
        self._latest = status
        return status
