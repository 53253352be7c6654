"""`Root`: the directory, or prefix on an object store, that a manager keeps checkpoints below; and the right to do so.

Two processes that save to one root would remove each other's checkpoints, so one process at a time has the right to
change them. In a directory that is a lock (`dtckpt.checkpoint.managing.root`): the first process has it. An object
store has no locks, so there the newest manager has it:

    .dtckpt-managers/
        00000000000000000017-9f31c2aa     an older manager: its next save finds the newer entry, and is refused
        00000000000000000042-03be77d1     the newest manager: has the right, and removes the older entries

Entries begin with a number that grows from manager to manager, so their order by name is their order by age.

The lock of a directory is a record lock (``fcntl.lockf``), which belongs to the process. Forked processes share a lock
of an open file (``flock``), but a data loader that outlives its parent must not keep the next job out. Record locks do
not exclude two managers of one process from each other; the registry ``_held`` does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from dtckpt.checkpoint.managing.leftovers import Leftover, collect_leftovers, find_leftovers, interrupted_exchanges
from dtckpt.errors import CheckpointConflictError, printable
from dtckpt.format import json_facts
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit_by_decision import COMMITTED, GIVEN_UP, REGISTER_FOLDER, AttemptRegister, start_ns
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder, ObjectFolder, open_folder
from dtckpt.storage.local_folder import LocalFolder, make_folders
from dtckpt.storage.location import Location
from dtckpt.storage.url import Url

logger = logging.getLogger("dtckpt.checkpoint")

_DRAFT_AGE_S = 3600.0
"""Older drafts are of processes that died: a draft is renamed at once."""
_open_roots: set[Path] = set()
"""The roots of which `_tidy` has warned."""
LOCK_NAME = ".dtckpt-manager.lock"
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux with 64 bits: type, whence, start, length, process."""
_held: weakref.WeakValueDictionary[tuple[int, Path], RootLock] = weakref.WeakValueDictionary()
"""The locks of this process, by process (a forked process starts without locks) and directory."""


class RootLock:
    """The right to change the checkpoints of a directory; it ends with the process at the latest."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._close: weakref.finalize[[int], RootLock] | None = None

    def acquire(self) -> None:
        """Take the right; idempotent.

        Raises:
            CheckpointConflictError: Another process or another manager of this process has it.
            StorageError: The directory cannot be written.
        """
        key = os.getpid(), self._root
        if _held.get(key) is self:
            return
        with translate_errors("lock the directory of checkpoints", self._root):
            make_folders(self._root)
            if key in _held:
                raise self._conflict("another manager of this process")
            descriptor = LocalFolder(self._root).open_lock(LOCK_NAME, to_write=True)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        self._close = weakref.finalize(self, os.close, descriptor)
        _held[key] = self
        self._tidy()

    def _tidy(self) -> None:
        """Remove drafts of processes that died; warn of a root that any user may write to."""
        with suppress(OSError):
            LocalFolder(self._root).remove_drafts(before_s=time.time() - _DRAFT_AGE_S)
            mode = stat.S_IMODE(self._root.stat().st_mode)
            if mode & stat.S_IWOTH and self._root not in _open_roots:
                _open_roots.add(self._root)
                logger.warning(
                    "every user may write to %s (mode %o), and so may remove or replace the checkpoints: chmod o-w it",
                    self._root,
                    mode,
                )

    def _lock(self, descriptor: int) -> None:
        """Lock the file, and write the holder into it, for the error that another process gets."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._conflict(_noted_holder(descriptor)) from None
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logger.warning("%s has no locks, so a second job that saves there would go unnoticed", self._root)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def _conflict(self, holder: str) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{holder} saves checkpoints to {self._root} already; end it, close its manager, or save elsewhere"
        )

    def holder(self) -> str:
        """Return the process that has the right; empty if no process has it."""
        if (os.getpid(), self._root) in _held:
            return "this process"  # not looked at: to close the file would give the process's lock up
        try:
            descriptor = LocalFolder(self._root).open_lock(LOCK_NAME, to_write=False)
        except OSError:
            return ""
        try:
            # The kernel is asked, and no lock taken: a manager that starts at this moment would be refused.
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return ""
            return _noted_holder(descriptor)
        except OSError:  # a file system without locks
            return ""
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the right back; idempotent."""
        key = os.getpid(), self._root
        if _held.get(key) is self:
            del _held[key]
        if self._close is not None:
            self._close()


def _noted_holder(descriptor: int) -> str:
    """Return the text about its holder in a lock file, as one line.

    Any user with write access to the root may have written the text.
    """
    return printable(os.pread(descriptor, 200, 0).decode(errors="replace")) or "another process"


MANAGERS = ".dtckpt-managers"
"""The folder, in a root, that holds one entry for each manager."""
MAX_HOLDER_NBYTES = 1 << 12
_ENTRY = re.compile(r"[0-9]{20}-[0-9a-f]{8}")


class Right(Protocol):
    """The right to change the checkpoints below a root; one process at a time has it."""

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

    def holder(self) -> str:
        """Return the process that has the right, as far as storage tells; empty if no process has it."""
        ...


class Root(Protocol):
    """A place that checkpoints are kept below, each by its name."""

    where: Location
    """The root's path or URL."""
    right: Right
    """The right to change the checkpoints."""
    folder: Folder
    """The files below the root."""

    def names(self) -> set[str]:
        """Return the names of everything below the root that may be a checkpoint."""
        ...

    def exists(self) -> bool:
        """Whether there is anything at the root."""
        ...

    def saved_s(self, name: str) -> float | None:
        """Return when a checkpoint was saved, in seconds since the epoch; None if nothing tells."""
        ...

    def leftovers(self, *, min_age_s: float, now: float) -> list[Leftover]:
        """Return the files of attempts beside the checkpoints, also of attempts under way. Args: as `collect`."""
        ...

    def collect(self, *, min_age_s: float, now: float) -> None:
        """Remove the leftovers of dead attempts; attempts that live are not touched.

        Args:
            min_age_s: Seconds without a sign of life after which an attempt can count as dead.
            now: Seconds since the epoch.
        """
        ...


