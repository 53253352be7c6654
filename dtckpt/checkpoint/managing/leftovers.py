"""Find and remove the directories that dead attempts left beside the checkpoints; live attempts keep theirs.

The leader of an attempt holds the lock of the directory that it builds (`dtckpt.storage.directory_lock`), so on one
host a free lock means that the leader is dead. Some file systems do not share locks between hosts; there the age tells:
a live attempt changes something in its directory at least once per barrier timeout. A directory is removed only if it
is both unlocked and old.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dtckpt.storage import commit_by_rename
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

_WORKING_NAME = re.compile(r"\.(?P<target>.+)\.dtckpt-(?P<role>new|old|trash)-(?P<token>[^/]*)", re.DOTALL)


def interrupted_exchanges(root: Path) -> set[str]:
    """Return the names of the checkpoints whose replacement stopped half-way: nothing has their names."""
    return {
        match["target"]
        for _, match in _working(root)
        if match["role"] == "old" and commit_by_rename.is_interrupted_exchange(root / match["target"], match["token"])
    }


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files that one attempt to save has beside the checkpoints. The attempt may still be under way.

    Args:
        name: The checkpoint that it belongs to.
        where: Its path or URL.
        is_dead: Whether it can be removed.
        since_s: When something in it changed last, in seconds since the epoch.
        nbytes: Bytes in it; None where storage does not tell.
        holder: The process that writes it, if it is known and the attempt may be under way.
    """

    name: str
    where: Location
    is_dead: bool
    since_s: float
    nbytes: int | None = None
    holder: str = ""


def find_leftovers(root: Path, *, min_age_s: float, now: float) -> list[Leftover]:
    """Return the files that attempts to save have in a directory.

    Args:
        root: The directory that the checkpoints are in.
        min_age_s: Seconds without a change after which an attempt can count as dead.
        now: Seconds since the epoch.
    """
    found = []
    for folder, match in _working(root):
        # An attempt may end at any moment. Then its folder is removed, or is a checkpoint.
        with suppress(FileNotFoundError):
            # The owner of a trash directory may be deleting it at this moment; that both delete does no harm.
            is_dead = match["role"] == "trash" or _is_dead(folder, match, min_age_s, now)
            since_s, nbytes = _last_change(folder)
            found.append(Leftover(match["target"], folder, is_dead, since_s, nbytes))
    return found


def collect_leftovers(root: Path, *, min_age_s: float, now: float) -> list[Path]:
    """Remove the leftovers of dead attempts in a directory; attempts that live are not touched.

    Args:
        root: The directory that the checkpoints are in.
        min_age_s: Seconds without a change after which an attempt can count as dead.
        now: Seconds since the epoch.

    Returns:
        The directories that were removed.
    """
    collected = []
    for folder, match in list(_working(root)):
        target = root / match["target"]
        try:
            if match["role"] != "trash" and not _is_dead(folder, match, min_age_s, now):
                continue
            commit_by_rename.discard(folder, target, is_durable=True)
        except OSError as error:
            logger.warning("cannot take away %s: %s", folder, error)
        else:
            collected.append(folder)
    return collected


def _working(root: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for entry in sorted(root.iterdir()):
        match = _WORKING_NAME.fullmatch(entry.name)
        if match:
            yield entry, match


def _is_dead(folder: Path, match: re.Match[str], min_age_s: float, now: float) -> bool:
    if commit_by_rename.is_interrupted_exchange(folder.with_name(match["target"]), match["token"]):
        return False  # readers open the old directory, and the next save completes the replacement
    if now - _last_change(folder)[0] < min_age_s:
        return False
    if not _is_directory(folder):
        return True  # no attempt builds a file or a link
    with lock_directory(folder) as is_free:
        return is_free


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _last_change(folder: Path) -> tuple[float, int]:
    """Return when something in a directory changed last, and the bytes of its files. Links are not followed."""
    since_s, nbytes = folder.lstat().st_mtime, 0
    pending = [str(folder)] if _is_directory(folder) else []
    while pending:  # not by recursion: a stranger's directories may be deeper than Python's stack
        # A save that is under way removes files; to remove one changes its folder, too.
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    since_s = max(since_s, status.st_mtime)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        nbytes += status.st_size
    return since_s, nbytes
