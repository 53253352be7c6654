"""`open_checkpoint`: find a checkpoint of any format at a path, or in the memory of a job, and open it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dtckpt.checkpoint.foreign.formats import has_foreign_name, not_understood, open_foreign
from dtckpt.checkpoint.live.versions import is_live
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.manifest_files import ManifestFiles
from dtckpt.checkpoint.signing.keys import KeySource
from dtckpt.checkpoint.signing.signed_folder import open_signed
from dtckpt.errors import (
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointUntrustedError,
)
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, Manifest
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.location import Location, is_remote, location_of

T = TypeVar("T")


def open_checkpoint(path: str | Location, *, trusted_keys: Sequence[KeySource] = ()) -> Checkpoint:
    """Open a checkpoint: a committed one of this library, or one of another library.

    The formats of other libraries in `dtckpt.checkpoint.foreign.formats.FORMATS` are read without a conversion. Their
    path leads to a file or directory. No program may change their files meanwhile.

    Args:
        path: The checkpoint.
        trusted_keys: Public keys, PEM files or their bytes, of which one must have signed the checkpoint
            (`dtckpt.sign`). Then every byte that is read is compared with the signed digests.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format at the path.
        CheckpointIncompleteError: There is data, but the save did not complete.
        CheckpointVersionError: A newer version of dtckpt wrote the checkpoint, or it has a dtype that is not known.
        CheckpointCorruptError: Its manifest or index is damaged.
        CheckpointUntrustedError: No trusted key has signed it, or it was changed after that.
        StoragePermissionError: The checkpoint may not be read.
    """
    location = location_of(path)
    if is_live(location):
        _refuse_unsigned(location, trusted_keys)
        # Here, because few programs need it, and it imports PyTorch and the coordinator's client.
        from dtckpt.checkpoint.live.version_choice import open_live

        return open_live(location)
    place = commit_target_of(location)

    def reopen() -> Checkpoint:
        return open_checkpoint(location, trusted_keys=trusted_keys)

    # Storage without directories tells at once whether a file of such a name is there, and our own after some look-ups.
    if has_foreign_name(place.where) and (files := open_foreign(place.where)) is not None:
        _refuse_unsigned(location, trusted_keys)
        return Checkpoint(place.where, files, reopen)
    # A save may replace the checkpoint between the look-up and the read; then the second look-up finds the new one.
    for is_last in (False, True):
        try:
            folder = place.locate()
        except (CheckpointNotFoundError, CheckpointIncompleteError) as error:
            if (files := open_foreign(place.where)) is None:
                raise not_understood(place.where, error) from None
            _refuse_unsigned(location, trusted_keys)
            return Checkpoint(place.where, files, reopen)
        try:
            signed = open_signed(location, folder, trusted_keys) if trusted_keys else None
            source = signed or folder
            with translate_errors("read the manifest", folder, is_read=True):
                data = source.read_whole(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
            manifest = Manifest.from_bytes(data, f"{folder}/{MANIFEST_NAME}")
            # Signed bytes are read by the folder, as bytes of other storage are; never straight from a local file.
            is_elsewhere = signed is not None or is_remote(place.where)
            own = ManifestFiles(place.where, source, manifest, is_remote=is_elsewhere)
            return Checkpoint(place.where, own, reopen, signed)
        except CheckpointError:
            # Still the same folder: the error is about this checkpoint, and another try would give it again.
            if is_last or str(place.locate()) == str(folder):
                raise
    # Not reached: the last try returns or raises.
    raise CheckpointNotFoundError(f"there is no checkpoint at {place.where}")


def _refuse_unsigned(where: Location, trusted_keys: Sequence[KeySource]) -> None:
    """Refuse what no key can have signed, if a trusted key is asked for."""
    if trusted_keys:
        raise CheckpointUntrustedError(
            f"{where} is no checkpoint that dtckpt sign has signed; convert and sign it first"
        )