def root_of(where: Location) -> Root:
    """Return the root at a path or URL."""
    return DirectoryRoot(where) if isinstance(where, Path) else ObjectRoot(where, open_folder(where))


class DirectoryRoot(Root):
    """A directory of checkpoints."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.right = RootLock(where)
        self.folder = LocalFolder(where)

    @override
    def names(self) -> set[str]:
        with translate_errors("list the checkpoints", self.where), suppress(FileNotFoundError):
            return {entry.name for entry in self.where.iterdir()} | interrupted_exchanges(self.where)
        return set()

    @override
    def exists(self) -> bool:
        return self.where.is_dir()

    @override
    def saved_s(self, name: str) -> float | None:
        """As `Root.saved_s`: when the last file of the checkpoint was written, or the directory's last change."""
        with suppress(OSError):
            path = self.where / name
            return (path / MANIFEST_NAME if (path / MANIFEST_NAME).exists() else path).stat().st_mtime
        return None

    @override
    def leftovers(self, *, min_age_s: float, now: float) -> list[Leftover]:
        with translate_errors("look for leftovers", self.where):
            found, holder = find_leftovers(self.where, min_age_s=min_age_s, now=now), self.right.holder()
        return [each if each.is_dead else replace(each, holder=holder) for each in found]

    @override
    def collect(self, *, min_age_s: float, now: float) -> None:
        collect_leftovers(self.where, min_age_s=min_age_s, now=now)


