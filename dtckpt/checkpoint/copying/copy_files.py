"""Copy the files of one checkpoint to another place, where it appears whole or not at all.

The files are written into an attempt of the commit target, several at a time, the manifest last, and committed as a
save is. A chunk is compared with the manifest's digest while it is read, and each file with the bytes that were read
when it is written. So a copy of a damaged checkpoint is refused, and a damaged copy is not committed.

The attempt's name is a digest of the source. So a later call finds the files of a call that was killed, and keeps
each file whose bytes it has verified.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dtckpt.checkpoint.copying.chunk_places import ChunkPlaces, read_manifest, validate_rest
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_by_decision import MARKER_NAMES
from dtckpt.storage.commit_target import CommitTarget
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import FileIdentity, LocalFolder
from dtckpt.storage.location import Location
from dtckpt.storage.whole_files import (
    RateLimit,
    WholeFile,
    drop_spare_memory,
    list_files,
    make_parents,
    open_ranges,
    write_file,
)
from dtckpt.storage.zarr_files import validate_kind

logger = logging.getLogger("dtckpt.checkpoint")

NUM_THREADS = 4
"""Files that are copied at one time, by default."""
MAX_MARKER_NBYTES = 1 << 20
"""Bytes of a marker of another program, as ``.metadata``."""

CopyProgress = Callable[[str, int], object]
"""Called with a file's name and the bytes of it that were copied, verified or linked since the last call."""


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """The result for one checkpoint.

    Args:
        source: The checkpoint.
        target: Where its copy is.
        num_files: Its files.
        nbytes: Bytes that were copied.
        num_kept: Files that an earlier call had copied.
        num_linked: Files that became hard links to files of another copy.
        num_by_store: Files that the object store copied by itself; the copies were read back.
        seconds: The time that it took.
        was_there: Whether the target had the same checkpoint before.
        failure: Why there is no copy; empty if there is.
    """

    source: Location
    target: Location
    num_files: int = 0
    nbytes: int = 0
    num_kept: int = 0
    num_linked: int = 0
    num_by_store: int = 0
    seconds: float = 0.0
    was_there: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class LinkedCopy:
    """A copy of a file that has several names (hard links).

    Args:
        folder: The folder of the copy.
        name: The copy's name there.
        identity: The copy's identity, if this process has verified the copy; else None.
    """

    folder: LocalFolder
    name: str
    identity: FileIdentity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of a copy.

    Args:
        overwrite: Replace another checkpoint at the target, once the copy is durable.
        threads: Files that are copied at one time.
        limit: Bounds the bytes per second.
        links: Copies by the identity of their source, so that hard links stay hard links; None: every file is copied.
        progress: See `CopyProgress`.
    """

    overwrite: bool = False
    threads: int = NUM_THREADS
    limit: RateLimit = field(default_factory=lambda: RateLimit(None))
    links: dict[FileIdentity, LinkedCopy] | None = None
    progress: CopyProgress = lambda _name, _nbytes: None


def copy_checkpoint(source: Location, target: Location, options: CopyOptions) -> CopiedCheckpoint:
    """Copy one checkpoint. Blocks: on storage.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of dtckpt at the source.
        CheckpointExistsError: There is another checkpoint at the target, or something else.
        CheckpointCorruptError: The source is damaged.
        CheckpointConflictError: The source was replaced meanwhile, or another process copies to the target.
        StorageError: Storage refused.
    """
    start = time.monotonic()
    place = commit_target_of(source)
    # The pin keeps other processes of this host from removing the source.
    with place.pin():
        folder = place.locate()
        if isinstance(folder, LocalFolder):
            # This very directory: a save that replaces the checkpoint must not mix its files with the copy's.
            with translate_errors("open the checkpoint", source):
                folder = folder.hold(follow=False)
        job = _CheckpointCopy(source, place, folder, commit_target_of(target), options)
        try:
            return replace(job.run(), seconds=time.monotonic() - start)
        finally:
            drop_spare_memory()


class _CheckpointCopy:
    """The copy of one checkpoint.

    Args:
        source: The checkpoint.
        place: Its place.
        folder: Its folder.
        target: The commit target.
        options: See `CopyOptions`.
    """

    def __init__(
        self, source: Location, place: CommitTarget, folder: Folder, target: CommitTarget, options: CopyOptions
    ) -> None:
        self._source = source
        self._place = place
        self._folder = folder
        self._target = target
        self._options = options
        self._is_over = threading.Event()
        self._refusal_lock = threading.Lock()
        self._is_refused = False

    def run(self) -> CopiedCheckpoint:
        data, manifest = read_manifest(self._source, self._folder)
        self._data = data
        with translate_errors("list the files", self._source):
            files = {name: file for name, file in list_files(self._folder).items() if name not in MARKER_NAMES}
            markers = self._markers()
        if self._is_there(files):
            self._note_links(files, is_verified=False)
            return self._result(len(files), was_there=True)
        # The same checkpoint, but not whole: it is mended.
        overwrite = self._options.overwrite or self._is_same()
        self._target.check_target(overwrite=overwrite)
        try:
            validate_kind(manifest.kvstore, self._target.folder, {each.codec for each in manifest.arrays.values()})
        except ConfigError as error:
            raise ConfigError(
                f"{self._source} cannot be copied as it is: {error.message}, or dtckpt reshard --format zarr"
            ) from None
        plan = ChunkPlaces.of(self._source, self._folder, manifest)
        validate_rest(self._source, self._folder, manifest)
        if missing := next((name for name in plan.chunks if name not in files), None):
            raise CheckpointCorruptError(
                f"{self._source} is damaged: {missing} is missing, or is a link; mend it first"
            )
        with self._target.resume(f"copy-{bytes_digest(data):016x}") as attempt:
            copied = self._copy_files(attempt.folder, plan, files)
            with translate_errors("finish the copy", self._target.where):
                attempt.folder.remove(list_files(attempt.folder, has_drafts=True).keys() - files.keys())
                attempt.folder.sync(files.keys() - {MANIFEST_NAME})
                # Last: a folder with a manifest is a checkpoint.
                write_file(attempt.folder, MANIFEST_NAME, [memoryview(data)])
                attempt.folder.sync([MANIFEST_NAME])
            if not self._is_source():
                raise self._replaced()
            attempt.commit(overwrite=overwrite, markers=markers)
        self._note_links(files, is_verified=True)
        return copied

    def _result(self, num_files: int, **facts: Any) -> CopiedCheckpoint:
        return replace(CopiedCheckpoint(self._source, self._target.where, num_files), **facts)

    # --- the target as it is --------------------------------------------------------------------------------------

    def _markers(self) -> dict[str, bytes]:
        """Return the files by which other programs find the checkpoint; on an object store, beside its folder."""
        found = {}
        for name in MARKER_NAMES:
            try:
                found[name] = self._place.folder.read_whole(name, MAX_MARKER_NBYTES)
            except (FileNotFoundError, MalformedError):
                continue
        return found

    def _is_same(self) -> bool:
        """Whether the target's checkpoint has the source's manifest."""
        with translate_errors("look at the target", self._target.where):
            try:
                return self._target.locate().read_whole(MANIFEST_NAME, len(self._data)) == self._data
            except (CheckpointNotFoundError, CheckpointIncompleteError, FileNotFoundError, MalformedError):
                return False

    def _is_there(self, files: Mapping[str, WholeFile]) -> bool:
        """Whether the target has the checkpoint: the same manifest, and all files in their lengths."""
        if not self._is_same():
            return False
        with translate_errors("look at the target", self._target.where):
            folder = self._target.locate()
            found = list_files(folder)
            sizes = {name: file.nbytes for name, file in files.items() if file.nbytes}
            if not files.keys() <= found.keys():
                return False
            if isinstance(folder, LocalFolder):
                return all(found[name].nbytes == nbytes for name, nbytes in sizes.items())
            return folder.find_short_file(sizes) is None

    def _is_source(self) -> bool:
        """Whether the source is still the checkpoint that was read."""
        with translate_errors("look at the source again", self._source):
            try:
                return self._place.locate().read_whole(MANIFEST_NAME, len(self._data)) == self._data
            except (CheckpointError, FileNotFoundError, MalformedError):
                return False

    def _replaced(self) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{self._source} was replaced or removed while it was being copied, and nothing is committed; copy again"
        )

    # --- files ----------------------------------------------------------------------------------------------------

    def _copy_files(self, folder: Folder, plan: ChunkPlaces, files: Mapping[str, WholeFile]) -> CopiedCheckpoint:
        names = sorted(files.keys() - {MANIFEST_NAME})
        with translate_errors("make the folders", self._target.where):
            make_parents(folder, names)
            before = list_files(folder)

        def copy(name: str) -> tuple[str, int]:
            return self._copy_file(folder, plan, files[name], was_there=name in before)

        counts = {"nbytes": len(self._data), "num_kept": 0, "num_linked": 0, "num_by_store": 0}
        with _bounded_pool(self._options.threads, self._is_over) as run:
            for kind, count in run(copy, names):
                counts[kind] += count
        return self._result(len(files), **counts)

    def _copy_file(self, folder: Folder, plan: ChunkPlaces, file: WholeFile, *, was_there: bool) -> tuple[str, int]:
        """Bring one file into a folder; return the count that grows, and by how much: bytes, or one file."""
        try:
            if was_there and self._is_kept(folder, plan, file):
                return "num_kept", 1
            if isinstance(folder, LocalFolder) and self._is_linked(folder, plan, file):
                return "num_linked", 1
            if self._is_copied_by_store(folder, plan, file):
                return "num_by_store", 1
            with translate_errors("copy {}", self._target.where, file.name):
                return "nbytes", write_file(folder, file.name, self._pieces(plan, file))
        except CheckpointCorruptError as error:
            if not self._is_source():
                raise self._replaced() from error
            raise

    def _pieces(self, plan: ChunkPlaces, file: WholeFile) -> Iterator[memoryview]:
        """Yield the bytes of a file of the source, each chunk verified.

        Raises:
            CheckpointCorruptError: The source is damaged.
        """
        for data in self._verified(self._folder, plan, file):
            self._options.limit.take(data.nbytes)
            yield data
            self._options.progress(file.name, data.nbytes)

    def _verified(self, folder: Folder, plan: ChunkPlaces, file: WholeFile) -> Iterator[memoryview]:
        where = f"{folder}/{file.name}"
        with translate_errors("read {}", folder, file.name, is_read=True), open_ranges(folder, file.name) as read:
            for segment in plan.segments(file.name, file.nbytes):
                if self._is_over.is_set():
                    raise StorageError(f"the copy of {self._source} was given up")
                data = read(segment.start, segment.stop)
                if damaged := next(plan.damaged(segment, data), None):
                    raise CheckpointCorruptError(
                        f"{damaged.text} in {where} is damaged: its digest does not match; mend it by dtckpt scrub "
                        "--from, or copy another checkpoint"
                    )
                yield data
                if data.nbytes < segment.stop - segment.start:
                    if file.nbytes not in (None, segment.start + data.nbytes):
                        raise CheckpointCorruptError(f"{where} was cut off while it was copied; copy it again")
                    break  # the file ends here

    def _is_kept(self, folder: Folder, plan: ChunkPlaces, file: WholeFile) -> bool:
        """Whether a file that an earlier call wrote has the source's bytes: chunks by digest, the rest compared."""
        try:
            with (
                translate_errors("compare {}", folder, file.name, is_read=True),
                open_ranges(folder, file.name) as theirs,
                open_ranges(self._folder, file.name) as ours,
            ):
                for segment in plan.segments(file.name, file.nbytes):
                    found = theirs(segment.start, segment.stop)
                    self._options.limit.take(found.nbytes)
                    if next(plan.damaged(segment, found), None) is not None:
                        return False
                    if not segment.chunks and found != ours(segment.start, segment.stop):
                        return False
                    self._options.progress(file.name, found.nbytes)
                    if found.nbytes < segment.stop - segment.start:
                        return not ours(segment.start + found.nbytes, segment.start + found.nbytes + 1).nbytes
                end = file.nbytes or 0
                return not theirs(end, end + 1).nbytes
        except CheckpointCorruptError:
            return False

    def _is_copied_by_store(self, folder: Folder, plan: ChunkPlaces, file: WholeFile) -> bool:
        """Whether the object store copied the file by itself, without an upload, and the copy is right."""
        if isinstance(folder, LocalFolder) or self._is_refused:
            return False
        try:
            with translate_errors("have the store copy {}", folder, file.name):
                is_copied = folder.share(self._folder, {file.name: 0})
        except CheckpointError as error:
            self._tell_refused(error)
            return False
        # A damaged source fails here, too; then its read names the damage.
        return is_copied and self._is_kept(folder, plan, file)

    def _tell_refused(self, error: CheckpointError) -> None:
        """Log the first refusal; the store is not asked again."""
        with self._refusal_lock:
            is_first, self._is_refused = not self._is_refused, True
        if is_first:
            logger.warning("files of %s are read and written, as the store does not copy: %s", self._source, error)

    # --- hard links -----------------------------------------------------------------------------------------------

    def _is_linked(self, folder: LocalFolder, plan: ChunkPlaces, file: WholeFile) -> bool:
        """Whether the file became a link to the copy of another name of the same file."""
        links = self._options.links
        if links is None or file.identity is None or (copy := links.get(file.identity)) is None:
            return False
        try:
            folder.link(file.name, copy.folder, copy.name)
            identity = folder.identity(file.name)
        except OSError as error:  # another file system; or the other copy was removed
            logger.warning("%s/%s is copied, not linked: %s", folder, file.name, error)
            return False
        # Only now, under a name that no other process changes: the other copy may be replaced at any time.
        if identity != copy.identity and not self._is_kept(folder, plan, file):
            return False
        links[file.identity] = replace(copy, identity=identity)
        return True

    def _note_links(self, files: Mapping[str, WholeFile], *, is_verified: bool) -> None:
        """Note the copies of files with several names, for the checkpoints that are copied later."""
        links, folder = self._options.links, self._target.locate()
        if links is None or not isinstance(folder, LocalFolder):
            return
        folder = LocalFolder(folder.path.parent, folder.path.name)  # which follows no link in the step's place
        for name, file in files.items():
            if file.identity is not None and file.num_names > 1 and file.identity not in links:
                links[file.identity] = LinkedCopy(folder, name, folder.identity(name) if is_verified else None)


@contextmanager
def _bounded_pool(
    threads: int, is_over: threading.Event
) -> Iterator[Callable[[Callable[[str], tuple[str, int]], list[str]], Iterator[tuple[str, int]]]]:
    """Run calls in threads, a few ahead; after an error, or an interrupt, the others are told to stop."""
    pool = Pool(threads, "dtckpt-copy")
    waiting: deque[Future[tuple[str, int]]] = deque()

    def run(work: Callable[[str], tuple[str, int]], names: list[str]) -> Iterator[tuple[str, int]]:
        for name in names:
            waiting.append(pool.submit(work, name))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield run
    except BaseException:
        is_over.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
