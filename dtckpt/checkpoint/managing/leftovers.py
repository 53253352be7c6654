"""Finds and removes what dead attempts have left beside the checkpoints, and tells them from attempts that live.

An attempt holds the lock of the directory that it builds (`dtckpt.storage.directory_lock`), so on one host a free lock
means that its leader is dead. Where locks do not reach from host to host, age tells: a live attempt changes
something there at least once per barrier timeout. Both must say so before anything is taken away.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dtckpt.errors import CheckpointIncompleteError, CheckpointNotFoundError
from dtckpt.storage import commit_by_rename
from dtckpt.storage.directory_lock import lock_directory

logger = logging.getLogger("dtckpt.checkpoint")

_WORKING_NAME = re.compile(r"\.(?P<target>.+)\.dtckpt-(?P<role>new|old|trash)-[^/]*", re.DOTALL)


def targets_of_leftovers(root: Path) -> set[str]:
    """Return the names of the checkpoints that directories under construction, or replaced ones, belong to."""
    return {match["target"] for _, match in _working(root)}


def collect_leftovers(root: Path, *, min_age_s: float, now: float) -> list[Path]:
    """Take away what dead attempts left under a directory; attempts that live are not touched.

    Args:
        root: The directory that the checkpoints are in.
        min_age_s: How long an attempt has changed nothing before it can count as dead.
        now: Seconds since the epoch.

    Returns:
        What was taken away.
    """
    collected = []
    for folder, match in list(_working(root)):
        target = root / match["target"]
        try:
            # What is trash its owner may be deleting; then both do.
            if match["role"] != "trash" and not _is_dead(folder, target, min_age_s, now):
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
        if match and entry.is_dir():
            yield entry, match


def _is_dead(folder: Path, target: Path, min_age_s: float, now: float) -> bool:
    try:
        if commit_by_rename.locate(target) != target:
            return False  # a replacement that stopped half-way: readers take the old one, the next save completes it
    except (CheckpointNotFoundError, CheckpointIncompleteError):
        pass
    if now - _last_change(folder) < min_age_s:
        return False
    with lock_directory(folder) as is_free:
        return is_free


def _last_change(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for path, _, files in os.walk(folder):
        times.extend(os.stat(Path(path, name)).st_mtime for name in ("", *files))
    return max(times)
