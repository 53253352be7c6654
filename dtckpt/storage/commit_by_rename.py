"""The commit by rename: a checkpoint on a file system is a directory that appears whole, or not at all.

A save builds its directory beside the target, under a hidden name that carries the attempt's token, and renames it
when everything in it is durable::

    .step_10.dtckpt-new-<token>     under construction    --- commit: rename, or exchange -->   step_10
    .step_10.dtckpt-old-<token>     replaced; only on file systems that cannot exchange two directories
    .step_10.dtckpt-trash-<random>  taken away, to be deleted

Where a checkpoint is replaced, the two directories are exchanged in one step (``renameat2`` with
``RENAME_EXCHANGE``). On file systems without it the old directory steps aside first, and the pair of names that a crash
leaves then tells `locate` the state.

Two leaders may be at work on one target: a leader that was given up but still runs, and its successor. So a directory
is only ever taken away by a rename, never emptied in place, and a leader commits the very directory that it made, by
inode: a directory that was taken away, or made again by a late writer, is not committed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit_target import CommitAttempt, CommitTarget
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.failures import taken_over_error, translate_errors
from dtckpt.storage.fsync import sync, sync_all, walk_folders
from dtckpt.storage.local_folder import EXCHANGE, NO_REPLACE, UNSUPPORTED, LocalFolder, make_folders, rename

logger = logging.getLogger("dtckpt.storage")

_WORKING_NAME = re.compile(r"\..+\.dtckpt-(new|old|trash)-.*", re.DOTALL)


def sibling(target: Path, role: str, token: str) -> Path:
    """Return the path beside a target of a working directory: of role ``new``, ``old`` or ``trash``."""
    return target.parent / f".{target.name}.dtckpt-{role}-{token}"


def siblings(target: Path, role: str) -> list[Path]:
    """Return the working directories of a role beside a target."""
    prefix = f".{target.name}.dtckpt-{role}-"
    try:
        return sorted(target.parent / name for name in os.listdir(target.parent) if name.startswith(prefix))
    except OSError:
        return []


def _interrupted_exchange(target: Path) -> Path | None:
    """Return the directory of the old checkpoint if its replacement stopped between two renames; else None.

    Only then do the old and the new directory of one attempt stand side by side while the target is missing.
    """
    if not target.exists():
        for old in siblings(target, "old"):
            if is_interrupted_exchange(target, old.name.rpartition("-old-")[2]):
                return old
    return None


def is_interrupted_exchange(target: Path, token: str) -> bool:
    """Whether an attempt's replacement of a checkpoint stopped between two renames; nothing is listed."""
    pair = sibling(target, "old", token), sibling(target, "new", token)
    return not target.exists() and all(map(is_committed, pair))


def validate_name(target: Path) -> None:
    """Refuse a target whose name would pass for a working directory of another one.

    Raises:
        ConfigError: The target has such a name.
    """
    if _WORKING_NAME.fullmatch(target.name):
        raise ConfigError(f"{target} cannot be a checkpoint: such names belong to saves under way; choose another")


