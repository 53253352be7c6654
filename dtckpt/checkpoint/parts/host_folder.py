"""`HostFolder`: the parts that one host holds, as files::

    <path>/<job>/                                   the job: a digest of its root
        job.json                                    the root, for people; a random token
        restores.json                               by save, how often it was restored (`LocalTier.max_restores`)
        spare/8f3a09c2d1e4477a-0.data               files that are being filled, or wait to be used again
        <save>/                                     a local save; see `SaveId.name`
            3.data                                  the elements of client 3's part
            3.index                                 its index: the part is whole; how the vote ended is not known here
            3.voted                                 the same file, renamed: all clients voted the save complete

A file is filled in ``spare`` and renamed when it is whole, so a process that dies leaves no torn part. Files are used
again: to fill new memory costs a page fault per page, more than the copy. Nothing is synced: the tier outlives
processes, not a host. If a host with a local disk lost its power, digests tell which parts were torn.

A process keeps each file locked that it has filled, as long as it has it mapped. So other processes tell its files from
the files of dead processes, in any container. Process numbers would not tell.

Files of other jobs are never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.records import MAX_INDEX_NBYTES, HostParts, PartIndex, SaveId
from dtckpt.checkpoint.saving.staging import StagingMemory
from dtckpt.comm import fork_guard
from dtckpt.errors import StorageFullError, format_nbytes
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.local_folder import LocalFolder, make_folders, rename

DATA, WRITTEN, VOTED = ".data", ".index", ".voted"
_SPARE = "spare"
_JOB = "job.json"
_RESTORES = "restores.json"
_PART_FILE = re.compile(r"(\d{1,9})(\.data|\.index|\.voted)")
Stamp = tuple[int, int] | None


def job_name(root: str) -> str:
    """Return the name of a job's directory. A job is known by the root of its durable checkpoints."""
    return f"{bytes_digest(root.encode('utf-8', 'backslashreplace')):016x}"


def _new_locked(path: Path) -> int:
    while True:
        descriptor = LocalFolder(path.parent).new_file(path.name)
        with suppress(OSError):  # a file system without locks: there no process removes the files of another
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another process found the file before it was locked, and removed it


@contextmanager
def _unfilled(folder: LocalFolder, names: Collection[str]) -> Iterator[bool]:
    """Yield whether no live process has filled one of some files. Until the end of the context none can begin to."""
    with ExitStack() as stack:
        try:
            for name in names:
                descriptor = folder.open_lock(name, to_write=False)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_unfilled = True
        except OSError:
            is_unfilled = False
        yield is_unfilled


