"""Reshard with several workers that write one checkpoint and do not communicate: they meet on storage.

All workers compute the same plan, so each knows its chunks. The workers share one directory under construction, whose
name is a digest of the result. A worker that has written its chunks, durably, leaves a mark in its folder. The worker
that then finds the marks of all workers commits. Workers that write share the directory's lock; a worker that commits
has it alone. If a worker is killed at any time, its own part is lost at most. A part without a mark is written again,
marks stay, and the checkpoint appears whole or not at all.

The state of the directory, which survives any crash:

    marks          manifest     meaning, and the next step
    some missing   no           parts are being written
    all            no           all parts are written: merge
    all            yes          a merge may have been interrupted: remove its files, and merge again
    some missing   yes          merged, durably: the first mark was removed; remove the working files, commit
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.construction import Merge
from dtckpt.checkpoint.saving.merge import remove_working_files
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.write import CHUNKS_NAME, ClientWriter, Source
from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    CoordinationError,
    StorageError,
)
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, Manifest
from dtckpt.storage import commit_by_rename, fsync
from dtckpt.storage.commit_by_rename import DirectoryAttempt
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.local_folder import LocalFolder, rename
from dtckpt.storage.zarr_tensorstore import DATA_FOLDER, DATABASE_NAME, client_folder

MAX_WORKERS = 10_000
MARK_NAME = "part.done"
_DIGEST_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker among several.

    Args:
        index: Number of the worker, from 0.
        count: Number of workers; the same for all.
        resume: Whether to keep the part that an earlier process of this worker finished.
    """

    index: int
    count: int
    resume: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.count <= MAX_WORKERS or not 0 <= self.index < self.count:
            raise ConfigError(
                f"worker {self.index} of {self.count}: expected 1 to {MAX_WORKERS} workers, and an index from 0 to "
                "one less than there are"
            )


@dataclass(frozen=True, slots=True)
class PartReport:
    """The result of one worker.

    Args:
        worker: The worker.
        nbytes: Bytes of the chunks that it wrote in this call; 0 if its part was finished before.
        missing: Workers whose parts are not finished.
        is_committed: Whether the checkpoint is committed, by this worker or another worker. If it is not and no part is
            missing, another worker is committing it.
    """

    worker: Worker
    nbytes: int
    missing: tuple[int, ...]
    is_committed: bool