def is_committed(folder: Path) -> bool:
    """Whether a directory holds a commit marker."""
    return (folder / MANIFEST_NAME).is_file()


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that may not be written.

    Raises:
        CheckpointExistsError: There is a checkpoint and ``overwrite`` is false, or something else.
    """
    with translate_errors("look at the target", target):
        if is_committed(target) or _interrupted_exchange(target):
            if not overwrite:
                raise CheckpointExistsError(
                    f"there is a checkpoint at {target} already; pass SaveOptions(overwrite=True) to replace it, or "
                    "save elsewhere"
                )
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointExistsError(
                f"{target} exists and is not a checkpoint; it is left alone: remove it, or save elsewhere"
            )


@dataclass(frozen=True, slots=True)
class WorkingDirectory:
    """A directory under construction.

    Args:
        path: The directory.
        target: The directory that it is to become.
        token: The attempt's token.
        inode: `inode_of` the directory when the attempt began; None if it was not there.
    """

    path: Path
    target: Path
    token: str
    inode: tuple[int, int] | None


def begin(target: Path, token: str) -> WorkingDirectory:
    """Make the directory under construction. Called by the leader.

    The newest attempt owns the target. So the directories of other attempts are taken away, and an attempt that was
    given up but still runs has nothing left to commit. The newest attempt is the last to begin, with one exception: an
    attempt with a higher number whose leader lives is newer, however late this attempt gets here.

    Raises:
        StorageError: A newer attempt is under construction.
    """
    path = working_path(target, token)
    with translate_errors("create the checkpoint directory", target):
        make_folders(target.parent)
        others = siblings(target, "new")
        if any(_attempt_number(other, target) > _attempt_number(path, target) and _is_alive(other) for other in others):
            raise taken_over_error(target)
        if old := _interrupted_exchange(target):
            rename(old, target)
        leftovers, trash = (*others, *siblings(target, "old")), siblings(target, "trash")
        if leftovers or trash:
            sync(target.parent)  # one of them may be the old checkpoint, of an attempt that died before it had synced
        for leftover in leftovers:
            discard(leftover, target)
        beside = LocalFolder(target.parent)
        for folder in trash:
            with suppress(OSError):
                beside.remove_tree(folder.name)
        LocalFolder(target.parent, path.name).make(exist_ok=False)
        return WorkingDirectory(path, target, token, inode_of(path))


def _attempt_number(path: Path, target: Path) -> int:
    """Return the number of the attempt that builds a directory: the first part of its token."""
    number = path.name.removeprefix(sibling(target, "new", "").name).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _is_alive(path: Path) -> bool:
    try:
        # Shared, so that two processes that look at the same time do not take each other for the leader.
        with lock_directory(path, is_shared=True) as is_free:
            return not is_free
    except OSError:  # gone, or nothing that a leader could have lock_directory
        return False


def begin_shared(target: Path, token: str) -> WorkingDirectory:
    """Make the directory under construction, or find it: for workers that all begin, and all may commit.

    The directories of other attempts are left alone; the first attempt that commits wins.
    """
    path = working_path(target, token)
    with translate_errors("create the checkpoint directory", target):
        make_folders(target.parent)
        LocalFolder(target.parent, path.name).make()
        return WorkingDirectory(path, target, token, inode_of(path))


def working_path(target: Path, token: str) -> Path:
    """Return the directory in which the attempt ``token`` builds its checkpoint."""
    return sibling(target, "new", token)


def commit(directory: WorkingDirectory, *, overwrite: bool, is_durable: bool = True) -> None:
    """Rename a finished directory to its target: the one step that makes it the checkpoint. Called by the leader.

    Raises:
        CheckpointExistsError: There is a checkpoint, or something else, at the target meanwhile.
        StorageError: The directory under construction was taken away: another attempt took over.
    """
    target = directory.target
    with translate_errors("commit the checkpoint", target):
        if is_durable:
            sync_all(walk_folders(directory.path))
        _validate_own(directory, directory.path)
        aside, others = None, _inodes_of_others(directory)
        if not target.exists():
            # Another leader may commit after the look above: then this fails, and does not replace its checkpoint.
            rename(directory.path, target, NO_REPLACE)
            if (found := inode_of(target)) != directory.inode:
                # Another attempt has replaced it at once, and its checkpoint stays. Or else, between the check and the
                # rename, a late writer had made the directory again.
                if found not in others:
                    discard(target, target)
                raise taken_over_error(target)
        else:
            check_target(target, overwrite=overwrite)
            aside = _replace(directory, others)
        if is_durable:
            # Before the old directory is deleted: a disk need not keep changes of two directories in order.
            sync(target.parent)
    if aside is not None:
        with _log_os_errors(aside):
            discard(aside, target)


def _validate_own(directory: WorkingDirectory, path: Path) -> None:
    if inode_of(path) != directory.inode or not is_committed(path):
        raise taken_over_error(directory.target)


def _inodes_of_others(directory: WorkingDirectory) -> set[tuple[int, int] | None]:
    """Return the inodes of the directories of other attempts for the target, which may commit at the same time."""
    others = (path for path in siblings(directory.target, "new") if path != directory.path)
    return {inode for path in others if (inode := inode_of(path)) is not None}


def _replace(directory: WorkingDirectory, others: Collection[tuple[int, int] | None]) -> Path:
    """Rename the directory to the target, where the old checkpoint is; return the old checkpoint's new path.

    Args:
        directory: The directory.
        others: `inode_of` the directories of other attempts.
    """
    target, aside = directory.target, sibling(directory.target, "old", directory.token)
    try:
        rename(directory.path, target, EXCHANGE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        # No exchange here: two renames. A crash in between leaves both names, see `_interrupted_exchange`.
        rename(target, aside)
        try:
            _validate_own(directory, directory.path)
            rename(directory.path, target)
        except BaseException:
            rename(aside, target)
            raise
        return aside
    if (found := inode_of(target)) != directory.inode:
        # Another attempt has replaced it at once, and its checkpoint stays. Or else it is not the directory that was
        # checked: exchange the two again.
        if found not in others:
            rename(directory.path, target, EXCHANGE)
        raise taken_over_error(directory.target)
    return directory.path


def _write_markers(target: Path, markers: Mapping[str, bytes], *, is_durable: bool) -> None:
    """Write the markers of a checkpoint that is committed, whether they can be written or not."""
    try:
        for name, data in markers.items():
            LocalFolder(target.parent, target.name).write(name, data)
        if is_durable and markers:
            sync_all([*(target / name for name in markers), target])
    except OSError as error:
        logger.warning("cannot mark the checkpoint at %s by %s: %s", target, ", ".join(markers), error)


def is_own(directory: WorkingDirectory) -> bool:
    """Whether the directory is still the directory with which the attempt began."""
    return inode_of(directory.path) == directory.inode


def abandon(directory: WorkingDirectory) -> None:
    """Remove an attempt's directory, if it is still there."""
    with _log_os_errors(directory.path):
        if is_own(directory):
            discard(directory.path, directory.target)