class PartFile:
    """A file of elements, mapped into this process's memory, that is filled again and again.

    Args:
        path: Where it is now.
        nbytes: Its size.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        descriptor = _new_locked(path)
        with open(descriptor, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
            found = os.fstat(file.fileno())
            self._identity = found.st_dev, found.st_ino
            # Populated at once: a page at a time, while training waits, it would take longer than the copy. The map has
            # a copy of the descriptor, and keeps the lock.
            self._map = mmap.mmap(
                file.fileno(), max(nbytes, 1), flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            )
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        # Kept with the file: memory that GPUs copy to is page-locked once, and cut into tensors once.
        self.staging = StagingMemory(lambda _: self.memory)
        self.view = memoryview(self._map)[:nbytes]

    def is_whole(self) -> bool:
        """Whether the file is still at its path, and as long as it was."""
        try:
            return self.path.stat().st_size >= self.nbytes and not self.is_replaced()
        except OSError:
            return False

    def is_replaced(self) -> bool:
        """Whether another file is at its path. Raises: FileNotFoundError: No file is."""
        found = self.path.stat()
        return (found.st_dev, found.st_ino) != self._identity

    def place(self, elements: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...]]:
        """Return the byte at which elements begin that lie in the file, and the steps from one to the next, per dim."""
        return elements.ctypes.data - self.memory.data_ptr(), tuple(
            each // elements.itemsize for each in elements.strides
        )

    def move(self, path: Path) -> None:
        """Rename the file."""
        rename(self.path, path)
        self.path = path


class HostFolder:
    """The parts of one job on this host, as one of its processes sees and changes them. Thread-safe.

    Args:
        folder: The directory of the parts of all jobs; absolute.
        root: Tells the job from others: the root of its durable checkpoints, or the name of its feed.
        host: Name of this host, for messages.
        title: The purpose of the parts, for messages.
        max_nbytes: Bound on the bytes of the job's files; None: no bound but the space that there is.
    """

    def __init__(
        self, folder: Path, root: str, *, host: str, title: str = "the local tier", max_nbytes: int | None = None
    ) -> None:
        self._folder, self._title, self._max_nbytes = folder, title, max_nbytes
        self._files = LocalFolder(folder, job_name(root))
        self.path = self._files.path
        self._root = root
        self._where = f"{self.path} on host {host}"
        self._owner = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._spare: list[PartFile] = []
        self._filled: dict[tuple[SaveId, int], PartFile] = {}
        self._pinned: list[SaveId] = []
        self._num_files = 0

    def make(self) -> None:
        """Make the directory. Raises: StorageError: The tier cannot be written."""
        with translate_errors(f"make the directory of {self._title}", self._where):
            make_folders(self._folder)
            # Shared memory is open to all users of a host, and the parts are the weights.
            self._files.make_private()
            (self._files / _SPARE).make()
            if not (self.path / _JOB).exists():
                facts = json.dumps({"root": self._root, "token": secrets.token_hex(8)})
                # All processes read the first process's token. Without hard links they read none.
                with suppress(OSError):
                    self._files.create(_JOB, facts.encode())

    # --- looking ------------------------------------------------------------------------------------------------

    def token(self) -> str:
        """Return the random token of this directory, which no other machine or container has; empty if unknown."""
        try:
            return str(json.loads((self.path / _JOB).read_bytes())["token"])
        except (OSError, ValueError, TypeError, KeyError):
            return ""

    def parts(self) -> HostParts:
        """Return the parts that are here, whichever process wrote them."""
        voted: dict[SaveId, frozenset[int]] = {}
        written: dict[SaveId, frozenset[int]] = {}
        for save, folder in self._saves():
            found: dict[str, set[int]] = {DATA: set(), WRITTEN: set(), VOTED: set()}
            with suppress(OSError):
                for match in filter(None, (_PART_FILE.fullmatch(entry.name) for entry in folder.iterdir())):
                    if (client := int(match[1])) < save.num_clients:
                        found[match[2]].add(client)
            voted[save] = frozenset(found[DATA] & found[VOTED])
            written[save] = frozenset(found[DATA] & found[WRITTEN]) - voted[save]
        return HostParts(voted, written)

    def _saves(self) -> Iterator[tuple[SaveId, Path]]:
        with suppress(OSError):
            for folder in self.path.iterdir():
                with suppress(ValueError):
                    yield SaveId.parse(folder.name), folder

    def stamp(self, save: SaveId, client: int) -> Stamp:
        """Return inode and time of the index of a copy that counts: another copy has others. None if there is none."""
        try:
            found = (self.path / save.name / f"{client}{VOTED}").stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def has(self, save: SaveId, client: int) -> bool:
        """Whether a part is here, whole."""
        return any((self.path / save.name / f"{client}{suffix}").exists() for suffix in (VOTED, WRITTEN))

    def index_file(self, save: SaveId, client: int) -> bytes:
        """Return the index file of a part. Raises: FileNotFoundError: It is not here."""
        folder = self.path / save.name
        for suffix in (VOTED, WRITTEN):
            with suppress(FileNotFoundError), (folder / f"{client}{suffix}").open("rb") as file:
                return file.read(MAX_INDEX_NBYTES)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / f"{client}{VOTED}"))

    def data_path(self, save: SaveId, client: int) -> Path:
        """Return the file of a part's elements."""
        return self.path / save.name / f"{client}{DATA}"

    def open_data(self, save: SaveId, client: int) -> memoryview:
        """Map the file of a part, for reading. Raises: OSError, ValueError: It is missing, or empty."""
        with self.data_path(save, client).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    def open_memory(self, save: SaveId, client: int) -> memoryview | LentMemory:
        """Return the memory of a part: here its file, as `open_data`; see `LendingFolder`."""
        return self.open_data(save, client)

    def restores(self) -> dict[str, int]:
        """Return how often each save was restored, by its name; without the saves that are gone."""
        try:
            facts = json.loads((self.path / _RESTORES).read_bytes())
            return {str(name): int(count) for name, count in facts.items() if (self.path / name).is_dir()}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError):
            return {}  # the count is not vital

    def note_restore(self, save: SaveId) -> None:
        """Count a restore of a save; one process of a host does."""
        counts = self.restores()
        counts[save.name] = counts.get(save.name, 0) + 1
        with translate_errors(f"count a restore in {self._title}", self._where):
            self._files.replace(_RESTORES, json.dumps(counts).encode())

    def used_nbytes(self) -> int:
        """Return the bytes that the files of this job take."""
        nbytes = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):
                    nbytes += os.stat(os.path.join(folder, name)).st_blocks * 512
        return nbytes

    # --- filling ------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> PartFile:
        """Return a file to be filled, of at least so many bytes.

        Raises:
            StorageFullError: The file does not fit into the tier.
            StorageError: The tier cannot be written.
        """
        with self._lock:
            # If a user removes the directory during a run, the files are gone, but not their memory. If a file is cut
            # short, its memory is gone: a write there would end the process.
            self._spare = [file for file in self._spare if file.is_whole()]
            fitting = [file for file in self._spare if nbytes <= file.nbytes <= 2 * max(nbytes, 1)]
            if fitting:
                file = min(fitting, key=lambda each: each.nbytes)
                self._spare.remove(file)
                return file
            # Files of another size will not be wanted again.
            for file in self._spare:
                self._remove_spare(file.path)
            self._spare.clear()
            self._num_files += 1
            path = self.path / _SPARE / f"{self._owner}-{self._num_files}{DATA}"
        self.make()  # again, if a user has removed it
        self.validate_space(nbytes)
        with translate_errors(f"make a file in {self._title}", self._where):
            try:
                file = PartFile(path, nbytes)
                # Again: the host's processes look at the same time, and then all make their files.
                self._validate_bound(0)
                return file
            except (OSError, StorageFullError):
                self._remove_spare(path)
                raise

    def _remove_spare(self, path: Path) -> None:
        (self._files / _SPARE).remove_files([path.name])

    def validate_space(self, nbytes: int) -> None:
        """Check that so many bytes more fit into the tier. Raises: StorageFullError: They do not."""
        self._validate_bound(nbytes)
        with translate_errors(f"look at {self._title}", self._where):
            free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise StorageFullError(
                f"{self._title} {self._where} is full: {format_nbytes(free)} are free, and "
                f"{format_nbytes(nbytes)} are needed; give it more memory, or keep fewer steps"
            )

    def _validate_bound(self, nbytes: int) -> None:
        limit, used = self._max_nbytes, self.used_nbytes()
        if limit is not None and used + nbytes > limit:
            raise StorageFullError(
                f"{self._title} {self._where} is full: {format_nbytes(used)} of its max_nbytes, "
                f"{format_nbytes(limit)}, are in use, and {format_nbytes(nbytes)} more are needed; raise it, or "
                "keep fewer steps"
            )

    def give_back(self, file: PartFile) -> None:
        """Let a file be used again that was filled in vain, whether it became a part or not."""
        with self._lock:
            part = next((part for part, filled in self._filled.items() if filled is file), None)
            if part is None:
                self._spare.append(file)
        if part is not None:
            self.remove(*part)

    def put(self, file: PartFile, index: PartIndex, data: bytes, *, is_voted: bool) -> None:
        """Make a filled file a part of a save.

        Args:
            file: The file, in ``spare``.
            index: Its index.
            data: The index file.
            is_voted: Whether all clients are known to have voted the save complete.
        """
        folder = self._files / index.save.name
        with translate_errors(f"put a part into {self._title}", self._where):
            folder.make()
            with self._lock:
                file.move(folder.path / f"{index.client}{DATA}")
                self._filled[index.save, index.client] = file
            folder.replace(f"{index.client}{VOTED if is_voted else WRITTEN}", data)

    def note_voted(self, save: SaveId, client: int) -> None:
        """Note that all clients voted a save complete."""
        folder = self.path / save.name
        with translate_errors(f"note a vote in {self._title}", self._where):
            rename(folder / f"{client}{WRITTEN}", folder / f"{client}{VOTED}")

    # --- removing -----------------------------------------------------------------------------------------------

    def pin(self, save: SaveId) -> Callable[[], None]:
        """Keep a save from being removed by this process; return a function that lets go of it."""
        with self._lock:
            self._pinned.append(save)

        def unpin() -> None:
            with self._lock:
                self._pinned.remove(save)

        return unpin

    def remove(self, save: SaveId, client: int) -> None:
        """Remove a part that this process filled; its file is used again.

        If another process of this host has replaced the copy, because it was damaged, it is that one's.
        """
        with self._lock:
            file = self._filled.pop((save, client), None)
            if file is None:
                return
            with suppress(OSError):
                if file.is_replaced():
                    return
            folder = self._files / save.name
            with suppress(FileNotFoundError):  # a newer attempt of the job has removed the directory
                folder.remove_files(f"{client}{suffix}" for suffix in (VOTED, WRITTEN))
            self._num_files += 1
            try:
                file.move(self.path / _SPARE / f"{self._owner}-{self._num_files}{DATA}")
                self._spare.append(file)
            except FileNotFoundError:  # there is no ``spare``: another process has closed the folder, or removed it
                with suppress(FileNotFoundError):
                    folder.remove_files([f"{client}{DATA}"])
        with suppress(OSError):
            folder.remove(())

    def remove_all_but(self, kept: Collection[SaveId], *, with_others: bool) -> None:
        """Remove the saves that need not be kept.

        Args:
            kept: The saves that are kept.
            with_others: Whether to remove the parts of former processes, too; one process of a host does.
        """
        with self._lock:
            stay = {*kept, *self._pinned}
            mine = list(self._filled)
        for save, client in mine:
            if save not in stay:
                self.remove(save, client)
        if not with_others:
            return
        own = {save for save, _ in mine}
        # Processes of this host are still writing saves that are newer than all kept ones. Saves of a job with another
        # root are not this job's.
        newest = max(kept, default=None)
        for save, folder in list(self._saves()):
            if newest is None or not save.belongs_to(newest.root):
                continue
            if save not in stay and save not in own and save < newest:
                with suppress(OSError):
                    self._files.remove_tree(folder.name)

    def remove_save(self, save: SaveId) -> None:
        """Remove the parts of a save, whichever process wrote them."""
        with suppress(OSError):
            self._files.remove_tree(save.name)

    def remove_saves_of_the_dead(self, before: int | None = None) -> None:
        """Remove the saves of which no live process has filled a part.

        Args:
            before: Only saves of smaller numbers; default: all.
        """
        for save, folder in list(self._saves()):
            if before is not None and save.number >= before:
                continue
            with suppress(OSError):
                names = [path.name for path in folder.iterdir() if path.suffix == DATA]
                with _unfilled(self._files / folder.name, names) as is_unfilled:
                    if names and is_unfilled:
                        self._files.remove_tree(folder.name)

    def remove_spare_of_the_dead(self) -> None:
        """Remove the files that processes left in ``spare`` which do not live any more."""
        with suppress(OSError):
            for path in (self.path / _SPARE).iterdir():
                with _unfilled(self._files / _SPARE, [path.name]) as is_unfilled:
                    if is_unfilled:
                        self._remove_spare(path)

    def remove_if_empty(self) -> None:
        """Remove the directory of the job if no process of the job has files there."""
        with suppress(OSError):
            if {entry.name for entry in self.path.iterdir()} <= {_JOB, _SPARE}:
                with suppress(FileNotFoundError):
                    (self._files / _SPARE).remove(())
                self._files.remove([_JOB])

    def remove_spare(self) -> None:
        """Remove the files that wait to be used again. Processes that have mapped one keep its memory."""
        with self._lock:
            spare, self._spare = self._spare, []
        for file in spare:
            with suppress(OSError):
                self._remove_spare(file.path)

    def close(self) -> None:
        """Give the memory back that waits to be used again."""
        self.remove_spare()

    def free(self) -> None:
        """Remove the parts that this process has filled, too. In a process that was forked from it: do nothing."""
        if not fork_guard.is_forked():
            for save, client in list(self._filled):
                self.remove(save, client)
            self.close()