class ObjectRoot(Root):
    """A prefix on an object store, with the registers of the checkpoints below it."""

    def __init__(self, where: Url, folder: ObjectFolder) -> None:
        self.where = where
        self.right = NewestManager(where, folder / MANAGERS)
        self.folder = folder

    @override
    def names(self) -> set[str]:
        with translate_errors("list the checkpoints", self.where):
            return {name.partition("/")[0] for name in (self.folder / REGISTER_FOLDER).names()}

    @override
    def exists(self) -> bool:
        """As `Root.exists`: a store has no folders, so with a checkpoint or a register."""
        return bool(self.names())

    @override
    def saved_s(self, name: str) -> float | None:
        """As `Root.saved_s`: when the attempt began that is the checkpoint."""
        with translate_errors("look at the checkpoint", self.where / name):
            attempt = AttemptRegister(self.where / name, self.folder).newest_committed()
        return None if attempt is None else int(attempt.partition("-")[0]) / 1e9

    @override
    def leftovers(self, *, min_age_s: float, now: float) -> list[Leftover]:
        """As `Root.leftovers`: attempts without a decision or that `AttemptRegister.collect` would remove."""
        found = []
        for name in sorted(self.names()):
            where = self.where / name
            with translate_errors("look for leftovers", where):
                register = AttemptRegister(where, self.folder, lambda: now)
                newest = register.newest_committed() or ""
                for attempt in register.attempts():
                    decision = register.decision(attempt)
                    is_dead = (
                        register.is_silent(attempt, min_age_s) if not decision else decision in (COMMITTED, GIVEN_UP)
                    )
                    # Given up and empty: the register remembers it until nothing of it can run any more.
                    if attempt == newest or (decision == GIVEN_UP and not (register.data / attempt).names()):
                        continue
                    since_s = int(attempt.partition("-")[0]) / 1e9
                    holder = "" if is_dead else self._claimant(name, attempt)
                    found.append(Leftover(name, where / attempt, is_dead, since_s, holder=holder))
        return found

    def _claimant(self, name: str, attempt: str) -> str:
        with suppress(FileNotFoundError, ValueError):
            return _process_of((self.folder / REGISTER_FOLDER / name).read_whole(attempt, MAX_HOLDER_NBYTES))
        return ""

    @override
    def collect(self, *, min_age_s: float, now: float) -> None:
        for name in sorted(self.names()):
            with translate_errors("remove what dead saves left", self.where / name):
                AttemptRegister(self.where / name, self.folder, lambda: now).collect(silent_for_s=min_age_s)


def _process_of(data: bytes) -> str:
    """Read the process that made an entry or a claim. Raises: ValueError: The data is damaged."""
    holder = json_facts.parse_object(data)
    return f"process {json_facts.whole(holder.get('process'))} on {printable(json_facts.text(holder.get('host')))}"


class NewestManager(Right):
    """The right to an object store's root: the newest manager has it, and older ones are refused.

    So a job that is started again does not wait for a former process that may be dead. Each manager writes its entry
    before it lists all entries. Of two managers that begin at the same time, the manager with the smaller name is
    refused, at once or at its next save.

    Args:
        where: The root, for messages.
        folder: The folder of the entries.
        clock: Returns seconds since the epoch.
    """

    def __init__(self, where: Url, folder: ObjectFolder, clock: Callable[[], float] = time.time) -> None:
        self._where = where
        self._folder = folder
        self._clock = clock
        self._entry = ""

    @override
    def acquire(self) -> None:
        with translate_errors("look for other managers", self._where):
            names = self._entries()
            if not self._entry:
                # Greater than all entries even if this host's clock is behind; the random part tells ties apart.
                newest = max(map(start_ns, names), default=0)
                self._entry = f"{max(int(self._clock() * 1e9), newest + 1):020d}-{secrets.token_hex(4)}"
                holder = {"process": os.getpid(), "host": os.uname().nodename}
                self._folder.write(self._entry, json.dumps(holder).encode())
                names = self._entries()
            if newer := [name for name in names if name > self._entry]:
                raise CheckpointConflictError(
                    f"{self._who(newer[-1])} saves checkpoints to {self._where} since later; "
                    "end it, close its manager, or save elsewhere"
                )
            # Older managers are refused from now on: the newest entry is enough to refuse them.
            self._folder.remove(name for name in names if name < self._entry)

    def _entries(self) -> list[str]:
        return [name for name in self._folder.names() if _ENTRY.fullmatch(name)]

    def _who(self, entry: str) -> str:
        try:
            return _process_of(self._folder.read_whole(entry, MAX_HOLDER_NBYTES))
        except ValueError:
            return f"an unknown process, as {self._folder}/{entry} says,"

    @override
    def holder(self) -> str:
        """As `Right.holder`: the newest manager that has not given the right back, whether it lives or not."""
        with translate_errors("look for other managers", self._where), suppress(FileNotFoundError):
            return next(map(self._who, reversed(self._entries())), "")
        return ""

    @override
    def release(self) -> None:
        if self._entry:
            with translate_errors("give up the right to change checkpoints", self._where):
                self._folder.remove([self._entry])
            self._entry = ""
