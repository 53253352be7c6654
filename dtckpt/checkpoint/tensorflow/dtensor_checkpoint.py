"""`DTensorCheckpoint`: save and restore objects together, with the calls of ``tf.experimental.dtensor``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.leaves import Stateful, mesh_of
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.plan import RestorePlan
from dtckpt.checkpoint.restoring.restore import run_restore
from dtckpt.checkpoint.saving.save import save_state
from dtckpt.checkpoint.saving.state import State, flatten_state, state_of_tensors
from dtckpt.checkpoint.tensorflow.tracking import Node, Path, Restoration, RestoreStatus
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import ConfigError, MeshError, MeshTypeError, TreeError, capped
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

COUNTER = "save_counter"
_OWN = frozenset({"_mesh", "_root", "_objects", "_counter", "_latest", "_awaited"})
"""Attributes of a `DTensorCheckpoint` that are no objects."""


class DTensorCheckpoint(Node):
    """Objects on one mesh that are saved and restored together.

    Each attribute is an object. A save stores the attributes as they are then, with their contents: dicts, lists,
    modules, and further `DTensorCheckpoint`. An object that is assigned after a restore gets its value at once,
    if the checkpoint holds something of that name that no object has taken.

    Collective: To assign such an object, over the mesh's clients, as `restore`. All else about attributes is local.

    If objects and checkpoint do not match, the restore says so in its status and in the log. The next save would lose
    the parts that were passed over. So it fails until the parts have found their objects, or the caller has accepted
    the mismatch, by ``expect_partial()`` or an assertion that passes.

    Args:
        mesh: The mesh that all DTensors are on; its clients take part.
        root: Objects by name: a dict, or an object with ``state_dict()`` and ``load_state_dict()``.
        objects: Further objects by name, which become attributes: tensors, DTensors, variables, objects with
            ``state_dict()`` and ``load_state_dict()``, plain values, and dicts and lists of them.

    Raises:
        MeshTypeError: ``mesh`` is no mesh.
        TreeError: ``root`` is neither kind.
        ConfigError: An object has the name of one of ``root``, or of an attribute of this class.

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
        self._objects: dict[str, Any] = {}
        self._counter = 0
        self._awaited: tuple[Restoration, Path] | None = None
        self._latest = RestoreStatus(self, None, COUNTER)
        if taken := {COUNTER} & set(self._children()) | _OWN & set(objects):
            raise ConfigError(f"objects need distinct names; {capped(sorted(taken))} is taken")
        for name, value in objects.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"DTensorCheckpoint has no attribute and no object {name!r}")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        if hasattr(type(self), name) or self._children().get(name, value) is not value:
            raise ConfigError(f"objects need distinct names; {name} is taken")
        self._objects[name] = self._fill(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self._objects:
            raise AttributeError(f"DTensorCheckpoint has no object {name!r}")
        del self._objects[name]

    def _fill(self, name: str, value: Any) -> Any:
        """Return an object to be assigned, with its value from the latest restore if that has one left for it."""
        if self._awaited is None or value is None:  # None often keeps a place for an object that comes later
            return value
        restoration, path = self._awaited
        path = (*path, name)
        if not restoration.is_waiting(path):
            return value

        def plan(checkpoint: Checkpoint) -> RestorePlan:
            matched = restoration.plan(checkpoint, value, path, self._number())

            def finish() -> Any:
                filled = matched.finish()
                restoration.note(matched, filled, path)
                return filled

            return replace(matched, finish=finish)

        return run_restore(restoration.location, plan, restoration.options, current_coordination(), self._mesh.clients)

    @property
    def save_counter(self) -> int:
        """Number of saves so far; it is saved and restored with the objects."""
        return self._counter

    def _number(self) -> ClientNumber:
        return ClientNumber.among(current_coordination().member.client, self._mesh.clients)

    def _children(self) -> Mapping[str, Any]:
        if self._root is None:
            return {}
        children = self._root.state_dict() if isinstance(self._root, Stateful) else self._root
        if not isinstance(children, Mapping):
            raise TreeError(f"root must be a dict or have state_dict(); got {type(self._root).__name__}")
        return children

    def _tree(self, counter: int) -> dict[str, Any]:
        return {**self._children(), **self._objects, COUNTER: counter}

    def _tracked(self) -> Iterator[tuple[Path, Any, Any]]:
        owner = self._root if isinstance(self._root, Stateful) else None
        for name, child in self._children().items():
            yield (str(name),), child, owner
        for name, child in self._objects.items():
            yield (name,), child, None

    def _await(self, restoration: Restoration, path: Path) -> None:
        self._awaited = restoration, path

    def state_dict(self) -> dict[str, Any]:
        """Return all objects and the save counter by name, as part of another state tree."""
        return self._tree(self._counter)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the objects and the save counter out of a tree as `state_dict` returns it."""
        tree = dict(state_dict)
        self._counter = tree.pop(COUNTER)
        self._objects = {name: tree.pop(name) for name in self._objects}
        if isinstance(self._root, Stateful):
            self._root.load_state_dict(tree)
        elif isinstance(self._root, MutableMapping):
            self._root.update(tree)

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
        counter = self._counter + 1
        path = self._save(f"{prefix}-{counter}", counter, options)
        self._counter = counter
        return path

    def write(self, path: str | Location, *, options: SaveOptions | None = None) -> str:
        """Save all objects as the checkpoint ``path``, without counting. Collective, returns and raises: as `save`."""
        return self._save(str(path), self._counter, options)

    def _save(self, path: str, counter: int, options: SaveOptions | None) -> str:
        options = replace(options or SaveOptions(), keys="same")

        def collect() -> State:
            self._latest.validate_settled()
            leaves, structure, roles = flatten_state(self._tree(counter), self._number())
            for name, tensor in leaves.items():
                if mesh_of(tensor) not in (None, self._mesh):
                    raise MeshError(
                        f"tensor {name!r} is on another mesh; got {mesh_of(tensor)}, expected {self._mesh.to_string()}"
                    )
            entries = [(name, tensor, "") for name, tensor in leaves.items()]
            return state_of_tensors(entries, options, clients=self._mesh.clients, structure=structure, roles=roles)

        save_state(path, collect, options=options, participants=self._mesh.clients)
        return path

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
            return RestoreStatus(self, None, COUNTER)
        options = replace(options or RestoreOptions(), allow_missing=True, allow_unexpected=True)

        def plan(checkpoint: Checkpoint) -> RestorePlan:
            restoration = Restoration(checkpoint, options)
            matched = restoration.plan(checkpoint, self._tree(self._counter), (), self._number())

            def finish() -> RestoreStatus:
                self.load_state_dict(matched.finish())
                restoration.note(matched, self, ())
                return RestoreStatus(self, restoration, COUNTER)

            return replace(matched, finish=finish)

        self._latest = run_restore(path, plan, options, current_coordination(), self._mesh.clients)
        if mismatch := self._latest.mismatch():
            logger.warning("%s", mismatch)
        return self._latest

    def read(self, path: str | Location, *, options: RestoreOptions | None = None) -> RestoreStatus:
        """Restore as `restore`, but leave the save counter alone. Collective, returns and raises: as `restore`."""
        counter = self._counter
        status = self.restore(path, options=options)
        self._counter = counter
        return status
