"""Files that appear at their path whole, or not at all: built beside it under a hidden name, and renamed when durable.

For the files of other libraries, which have no commit marker; `dtckpt.storage.commit` commits the checkpoints of this
library. A crash leaves a hidden directory, which the next writer to that path removes.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtckpt.errors import CheckpointExistsError, StorageError, StorageFullError, capped, format_nbytes
from dtckpt.storage.commit_by_rename import discard, is_committed, sibling, siblings
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.fsync import sync
from dtckpt.storage.local_folder import EXCHANGE, NO_REPLACE, UNSUPPORTED, LocalFolder, make_folders, rename


def check_new(
    target: Path, is_own: Callable[[Path], bool], *, is_file: bool, overwrite: bool, advice: str = "overwrite=True"
) -> None:
    """Check that new files may be put at a path.

    Args:
        target: The path.
        is_own: Whether an entry of a directory may be replaced.
        is_file: Whether the path will be a file, not a directory.
        overwrite: Whether a checkpoint there may be replaced.
        advice: How the caller's user says so.

    Raises:
        CheckpointExistsError: There is a checkpoint and ``overwrite`` is false, or something else.
    """
    with translate_errors("look at the target", target):
        if not target.exists() or (target.is_dir() and not any(target.iterdir()) and not is_file):
            return
        others = [] if target.is_file() else sorted(each.name for each in target.iterdir() if not is_own(each))
        if target.is_file() != is_file or (others and not is_committed(target)):
            holds = f": it holds {capped(others)}" if others else ""
            raise CheckpointExistsError(
                f"{target} is there already and is left alone{holds}; remove it, or choose another destination"
            )
        if not overwrite:
            raise CheckpointExistsError(
                f"there is something at {target} already; pass {advice} to replace it, or choose another destination"
            )


@contextmanager
def new_files(target: Path, check: Callable[[], None], *, is_file: bool) -> Iterator[Path]:
    """Make a directory for files in a context, and put them at a path when it ends without an error.

    The files must be durable by then.

    Args:
        target: The path.
        check: Called right before; raises if there is something that may not be replaced.
        is_file: Whether the one file in the directory, of the path's own name, is put there, and not the directory.

    Yields:
        The directory.

    Raises:
        StorageError: Storage refused, or cannot replace a directory in one step.
    """
    folder = sibling(target, "new", f"convert-{secrets.token_hex(4)}")
    with translate_errors("create the new files", target):
        make_folders(target.parent)
        _remove_leftovers(target)
        LocalFolder(target.parent, folder.name).make(exist_ok=False)
    try:
        with lock_directory(folder):
            yield folder
            check()
            with translate_errors("put the new files in place", target):
                _place(folder / target.name if is_file else folder, target)
                # Before the old files are deleted: a disk need not keep changes of two directories in order.
                sync(target.parent)
    finally:
        # The folder holds the old files after an exchange, and the unfinished new files after a failure.
        with suppress(OSError):
            discard(folder, target)


def validate_free_space(folder: Path, nbytes: int) -> None:
    """Check that so many bytes fit into a directory, before the first of them is written.

    Raises:
        StorageFullError: The bytes do not fit.
    """
    with translate_errors("look at the target", folder.parent):
        free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise StorageFullError(
            f"the new files do not fit into {folder.parent}: {format_nbytes(free)} are free, and "
            f"{format_nbytes(nbytes)} are needed; free space, or choose another destination"
        )


def _remove_leftovers(target: Path) -> None:
    """Remove the hidden directories of writers that died."""
    for leftover in siblings(target, "new"):
        # Another process may remove it, too.
        with suppress(OSError), lock_directory(leftover) as is_free:
            if is_free:
                discard(leftover, target)


def _place(source: Path, target: Path) -> None:
    if not target.exists():
        # Another process may put a file there after this look: then the rename fails, and replaces nothing.
        rename(source, target, NO_REPLACE)
    elif source.is_file():
        rename(source, target)
    else:
        try:
            rename(source, target, EXCHANGE)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            raise StorageError(
                f"{target} cannot be replaced in one step on this file system; remove it first, or choose another "
                "destination"
            ) from error
