"""`open_checkpoint`: find a checkpoint of any format at a path, or in the memory of a job, and open it."""

from __future__ import annotations

from typing import TypeVar

from dtckpt.checkpoint.foreign.formats import has_foreign_name, not_understood, open_foreign
from dtckpt.checkpoint.live.versions import is_live
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.manifest_files import ManifestFiles
from dtckpt.errors import (
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
)
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, Manifest
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.location import Location, is_remote, location_of

T = TypeVar("T")


def open_checkpoint(path: str | Location) -> Checkpoint:
    """Open a checkpoint: a committed one of this library, or one of another library.

    The formats of other libraries in `dtckpt.checkpoint.foreign.formats.FORMATS` are read without a conversion. Their
    path leads to a file or directory. No program may change their files meanwhile.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format at the path.
        CheckpointIncompleteError: There is data, but the save did not complete.
        CheckpointVersionError: A newer version of dtckpt wrote the checkpoint, or it has a dtype that is not known.
        CheckpointCorruptError: Its manifest or index is damaged.
        StoragePermissionError: The checkpoint may not be read.
    """
    location = location_of(path)
    if is_live(location):
        # Here, because few programs need it, and it imports PyTorch and the coordinator's client.
        from dtckpt.checkpoint.live.version_choice import open_live

        return open_live(location)
    place = commit_target_of(location)

    def reopen() -> Checkpoint:
        return open_checkpoint(location)

    # Storage without directories tells at once whether a file of such a name is there, and our own after some look-ups.
    if has_foreign_name(place.where) and (files := open_foreign(place.where)) is not None:
        return Checkpoint(place.where, files, reopen)
    # A save may replace the checkpoint between the look-up and the read; then the second look-up finds the new one.
    for is_last in (False, True):
        try:
            folder = place.locate()
        except (CheckpointNotFoundError, CheckpointIncompleteError) as error:
            if (files := open_foreign(place.where)) is None:
                raise not_understood(place.where, error) from None
            return Checkpoint(place.where, files, reopen)
        try:
            with translate_errors("read the manifest", folder, is_read=True):
                data = folder.read_whole(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
            manifest = Manifest.from_bytes(data, f"{folder}/{MANIFEST_NAME}")
            own = ManifestFiles(place.where, folder, manifest, is_remote=is_remote(place.where))
            return Checkpoint(place.where, own, reopen)
        except CheckpointError:
            # Still the same folder: the error is about this checkpoint, and another try would give it again.
            if is_last or str(place.locate()) == str(folder):
                raise
    # Not reached: the last try returns or raises.
    raise CheckpointNotFoundError(f"there is no checkpoint at {place.where}")
