"""Checkpoint directories on a file system: they appear whole, or not at all.

A save builds its directory beside the target, under a hidden name that carries the attempt's token, and moves it
into place when all is durable. Where a checkpoint is replaced, the two directories are exchanged in one step
(``renameat2`` with ``RENAME_EXCHANGE``); on file systems without it the old one steps aside first, under a name
that `locate` recognises, so a crash between the two renames still leaves the old checkpoint readable.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dtckpt.errors import CheckpointExistsError, CheckpointIncompleteError, CheckpointNotFoundError, StorageError
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.failures import translated

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def _sibling(target: Path, role: str, token: str) -> Path:
    return target.parent / f".{target.name}.dtckpt-{role}-{token}"


def _siblings(target: Path, role: str) -> list[Path]:
    prefix = f".{target.name}.dtckpt-{role}-"
    try:
        return sorted(entry for entry in target.parent.iterdir() if entry.name.startswith(prefix))
    except OSError:
        return []


def is_committed(folder: Path) -> bool:
    """Whether a directory holds a commit marker."""
    return (folder / MANIFEST_NAME).is_file()


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that may not be written.

    Raises:
        CheckpointExistsError: There is a checkpoint and ``overwrite`` is false, or something that is none.
    """
    with translated("look at the target", target):
        if not target.exists():
            if not overwrite and any(map(is_committed, _siblings(target, "old"))):
                raise CheckpointExistsError(
                    f"there is a checkpoint at {target} that was being replaced when its writer died; pass "
                    "overwrite=True to replace it, or save elsewhere"
                )
            return
        if is_committed(target):
            if not overwrite:
                raise CheckpointExistsError(
                    f"there is a checkpoint at {target} already; pass overwrite=True to replace it, or save elsewhere"
                )
        elif not target.is_dir() or any(target.iterdir()):
            raise CheckpointExistsError(
                f"{target} exists and is not a checkpoint; it is left alone: remove it, or save elsewhere"
            )


def begin(target: Path, token: str) -> Path:
    """Make the directory under construction; return its path. Called by the leader.

    Attempts at the same target that are still under construction are removed: the newest attempt owns the target,
    and one that was given up but still runs has nothing left to move into place.
    """
    staging = _sibling(target, "new", token)
    with translated("create the checkpoint directory", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in _siblings(target, "new"):
            remove(leftover)
        staging.mkdir()
    return staging


def staging_path(target: Path, token: str) -> Path:
    """Return where the attempt ``token`` builds its checkpoint."""
    return _sibling(target, "new", token)


def commit(staging: Path, target: Path, token: str, *, overwrite: bool, is_durable: bool = True) -> None:
    """Move a finished directory into place; the one step that makes it the checkpoint. Called by the leader.

    Raises:
        CheckpointExistsError: Something took the target meanwhile.
        StorageError: The directory under construction is gone: another attempt took over.
    """
    with translated("commit the checkpoint", target):
        if not is_committed(staging):
            raise StorageError(f"cannot commit {target}: {staging.name} is gone; another attempt saves to this path")
        if is_durable:
            _sync_tree(staging)
        if not target.exists():
            _rename(staging, target, _RENAME_NOREPLACE)
        else:
            check_target(target, overwrite=overwrite)
            _replace(staging, target, _sibling(target, "old", token))
        if is_durable:
            _sync(target.parent)
    for leftover in _siblings(target, "old"):
        remove(leftover)


def write_file(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Write a new file whole."""
    with translated("write", path), open(path, "wb") as file:
        file.write(data)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Remove a directory that is no checkpoint any more, the commit marker first."""
    # Without its marker a half-removed directory cannot pass for a checkpoint.
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def locate(target: Path) -> Path:
    """Return the directory that holds the committed checkpoint ``target``.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointIncompleteError: There is data, but no commit marker.
    """
    with translated("open the checkpoint", target):
        if is_committed(target):
            return target
        if target.is_dir() and any(target.iterdir()):
            raise CheckpointIncompleteError(
                f"{target} holds no finished checkpoint: {MANIFEST_NAME} is missing; the save did not complete, "
                "restore another one"
            )
        for old in _siblings(target, "old"):
            # A crash between the two renames of a replacement left the old checkpoint here.
            if not target.exists() and is_committed(old):
                return old
        hint = "; a save to it did not complete" if _siblings(target, "new") else ""
        raise CheckpointNotFoundError(f"there is no checkpoint at {target}{hint}")


def _replace(staging: Path, target: Path, old: Path) -> None:
    try:
        _rename(staging, target, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        target.rename(old)
        staging.rename(target)
    else:
        staging.rename(old)


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


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder in _folders(root):
        _sync(folder)


def _folders(root: Path) -> Iterator[Path]:
    for path, _, _ in os.walk(root, topdown=False):
        yield Path(path)