def sweep(path: Path, target: Path, inode: tuple[int, int] | None) -> None:
    """Remove a directory that late writes made again at the path of an attempt's own.

    Args:
        path: The attempt's directory.
        target: Its target.
        inode: `inode_of` the directory that the attempt began with; only the leader removes this directory.
    """
    with _log_os_errors(path):
        if inode is not None and inode_of(path) not in (None, inode):
            # Or it is the old checkpoint: the leader died right after the exchange.
            discard(path, target, is_durable=True)


@contextmanager
def _log_os_errors(folder: Path) -> Iterator[None]:
    """Log that a directory cannot be removed, and go on: the save's outcome is known, and the next save removes it."""
    try:
        yield
    except OSError as error:
        logger.warning("cannot take away %s: %s", folder, error)


def discard(folder: Path, target: Path, *, is_durable: bool = False) -> None:
    """Take a directory away by one rename, then delete it.

    Args:
        folder: The directory.
        target: The checkpoint's directory; the trash is beside it.
        is_durable: Whether a power loss must not bring it back.
    """
    # Deleted in place, a checkpoint would be there with some files missing; after the rename no reader finds it. If the
    # deletion stops halfway, the next attempt's `begin` deletes the rest.
    trash = sibling(target, "trash", secrets.token_hex(4))
    try:
        rename(folder, trash)
    except FileNotFoundError:
        return
    if is_durable:
        sync(target.parent)
    with suppress(OSError):
        LocalFolder(trash.parent).remove_tree(trash.name)


