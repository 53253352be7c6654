"""Measures the disk space of a directory: its own, and the space of files that other directories share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dtckpt.storage.fsync import walk_folders

_BLOCK_NBYTES = 512
"""The unit of ``st_blocks``, whatever the file system."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The disk space of a directory, as ``du`` counts it.

    Args:
        own_nbytes: Bytes that are free again once the directory is removed.
        shared_nbytes: Bytes of files that have other names, too, such as in other checkpoints.
    """

    own_nbytes: int
    shared_nbytes: int


def disk_usage(folder: Path) -> DiskUsage:
    """Measure a directory with everything below it.

    Raises:
        OSError: A directory cannot be read.
    """
    own = shared = 0
    for path in walk_folders(folder):
        own += path.lstat().st_blocks
        with os.scandir(path) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    continue
                if found.st_nlink > 1:
                    shared += found.st_blocks
                else:
                    own += found.st_blocks
    return DiskUsage(own * _BLOCK_NBYTES, shared * _BLOCK_NBYTES)
