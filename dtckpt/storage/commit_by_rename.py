"""Checkpoint directories on a file system: they appear whole, or not at all.

A save builds its directory beside the target, under a hidden name that carries the attempt's token, and moves it
into place when all is durable. Where a checkpoint is replaced, the two directories are exchanged in one step
(``renameat2`` with ``RENAME_EXCHANGE``); on file systems without it the old one steps aside first, and the pair of
names that a crash leaves then tells `locate` what happened.

Two leaders may be at work on one target: one that was given up but still runs, and its successor. So directories are
only ever taken away by a rename, never emptied where they stand, and a leader commits the very directory that it
made, by inode: one that was taken away, or made anew by a late writer, is not committed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtckpt.comm.background_threads import Pool
from dtckpt.errors import (
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    ConfigError,
)
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.directory_lock import locked
from dtckpt.storage.failures import taken_over, translated

logger = logging.getLogger("dtckpt.storage")

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_SYNCS = 8
"""Files that are put on the disk at a time."""
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_WORKING_NAME = re.compile(r"\..+\.dtckpt-(new|old|trash)-.*", re.DOTALL)


def _sibling(target: Path, role: str, token: str) -> Path:
    return target.parent / f".{target.name}.dtckpt-{role}-{token}"


def _siblings(target: Path, role: str) -> list[Path]:
    prefix = f".{target.name}.dtckpt-{role}-"
    try:
        return sorted(entry for entry in target.parent.iterdir() if entry.name.startswith(prefix))
    except OSError:
        return []


def _interrupted_exchange(target: Path) -> Path | None:
    """Return where the old checkpoint stands if its replacement stopped between two renames.

    Only then do the old and the new directory of one attempt stand side by side while the target is missing.
    """
    if not target.exists():
        for old in _siblings(target, "old"):
            token = old.name.rpartition("-old-")[2]
            if is_committed(old) and is_committed(_sibling(target, "new", token)):
                return old
    return None


def validate_name(target: Path) -> None:
    """Refuse a target whose name would pass for a working directory of another one.

    Raises:
        ConfigError: It has such a name.
    """
    if _WORKING_NAME.fullmatch(target.name):
        raise ConfigError(
            f"{target} cannot be a checkpoint: names like that are those of saves under way; choose another"
        )


def is_committed(folder: Path) -> bool:
    """Whether a directory holds a commit marker."""
    return (folder / MANIFEST_NAME).is_file()


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that may not be written.

    Raises:
        CheckpointExistsError: There is a checkpoint and ``overwrite`` is false, or something that is none.
    """
    with translated("look at the target", target):
        if is_committed(target) or _interrupted_exchange(target):
            if not overwrite:
                raise CheckpointExistsError(
                    f"there is a checkpoint at {target} already; pass overwrite=True to replace it, or save elsewhere"
                )
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointExistsError(
                f"{target} exists and is not a checkpoint; it is left alone: remove it, or save elsewhere"
            )


@dataclass(frozen=True, slots=True)
class Staging:
    """A directory under construction, as the leader that made it knows it."""

    path: Path
    target: Path
    token: str
    inode: tuple[int, int] | None


def begin(target: Path, token: str) -> Staging:
    """Make the directory under construction. Called by the leader.

    Attempts at the same target that are still under construction are taken away: the newest attempt owns the target,
    and one that was given up but still runs has nothing left to move into place. The newest is the last to begin; but
    a process that lives and whose attempt has a higher number is a newer one, whenever this one gets here.

    Raises:
        StorageError: A newer attempt is under construction.
    """
    path = staging_path(target, token)
    with translated("create the checkpoint directory", target):
        make_folder(target.parent)
        others = _siblings(target, "new")
        if any(_number(other, target) > _number(path, target) and _is_alive(other) for other in others):
            raise taken_over(target)
        if old := _interrupted_exchange(target):
            old.rename(target)
        leftovers, trash = (*others, *_siblings(target, "old")), _siblings(target, "trash")
        if leftovers or trash:
            _sync(target.parent)  # one of them may be the old checkpoint, of an attempt that died before it had synced
        for leftover in leftovers:
            discard(leftover, target)
        for folder in trash:
            shutil.rmtree(folder, ignore_errors=True)
        path.mkdir()
        return Staging(path, target, token, identity(path))


def _number(staging: Path, target: Path) -> int:
    """Return which attempt of its job builds a directory."""
    number = staging.name.removeprefix(_sibling(target, "new", "").name).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _is_alive(staging: Path) -> bool:
    try:
        with locked(staging, is_shared=True) as is_free:
            return not is_free
    except OSError:  # gone, or nothing that a leader could have locked
        return False


def share(target: Path, token: str) -> Staging:
    """Make the directory under construction, or find it: for writers that all begin, and all may commit.

    What other attempts at the target are building is left alone; the first that commits wins.
    """
    path = staging_path(target, token)
    with translated("create the checkpoint directory", target):
        make_folder(target.parent)
        path.mkdir(exist_ok=True)
        return Staging(path, target, token, identity(path))


