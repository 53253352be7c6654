"""Roots: what a manager keeps checkpoints below; a directory, or a prefix on an object store."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from dtckpt.checkpoint.managing.leftovers import collect_leftovers, targets_of_leftovers
from dtckpt.checkpoint.managing.root_lock import RootLock
from dtckpt.errors import CheckpointConflictError
from dtckpt.storage.commit_by_decision import REGISTER_FOLDER, AttemptRegister
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import ObjectFolder, open_folder
from dtckpt.storage.location import Location, Url

MANAGERS = ".dtckpt-managers"
"""The folder, in a root, in which managers say that they are there."""


class Right(Protocol):
    """The right to change the checkpoints below a root; one process has it."""

    def acquire(self) -> None:
        """Take the right; idempotent.

        Raises:
            CheckpointConflictError: Another process or another manager of this process has it.
            StorageError: The root cannot be written.
        """
        ...

    def release(self) -> None:
        """Give the right back; idempotent."""
        ...


class Root(Protocol):
    """What checkpoints are kept below, each by its name."""

    @property
    def where(self) -> Location:
        """Its path or URL."""
        ...

    @property
    def right(self) -> Right:
        """See `Right`."""
        ...

    def names(self) -> set[str]:
        """Return the names of all that may be checkpoints."""
        ...

    def collect(self, *, min_age_s: float, now: float) -> None:
        """Take away what dead attempts left; attempts that live are not touched.

        Args:
            min_age_s: How long an attempt has given no sign of life before it can count as dead.
            now: Seconds since the epoch.
        """
        ...


def root_of(where: Location) -> Root:
    """Return the root at a path or URL."""
    return DirectoryRoot(where) if isinstance(where, Path) else ObjectRoot(where, open_folder(where))


class DirectoryRoot:
    """A directory of checkpoints."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.right = RootLock(where)

    def names(self) -> set[str]:
        """As `Root.names`."""
        with translate_errors("list the checkpoints", self.where), suppress(FileNotFoundError):
            return {entry.name for entry in self.where.iterdir()} | targets_of_leftovers(self.where)
        return set()

    def collect(self, *, min_age_s: float, now: float) -> None:
        """As `Root.collect`."""
        collect_leftovers(self.where, min_age_s=min_age_s, now=now)


class ObjectRoot:
    """A prefix on an object store, with the registers of the checkpoints below it."""

    def __init__(self, where: Url, folder: ObjectFolder) -> None:
        self.where = where
        self.right = NewestManager(where, folder / MANAGERS)
        self._folder = folder

    def names(self) -> set[str]:
        """As `Root.names`."""
        with translate_errors("list the checkpoints", self.where):
            return {name.partition("/")[0] for name in (self._folder / REGISTER_FOLDER).names()}

    def collect(self, *, min_age_s: float, now: float) -> None:
        """As `Root.collect`."""
        for name in sorted(self.names()):
            with translate_errors("remove what dead saves left", self.where / name):
                AttemptRegister(self.where / name, self._folder, lambda: now).collect(silent_for_s=min_age_s)


class NewestManager:
    """The right to an object store's root: without locks, the newest manager has it, and older ones are told.

    So a job that is started again need not wait for what is left of the one before.
    """

    def __init__(self, where: Url, folder: ObjectFolder, clock: Callable[[], float] = time.time) -> None:
        self._where = where
        self._folder = folder
        self._clock = clock
        self._mine = ""

    def acquire(self) -> None:
        """As `Right.acquire`."""
        with translate_errors("look for other managers", self._where):
            names = self._folder.names()
            if not self._mine:
                newest = max((int(name.partition("-")[0]) for name in names), default=0)
                self._mine = f"{max(int(self._clock() * 1e9), newest + 1):020d}-{secrets.token_hex(4)}"
                holder = {"process": os.getpid(), "host": os.uname().nodename}
                self._folder.write(self._mine, json.dumps(holder).encode())
                names = self._folder.names()
            if newer := [name for name in names if name > self._mine]:
                holder = json.loads(self._folder.read(newer[-1]))
                raise CheckpointConflictError(
                    f"process {holder['process']} on {holder['host']} saves checkpoints to {self._where} since later; "
                    "end it, close its manager, or save elsewhere"
                )
            self._folder.remove(name for name in names if name < self._mine)

    def release(self) -> None:
        """As `Right.release`."""
        if self._mine:
            with translate_errors("give up the right to change checkpoints", self._where):
                self._folder.remove([self._mine])
            self._mine = ""
