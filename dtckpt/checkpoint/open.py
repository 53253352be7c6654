"""`open_checkpoint`: find a checkpoint of any format at a path, or in the memory of a job, and open it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dtckpt.checkpoint.foreign.formats import beside_own, has_foreign_name, not_understood, open_foreign
from dtckpt.checkpoint.live.versions import is_live
from dtckpt.checkpoint.mapping.map_rules import TensorMap
from dtckpt.checkpoint.mapping.map_sizes import CONFIG, MAX_CONFIG_NBYTES, known_sizes
from dtckpt.checkpoint.mapping.mapped_files import MappedFiles
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.manifest_files import ManifestFiles
from dtckpt.checkpoint.signing.keys import KeySource
from dtckpt.checkpoint.signing.signed_folder import open_signed
from dtckpt.errors import (
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointUntrustedError,
    ConfigError,
)
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, Manifest
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder, open_folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.location import Location, is_remote, location_of
from dtckpt.storage.url import Url

T = TypeVar("T")
MapLike = TensorMap | str | os.PathLike[str]
"""A map of tensors, or the source of one, as for `dtckpt.TensorMap.load`."""


def open_checkpoint(
    path: str | Location,
    *,
    map: MapLike | None = None,  # noqa: A002  (as an option)
    trusted_keys: Sequence[KeySource] = (),
) -> Checkpoint:
    """Open a checkpoint: a committed one of this library, or one of another library.

    The formats of other libraries in `dtckpt.checkpoint.foreign.formats.FORMATS` are read without a conversion. Their
    path leads to a file or directory. No program may change their files meanwhile.

    Args:
        path: Its path or URL.
        map: Rules for other names and shapes of its tensors (docs/convert.md).
        trusted_keys: Public keys, PEM files or their bytes, of which one must have signed the checkpoint
            (`dtckpt.sign`). Then every byte that is read is compared with the signed digests.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format at the path.
        CheckpointIncompleteError: There is data, but the save did not complete.
        CheckpointVersionError: A newer version of dtckpt wrote the checkpoint, or it has a dtype that is not known.
        CheckpointCorruptError: Its manifest or index is damaged.
        CheckpointUntrustedError: No trusted key has signed it, or it was changed after that.
        StoragePermissionError: The checkpoint may not be read.
        ConfigError: The map cannot be used. If it does not fit the tensors: `TensorNotFoundError`,
            `ShapeMismatchError`, or another `CheckpointError`.
    """
    location = location_of(path)
    if map is not None and is_live(location):
        raise _not_stored(location)
    return mapped(_open(location, trusted_keys), map)


def mapped(checkpoint: Checkpoint, map: MapLike | None) -> Checkpoint:  # noqa: A002  (as an option)
    """Return an open checkpoint under the names and shapes of a map, if there is one. Raises: as `open_checkpoint`."""
    if map is None:
        return checkpoint
    try:
        if type(checkpoint) is not Checkpoint:
            raise _not_stored(checkpoint.path)
        rules = map if isinstance(map, TensorMap) else TensorMap.load(map)
        files = MappedFiles(checkpoint.files, rules, known_sizes(checkpoint.values, _read_config(checkpoint.path)))
    except BaseException:
        checkpoint.close()
        raise
    reopen = checkpoint.reopen
    again = None if reopen is None else lambda: mapped(reopen(), rules)
    return Checkpoint(checkpoint.path, files, again, checkpoint.signed)


def _not_stored(where: Location) -> ConfigError:
    return ConfigError(f"maps are for checkpoints on storage; got {where}, which is in memory; save it first")


def _read_config(where: Location) -> Any:
    """Return the configuration of a model that lies beside a checkpoint's files; None if there is none to be read."""
    is_file = where.is_file() if isinstance(where, Path) else has_foreign_name(where)
    place = where.parent if is_file else where
    folder: Folder = open_folder(place) if isinstance(place, Url) else LocalFolder(place)
    with suppress(OSError, MalformedError, ValueError, RecursionError):
        return json.loads(folder.read_whole(CONFIG, MAX_CONFIG_NBYTES))
    return None


def _open(location: Location, trusted_keys: Sequence[KeySource]) -> Checkpoint:
    if is_live(location):
        _refuse_unsigned(location, trusted_keys)
        # Here, because few programs need it, and it imports PyTorch and the coordinator's client.
        from dtckpt.checkpoint.live.version_choice import open_live

        return open_live(location)
    place = commit_target_of(location)

    def reopen() -> Checkpoint:
        return _open(location, trusted_keys)

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
            own = ManifestFiles(place.where, source, manifest, is_remote=is_remote(place.where))
            own.unread = beside_own(folder)
            return Checkpoint(place.where, own, reopen, signed)
        except CheckpointError:
            # Still the same folder: the error is about this checkpoint, and another try would give it again.
            if is_last or str(place.locate()) == str(folder):
                raise
    # Not reached: the last try returns or raises.
    raise CheckpointNotFoundError(f"there is no checkpoint at {place.where}")


def _refuse_unsigned(where: Location, trusted_keys: Sequence[KeySource]) -> None:
    """Refuse a checkpoint that no key can have signed, if a trusted key is asked for."""
    if trusted_keys:
        raise CheckpointUntrustedError(
            f"{where} is no checkpoint that dtckpt sign has signed; convert and sign it first"
        )