def inode_of(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a directory, which tell it from a later one, or a link, at its path; None: nothing."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def locate(target: Path) -> Path:
    """Return the directory that holds the committed checkpoint ``target``.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointIncompleteError: There is data, but no commit marker.
    """
    with translate_errors("open the checkpoint", target):
        if (target / MANIFEST_NAME).exists():  # of any kind: if it is no file, it is damage, which its reader reports
            return target
        if target.is_dir() and any(target.iterdir()):
            raise CheckpointIncompleteError(
                f"{target} holds no finished checkpoint: {MANIFEST_NAME} is missing; the save did not complete, "
                "restore another one"
            )
        if old := _interrupted_exchange(target):
            return old
        # Not for each entry of a large directory that is no checkpoint: to look beside it takes as long as there are.
        hint = "; a save to it did not complete" if not target.exists() and siblings(target, "new") else ""
        raise CheckpointNotFoundError(f"there is no checkpoint at {target}{hint}")


class DirectoryTarget(CommitTarget):
    """The commit target of a path on a file system."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.folder = LocalFolder(where)

    @override
    def check_target(self, *, overwrite: bool) -> None:
        check_target(self.where, overwrite=overwrite)

    @override
    def locate(self) -> LocalFolder:
        return LocalFolder(locate(self.where))

    @override
    def begin(self, token: str) -> DirectoryAttempt:
        return DirectoryAttempt(begin(self.where, token))

    @override
    @contextmanager
    def resume(self, token: str) -> Iterator[DirectoryAttempt]:
        directory = begin_shared(self.where, token)
        with ExitStack() as stack:
            with translate_errors("lock the directory under construction", self.where):
                is_mine = stack.enter_context(lock_directory(directory.path))
            # The other process may also have committed, between the two lines above.
            if not is_mine or not is_own(directory):
                raise CheckpointConflictError(f"another process is copying to {self.where}; wait until it has ended")
            yield DirectoryAttempt(directory)

    @override
    def join(self, token: str) -> DirectoryAttempt:
        # A client that does not see the directory gets inode None here: `validate` raises, and `sweep` removes nothing.
        path = working_path(self.where, token)
        return DirectoryAttempt(WorkingDirectory(path, self.where, token, inode_of(path)))

    @override
    @contextmanager
    def pin(self) -> Iterator[None]:
        with ExitStack() as stack:
            # If nothing is there, the reader finds that out itself, and tells all clients.
            with suppress(OSError):
                stack.enter_context(lock_directory(locate(self.where), is_shared=True))
            yield

    @override
    def remove(self) -> None:
        folder = locate(self.where)
        with translate_errors("remove the checkpoint", self.where), lock_directory(folder) as is_free:
            if is_free:
                discard(folder, self.where, is_durable=True)


class DirectoryAttempt(CommitAttempt):
    """An attempt to save to a file system."""

    def __init__(self, directory: WorkingDirectory) -> None:
        self.token = directory.token
        self.folder = LocalFolder(directory.path.parent, directory.path.name)
        self._directory = directory
        # An open directory keeps its inode: late writes that make the same path again get another inode (see `sweep`).
        with suppress(FileNotFoundError):
            weakref.finalize(self, os.close, os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))

    @override
    @contextmanager
    def keep_alive(self) -> Iterator[None]:
        """As `CommitAttempt.keep_alive`: the directory's lock."""
        with lock_directory(self._directory.path):
            yield

    @override
    def validate(self, client: int) -> None:
        if not self._directory.path.is_dir():
            # The directory was there when the attempt began: a newer attempt has removed it.
            if self._directory.inode is not None:
                raise taken_over_error(self._directory.target)
            raise StorageError(
                f"client {client} does not see {self._directory.path}, which the leader made; every client must see "
                "one shared file system"
            )

    @override
    def commit(
        self, *, overwrite: bool, is_durable: bool = True, markers: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        commit(self._directory, overwrite=overwrite, is_durable=is_durable)
        # Not before: programs that look for them look into directories under construction, too.
        _write_markers(self._directory.target, markers, is_durable=is_durable)

    @override
    def is_taken_over(self) -> bool:
        with suppress(OSError):  # the caller has an error to report already
            return not is_own(self._directory)
        return False

    @override
    def abandon(self) -> None:
        abandon(self._directory)

    @override
    def sweep(self) -> None:
        sweep(self._directory.path, self._directory.target, self._directory.inode)
