"""Lightning: `DtckptCheckpointIO` saves and loads the checkpoints of its ``Trainer`` and ``Fabric``.

Lightning hands a checkpoint to one process only, and asks every process to load it. So a save and each load concern one
client alone. Where every process has a part of the state, use `dtckpt.interop.DtckptModelParallelStrategy`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.participants import Group
from dtckpt.checkpoint.restoring.restore import restore
from dtckpt.checkpoint.saving.save import save
from dtckpt.checkpoint.saving.save_async import SaveHandle, save_async
from dtckpt.errors import CheckpointNotFoundError, ConfigTypeError
from dtckpt.layout.clients import client_id
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.local_folder import LocalFolder, rename
from dtckpt.storage.location import location_of

PACKAGES = "lightning.fabric", "lightning_fabric"
"""Lightning is published as two packages, each with its own class ``CheckpointIO``."""
SHARDED_MARK = "meta.pt"
"""A file of each checkpoint that Lightning itself saves as a directory."""
ASIDE = "-replaced"
"""Suffix of the name of a checkpoint that Lightning itself saved, until the checkpoint that replaces it is committed.

Should the process end before, ``ckpt_path="last"`` finds it by this name.
"""


class DtckptCheckpointIO:
    """A ``CheckpointIO`` of Lightning: ``Trainer(plugins=[DtckptCheckpointIO()])``, or ``Fabric(plugins=…)``.

    Checkpoints have the names that ``ModelCheckpoint`` gives them, and hold Lightning's values under Lightning's keys.
    Checkpoints that Lightning itself saved are loaded, too, so that a run goes on after the switch.

    Args:
        options: How checkpoints are written; ``overwrite`` is always on.
        is_async: Whether saves go on in the background. A checkpoint that Lightning removes after a save is deleted
            when that save is committed, at the next save or at the end of the run. A save that fails raises its error
            there.
    """

    def __init__(self, options: SaveOptions | None = None, *, is_async: bool = False) -> None:
        self._options = options or SaveOptions()
        self._is_async = is_async
        self._handle: SaveHandle | None = None
        self._is_committed = True  # the last save
        self._doomed: list[str] = []
        _register()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save a checkpoint. Local: the other clients take no part.

        Args:
            checkpoint: Lightning's checkpoint, as a dict.
            path: Where.
            storage_options: `SaveOptions` for this checkpoint; default: this object's options.

        Raises:
            ConfigTypeError: ``storage_options`` are no `SaveOptions`.
            DtckptError: As for `dtckpt.save`, or `dtckpt.save_async`.
        """
        self.make_way(path)
        self.save(checkpoint, path, storage_options, group=[client_id()])

    def make_way(self, path: str | Path) -> None:
        """Make a path free for the next save, after the save in flight. Local.

        A link is removed: a save would follow it, and replace another checkpoint. A checkpoint of Lightning's own is
        moved aside, and is removed when the new checkpoint is committed.

        Raises:
            OSError: The file system refuses.
        """
        self._wait()
        if os.path.islink(path):
            _remove_entry(path)
        elif is_lightnings(path):
            aside = Path(path).with_stem(f"{Path(path).stem}{ASIDE}")
            rename(Path(path), aside)
            self._doomed.append(str(aside))

    def save(self, tree: Any, path: str | Path, storage_options: Any = None, *, group: Group | None = None) -> None:
        """Save a tree, in the background if ``is_async``. Collective, raises: as `dtckpt.save`, over ``group``."""
        options = self._options if storage_options is None else storage_options
        if not isinstance(options, SaveOptions):
            raise ConfigTypeError(f"storage_options must be dtckpt.SaveOptions; got {options!r:.200}")
        options = replace(options, overwrite=True)
        self._wait()
        self._is_committed = False
        if self._is_async:
            self._handle = save_async(path, tree, options=options, group=group)
        else:
            save(path, tree, options=options, group=group)
            self._is_committed = True
        self._doomed = [each for each in self._doomed if each != str(path)]
        self._remove_doomed()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint. Local: every client that needs it loads it.

        Args:
            path: The checkpoint, or a file of Lightning's own.
            map_location: Where to put the tensors, as for `torch.load`; default: the host.
            weights_only: For files as for `torch.load`. A checkpoint of this library never runs code.

        Raises:
            DtckptError: As for `dtckpt.restore`.
        """
        if os.path.isfile(path):
            loaded: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=weights_only)
            return loaded
        self._wait()
        tree: dict[str, Any] = restore(path, group=[client_id()])
        device = _device_of(map_location)
        return tree if device.type == "cpu" else _moved(tree, device)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, if it is there; but not before the save that Lightning began last is committed."""
        self._doomed.append(str(path))
        self._remove_doomed()

    def teardown(self) -> None:
        """Wait for the save in flight. Raises: the error of that save."""
        handle = self._handle
        self._wait()
        if handle is not None:
            handle.raise_unseen_failure()

    def _wait(self) -> None:
        """Wait for the save in flight; if it went well, remove the checkpoints that it makes superfluous."""
        # The error of the save is not raised here, by one client: the next save raises it, on all clients.
        handle, self._handle = self._handle, None
        if handle is not None and handle.wait() and handle.is_committed:
            self._is_committed = True
            self._remove_doomed()

    def _remove_doomed(self) -> None:
        while self._doomed and self._is_committed:
            _remove(self._doomed.pop())


def _register() -> None:
    """Make the class a ``CheckpointIO`` to each package of Lightning that the program uses."""
    for package in PACKAGES:
        if (plugins := sys.modules.get(f"{package}.plugins")) is not None:
            plugins.CheckpointIO.register(DtckptCheckpointIO)


_register()


def is_lightnings(path: str | Path) -> bool:
    """Whether Lightning itself saved the checkpoint at a path: a file, or a directory for several processes."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, SHARDED_MARK))


def _remove(path: str) -> None:
    """Remove a checkpoint; do nothing if there is none."""
    if os.path.islink(path) or is_lightnings(path):
        _remove_entry(path)
    else:
        with suppress(CheckpointNotFoundError):
            commit_target_of(location_of(path)).remove()


def _remove_entry(path: str | Path) -> None:
    where = Path(os.path.abspath(path))
    LocalFolder(where.parent).remove_tree(where.name)


def _device_of(map_location: Any) -> torch.device:
    """Return the device to which `torch.load` would bring tensors that were saved from the host."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    elif callable(map_location):
        storage = map_location(torch.empty(0).untyped_storage(), "cpu")
        map_location = None if storage is None else storage.device
    return torch.device("cpu" if map_location is None else map_location)


def _moved(tree: Any, device: torch.device) -> Any:
    """Return a tree with its tensors on a device."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        tree.update({key: _moved(value, device) for key, value in tree.items()})
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(_moved(value, device) for value in tree)
    return tree