class SharedAttempt:
    """The attempt that all workers share.

    Args:
        target: Where the checkpoint will be.
        plan: The plan of all workers.
        salt: Further facts that the result depends on, besides the plan.
        worker: This worker.
        options: Options of the save.
    """

    def __init__(self, target: Path, plan: SavePlan, salt: bytes, worker: Worker, options: SaveOptions) -> None:
        self._target = target
        self._plan = plan
        self._worker = worker
        self._options = options
        facts = repr((worker.count, options.kvstore, options.raw_bits)).encode()
        self.token = f"reshard-{bytes_digest(plan.topic + salt + facts):016x}"
        self._path = commit_by_rename.working_path(target, self.token)
        self._folder = LocalFolder(target.parent, self._path.name)

    def is_committed(self) -> bool:
        """Whether the checkpoint at the target is the checkpoint that these workers write."""
        return _attempt_of(self._target) == self.token

    def check_target(self) -> bool:
        """Return whether the checkpoint is committed already; refuse a target that may not be written.

        Raises:
            CheckpointExistsError: The target is taken.
        """
        try:
            if not self.is_committed():
                commit_by_rename.check_target(self._target, overwrite=self._options.overwrite)
        except CheckpointExistsError:
            if not self.is_committed():  # else another worker has just committed
                raise
        return self.is_committed()

    def write(self, source: Source, tree: bytes) -> PartReport:
        """Write this worker's part, and commit if it is the last one.

        Args:
            source: The elements.
            tree: The state tree, as JSON.

        Raises:
            CheckpointExistsError: The target is taken.
            CoordinationError: Another process is writing the same part.
            StorageError: Another save took the target over, or storage refused.
        """
        if self.check_target():
            return self._report(0)
        attempt = DirectoryAttempt(commit_by_rename.begin_shared(self._target, self.token))
        nbytes = 0
        try:
            nbytes = self._write_part(attempt, source)
            self._commit(attempt, tree)
        except (FileNotFoundError, StorageError):
            if not self.is_committed():  # else another worker was faster, and has moved everything into place
                raise
        if self.is_committed():
            attempt.abandon()  # made after another process of this worker had finished
        return self._report(nbytes)

    def _report(self, nbytes: int) -> PartReport:
        is_committed = self.is_committed()
        return PartReport(self._worker, nbytes, () if is_committed else self._missing(), is_committed)

    # --- a part -------------------------------------------------------------------------------------------------

    def _write_part(self, attempt: DirectoryAttempt, source: Source) -> int:
        folder = self._folder / client_folder(self._worker.index)
        own = folder.path
        with translate_errors("create the worker's folder", own):
            folder.make()
        with lock_directory(self._path, is_shared=True) as is_open, lock_directory(own) as is_mine:
            if not is_open:
                return 0  # all parts are finished, and another worker is committing them
            if not is_mine:
                raise CoordinationError(
                    f"another process is writing part {self._worker.index} of {self._target}; every worker needs its "
                    "own index"
                )
            if self._is_merged() or (self._worker.resume and self._mark(self._worker.index) is not None):
                return 0
            with translate_errors("begin the worker's part", own):
                self._folder.remove_files([MANIFEST_NAME])
                folder.remove_files([MARK_NAME])
                if self._options.fsync:  # before the files that the mark vouches for are removed
                    fsync.sync_all([own, self._path])
                # Leftovers of an earlier process of this worker, which is dead: the lock was free.
                for name in folder.names():
                    folder.remove_tree(name)
            written: list[int] = []
            writer = ClientWriter(
                self._plan,
                attempt,
                client=self._worker.index,
                clients=range(self._worker.count),
                source=source,
                options=replace(self._options, check_replicas=False),  # there is one copy of everything
                count=written.append,
            )
            writer.write()
            self._leave_mark(folder.read(CHUNKS_NAME))
            return sum(written)

    def _leave_mark(self, chunk_list: bytes) -> None:
        """Mark the part as finished. The mark is written last, and appears whole or not at all."""
        path = _mark_path(self._path, self._worker.index)
        own, scratch = self._folder / client_folder(self._worker.index), f"{MARK_NAME}.{os.getpid()}"
        with translate_errors("mark the worker's part", path):
            if self._options.fsync:  # a save leaves this to its commit; here another process may commit
                database = path.parent / DATABASE_NAME
                files = [database] if database.exists() else []
                fsync.sync_all([*files, *fsync.walk_folders(self._path)])
            own.write(scratch, chunk_list + bytes_digest(chunk_list).to_bytes(_DIGEST_NBYTES, "big"))
            if self._options.fsync:
                own.sync([scratch])
            rename(own.path / scratch, path)
            if self._options.fsync:
                fsync.sync_all([path.parent, self._path])

    def _mark(self, index: int) -> bytes | None:
        """Return the chunk list of a finished part; None if the part is not finished."""
        path = _mark_path(self._path, index)
        with translate_errors("read the mark of a part", path):
            try:
                data = (self._folder / client_folder(index)).read(MARK_NAME)
            except FileNotFoundError:
                return None
        body, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
        if bytes_digest(body) != int.from_bytes(digest, "big"):
            raise CheckpointCorruptError(f"{path} is damaged; remove it and run worker {index} again")
        return body

    def _is_merged(self) -> bool:
        """Whether a merge is complete: the last row of the table above."""
        return _attempt_of(self._path) == self.token and bool(self._missing())

    def _missing(self) -> tuple[int, ...]:
        return tuple(index for index in range(self._worker.count) if not _mark_path(self._path, index).exists())

    # --- the commit ---------------------------------------------------------------------------------------------

    def _commit(self, attempt: DirectoryAttempt, tree: bytes) -> None:
        with lock_directory(self._path) as is_mine:
            is_merged = self._is_merged()
            if not is_mine or self.is_committed() or (self._missing() and not is_merged):
                return  # a worker that still writes its part, or that is committing, does it
            if not is_merged:
                self._forget_merge()
                chunk_lists, count = self._chunk_lists(), self._worker.count
                merge = Merge(plan=self._plan, chunk_lists=chunk_lists, tree=tree, job="reshard", num_clients=count)
                merge.run(attempt, self._options)
                self._remove_first_mark()
            remove_working_files(attempt.folder, self._remaining(), has_moves=False, names=[MARK_NAME])
            attempt.commit(overwrite=self._options.overwrite, is_durable=self._options.fsync)

    def _forget_merge(self) -> None:
        """Remove the files of a merge that was interrupted; after a power loss they may be incomplete."""
        with translate_errors("begin to merge", self._path):
            self._folder.remove_files([MANIFEST_NAME, DATABASE_NAME])
            self._folder.remove_tree(DATA_FOLDER)

    def _remove_first_mark(self) -> None:
        """Mark the merge as complete."""
        path = _mark_path(self._path, 0)
        with translate_errors("remove the mark of a part", path):
            self._folder.remove_files([f"{client_folder(0)}/{MARK_NAME}"])
            if self._options.fsync:
                fsync.sync_all([path.parent])

    def _remaining(self) -> list[int]:
        """Return the workers whose folders exist: a folder without chunks is removed when it is empty."""
        return [index for index in range(self._worker.count) if (self._path / client_folder(index)).exists()]

    def _chunk_lists(self) -> Mapping[int, int]:
        """Write every worker's chunk list again, as a killed commit may have removed it; return their digests."""
        digests = {}
        for index in range(self._worker.count):
            chunk_list = self._mark(index)
            assert chunk_list is not None  # noqa: S101  no worker removes a mark while this one has the lock
            folder = self._folder / client_folder(index)
            with translate_errors("write a chunk list", folder):
                folder.make()
                folder.write(CHUNKS_NAME, chunk_list)
            digests[index] = bytes_digest(chunk_list)
        return digests


def _mark_path(folder: Path, index: int) -> Path:
    return folder / client_folder(index) / MARK_NAME


def _attempt_of(folder: Path) -> str:
    """Return the attempt that wrote the manifest in a folder, "" if there is none."""
    try:
        data = LocalFolder(folder).read_whole(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
        return Manifest.from_bytes(data, str(folder)).attempt
    except (OSError, MalformedError, CheckpointError):  # an unfinished manifest, or no manifest of dtckpt
        return ""
