"""`sign`: digest all files of a checkpoint while they are verified, and sign the digests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dtckpt.checkpoint.copying.chunk_places import ChunkPlaces, read_manifest, validate_rest
from dtckpt.checkpoint.signing.keys import KeySource, key_id, private_key
from dtckpt.checkpoint.signing.statement import (
    MAX_SIGNATURE_NBYTES,
    SIGNATURE_NAME,
    BlockHasher,
    Envelope,
    SignedFile,
    SignedFiles,
    best_algorithm,
    block_nbytes_of,
    signed_message,
)
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointConflictError, CheckpointCorruptError, ConfigError
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_by_decision import MARKER_NAMES
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.location import Location, location_of
from dtckpt.storage.whole_files import WholeFile, list_files, open_ranges, replace_file

NUM_THREADS = 4
"""Files that are digested at one time."""


@dataclass(frozen=True, slots=True)
class SignReport:
    """The result of `dtckpt.sign`.

    Args:
        path: The checkpoint.
        key: The id of the key.
        num_files: Files that the signature covers.
        nbytes: Their bytes.
        num_signatures: Signatures that the checkpoint has now.
        seconds: The time that it took.
    """

    path: Location
    key: str
    num_files: int
    nbytes: int
    num_signatures: int
    seconds: float


def sign(
    path: str | Location, key: KeySource, *, progress: Callable[[str, int], object] = lambda _name, _nbytes: None
) -> SignReport:
    """Sign a checkpoint with an Ed25519 key; the signature is the file ``dtckpt.signature`` in it. Local.

    The signature covers the manifest and all other files, by BLAKE3 digests, or SHA-256 without the package ``blake3``.
    The same bytes are verified by the manifest's digests at the same time, so a damaged checkpoint is not signed.
    Signatures of other keys stay, and their algorithm of digests.

    Args:
        path: The checkpoint.
        key: The private key: a PEM file, or its bytes.
        progress: Called with a file's name and the bytes of it that were digested since the last call.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of dtckpt.
        CheckpointCorruptError: The checkpoint is damaged.
        CheckpointConflictError: A save replaced it meanwhile.
        ConfigError: The key cannot be used, or another signature's digests need a package that is not installed.
        StorageError: Storage refused.
    """
    start = time.monotonic()
    own = private_key(key)
    where = location_of(path)
    place = commit_target_of(where)
    with place.pin():
        folder: Folder = place.locate()
        if isinstance(folder, LocalFolder):
            with translate_errors("open the checkpoint", where):
                folder = folder.hold(follow=False)  # this very directory, if a save replaces it meanwhile
        former = _signature_in(folder)
        algorithm = _algorithm_of(former)
        signed = digest_files(where, folder, progress, algorithm)
        payload = signed.to_bytes()
        name = key_id(own.public_key())
        others = former.signatures if former is not None and former.payload == payload else {}
        signatures = {**others, name: own.sign(signed_message(payload))}
        data = Envelope(payload, signatures).to_bytes()
        if len(data) > MAX_SIGNATURE_NBYTES:
            raise ConfigError(f"the signature of {where} would have {len(data)} bytes; save fewer tensors together")
        with translate_errors("write the signature", where):
            replace_file(folder, SIGNATURE_NAME, [memoryview(data)])
        if not _is_there(place.locate(), folder):
            raise CheckpointConflictError(f"{where} was replaced while it was signed; sign it again")
    nbytes = sum(file.nbytes for file in signed.files.values())
    return SignReport(where, name, len(signed.files), nbytes, len(signatures), time.monotonic() - start)


def digest_files(
    where: Location, folder: Folder, progress: Callable[[str, int], object], algorithm: str
) -> SignedFiles:
    """Return the digests of all files of a checkpoint, each chunk verified. Blocks: on storage.

    Raises:
        CheckpointCorruptError: The checkpoint is damaged.
    """
    data, manifest = read_manifest(where, folder)
    plan = ChunkPlaces.of(where, folder, manifest)
    validate_rest(where, folder, manifest)
    with translate_errors("list the files", where):
        files = {name: each for name, each in list_files(folder).items() if name not in (SIGNATURE_NAME, *MARKER_NAMES)}
    if missing := next((name for name in (MANIFEST_NAME, *plan.chunks) if name not in files), None):
        raise CheckpointCorruptError(f"{where} is damaged: {missing} is missing, or is a link; mend it first")
    known = [each.nbytes for each in files.values() if each.nbytes is not None]
    tensors = sum(entry.stored_nbytes for entry in manifest.arrays.values())
    block_nbytes = block_nbytes_of(max(sum(known), tensors))

    def digest(file: WholeFile) -> SignedFile:
        hasher = BlockHasher(block_nbytes, algorithm)
        with translate_errors("read {}", where, file.name, is_read=True), open_ranges(folder, file.name) as read:
            for segment in plan.segments(file.name, file.nbytes):
                found = read(segment.start, segment.stop)
                if damaged := next(plan.damaged(segment, found), None):
                    raise CheckpointCorruptError(f"{damaged.text} in {where} is damaged, so nothing is signed; mend it")
                hasher.add(found)
                progress(file.name, found.nbytes)
                if found.nbytes < segment.stop - segment.start:
                    break
        return hasher.file()

    with Pool(NUM_THREADS, "dtckpt-sign") as pool:
        found = dict(zip(files, pool.map(digest, files.values()), strict=True))
    of_manifest = BlockHasher(block_nbytes, algorithm)
    of_manifest.add(memoryview(data))
    if found[MANIFEST_NAME] != of_manifest.file():
        raise CheckpointConflictError(f"{where} was replaced while it was signed; sign it again")
    return SignedFiles(block_nbytes, algorithm, found)


def _signature_in(folder: Folder) -> Envelope | None:
    """Return the signatures that the checkpoint has already."""
    try:
        return Envelope.from_bytes(folder.read_whole(SIGNATURE_NAME, MAX_SIGNATURE_NBYTES))
    except (FileNotFoundError, MalformedError, ValueError):
        return None


def _algorithm_of(former: Envelope | None) -> str:
    """Return the algorithm of the digests. Signatures that are there keep theirs, so that they stay valid."""
    if former is not None:
        try:
            return SignedFiles.from_bytes(former.payload).algorithm
        except ConfigError:
            raise
        except ValueError:
            pass  # it is replaced
    return best_algorithm()


def _is_there(now: Folder, folder: Folder) -> bool:
    if isinstance(now, LocalFolder) and isinstance(folder, LocalFolder):
        return now.inode(".") == folder.inode(".")
    return str(now) == str(folder)