def make_folder(folder: Path) -> None:
    """Make a directory and its parents, durably: a power loss would take all that is saved there along."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def staging_path(target: Path, token: str) -> Path:
    """Return where the attempt ``token`` builds its checkpoint."""
    return _sibling(target, "new", token)


def commit(staging: Staging, *, overwrite: bool, is_durable: bool = True) -> None:
    """Move a finished directory into place; the one step that makes it the checkpoint. Called by the leader.

    Raises:
        CheckpointExistsError: Something took the target meanwhile.
        StorageError: The directory under construction was taken away: another attempt took over.
    """
    target = staging.target
    with translated("commit the checkpoint", target):
        if is_durable:
            sync_all(folders_in(staging.path))
        _validate_own(staging, staging.path)
        aside = None
        if not target.exists():
            _rename(staging.path, target, _RENAME_NOREPLACE)
            if identity(target) != staging.inode:
                discard(target, target)
                raise taken_over(target)
        else:
            check_target(target, overwrite=overwrite)
            aside = _replace(staging)
        if is_durable:
            _sync(target.parent)  # before the old one goes: a disk need not keep changes of two directories in order
    if aside is not None:
        with _tolerated(aside):
            discard(aside, target)


def _validate_own(staging: Staging, path: Path) -> None:
    if identity(path) != staging.inode or not is_committed(path):
        raise taken_over(staging.target)


def _replace(staging: Staging) -> Path:
    """Put the directory in the place of the old checkpoint; return where that stands now."""
    target, aside = staging.target, _sibling(staging.target, "old", staging.token)
    try:
        _rename(staging.path, target, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        target.rename(aside)
        try:
            _validate_own(staging, staging.path)
            staging.path.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        return aside
    if identity(target) != staging.inode:
        _rename(staging.path, target, _RENAME_EXCHANGE)
        raise taken_over(staging.target)
    return staging.path


def is_own(staging: Staging) -> bool:
    """Whether the directory is the one that was begun with."""
    return identity(staging.path) == staging.inode


def abandon(staging: Staging) -> None:
    """Take an attempt's directory away, if it still stands."""
    with _tolerated(staging.path):
        if is_own(staging):
            discard(staging.path, staging.target)


def sweep(path: Path, target: Path, known: tuple[int, int] | None) -> None:
    """Take away what writes that came late have made anew where an attempt's directory was.

    Args:
        path: The attempt's directory.
        target: Its target.
        known: `identity` of the directory that the attempt began with, which is its leader's to take away.
    """
    with _tolerated(path):
        if known is not None and identity(path) not in (None, known):
            # Or it is the old checkpoint, whose leader died as soon as it had replaced it.
            discard(path, target, is_durable=True)


@contextmanager
def _tolerated(folder: Path) -> Iterator[None]:
    """For when it is known how the save went: what cannot be taken away now, the next one takes away."""
    try:
        yield
    except OSError as error:
        logger.warning("cannot take away %s: %s", folder, error)


def discard(folder: Path, target: Path, *, is_durable: bool = False) -> None:
    """Take a directory away in one step, for good if ``is_durable``; then delete it."""
    trash = _sibling(target, "trash", secrets.token_hex(4))
    try:
        folder.rename(trash)
    except FileNotFoundError:
        return
    if is_durable:
        _sync(target.parent)
    shutil.rmtree(trash, ignore_errors=True)


def identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a directory from another that takes its place; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def locate(target: Path) -> Path:
    """Return the directory that holds the committed checkpoint ``target``.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointIncompleteError: There is data, but no commit marker.
    """
    with translated("open the checkpoint", target):
        if (target / MANIFEST_NAME).exists():  # of whatever kind: what is no file is damage, and told by who reads it
            return target
        if target.is_dir() and any(target.iterdir()):
            raise CheckpointIncompleteError(
                f"{target} holds no finished checkpoint: {MANIFEST_NAME} is missing; the save did not complete, "
                "restore another one"
            )
        if old := _interrupted_exchange(target):
            return old
        hint = "; a save to it did not complete" if _siblings(target, "new") else ""
        raise CheckpointNotFoundError(f"there is no checkpoint at {target}{hint}")


def _rename(source: Path, target: Path, flag: int) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
            return
        code = ctypes.get_errno()
    if flag == _RENAME_NOREPLACE and code in _UNSUPPORTED:
        source.rename(target)
        return
    raise OSError(code, os.strerror(code), str(target))


def folders_in(folder: Path) -> Iterator[Path]:
    """Yield a directory and all below it, as far as nobody takes them away.

    Raises:
        OSError: One cannot be read.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return (Path(path) for path, _, _ in os.walk(folder, onerror=fail))


def sync_all(paths: Iterable[Path]) -> None:
    """Put files and directories on the disk, several at a time, which file systems do in one go."""
    with Pool(_SYNCS, "dtckpt-sync") as pool:
        for _ in pool.map(_sync, paths):
            pass


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
