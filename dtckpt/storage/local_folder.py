"""The local back end: `LocalFolder`, files in a directory; and the only code that changes files below a directory.

A user with write access to a directory can put a link in the place of a file or folder that this library writes, or a
fifo in the place of a lock. No such entry leads out of the directory:

* a directory is opened name by name, and its entries are named relative to the open directory (openat(2)). A link in
  the place of a folder is an error;
* a new file is created exclusively. So it is written neither through a link, nor into a file that has other names:
  checkpoints that share a file are safe from each other;
* an entry is removed by its name: a link as a link.

The base directory is the user's choice, so links on the way to it are followed. So are links to files that are only
read: caches of published models consist of them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from dtckpt.storage import fsync
from dtckpt.storage.failures import NOT_A_FILE, MalformedError
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_values import OpenFile
from dtckpt.storage.regular_files import open_regular, regular_nbytes, too_long_error

NO_REPLACE = 1
"""Flag of a rename that fails where something has the new name already (Linux: ``renameat2``)."""
EXCHANGE = 2
"""Flag of a rename after which two files or directories have each other's names."""
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""Error numbers of systems that do not support a flag."""
MAX_DEPTH = 520
"""Directories in each other that a walk enters: a name of a tensor has at most 1024 bytes."""
_DRAFT_SUFFIX = ".draft"
_DRAFT_NAME = re.compile(r"\..+\.[0-9a-f]{16}\.draft", re.DOTALL)
_AT_FDCWD = -100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NUM_TRIES = 8
"""How often a file is created anew if others create it, too."""
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""Error numbers of a hard link that the file system refuses; the file is copied then."""
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM)
_COPY_NBYTES = 64 << 20

logger = logging.getLogger("dtckpt.storage")


FileIdentity = tuple[int, int, int]
"""Device, inode, and time of the last write. A file system gives the inode of a removed file to the next new file."""


def file_identity(status: os.stat_result) -> FileIdentity:
    """Return the identity of a file. All its names (hard links) have the same identity."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class LocalFolder(Folder):
    """A directory.

    Args:
        base: A directory, by a path that the user chose.
        below: Names of directories from there on, one in the other.
        shown: The path of the base directory in messages, if that is another one.
    """

    is_local = True

    def __init__(self, base: Path, *below: str, shown: Path | None = None) -> None:
        self.path = base.joinpath(*below)
        self._base = base
        self._below = below
        self._shown = shown or base
        self._anchor: _Anchor | None = None

    def __str__(self) -> str:
        return str(self._shown.joinpath(*self._below))

    def __truediv__(self, name: str) -> Self:
        inner = copy(self)
        inner._below = (*self._below, *name.split("/"))
        inner.path = self._base.joinpath(*inner._below)
        return inner

    def hold(self, *, follow: bool = True) -> LocalFolder:
        """Return this very directory, whatever takes its name later or removes it.

        It stays open as long as the returned folder, or a folder below it, lives.

        Args:
            follow: Whether the base directory may be a link.

        Raises:
            NotADirectoryError: A link has the directory's name.
            OSError: There is no such directory, or the system does not name open files by ``/proc``.
        """
        own = self if follow or self._below else LocalFolder(self._base.parent, self._base.name)
        with own._opened() as descriptor:
            anchor = _Anchor(os.dup(descriptor))
        held = LocalFolder(Path(f"/proc/self/fd/{anchor.descriptor}"), shown=Path(str(self)))
        held._anchor = anchor
        with held._opened():
            pass
        return held

    @contextmanager
    def _opened(self, below: Sequence[str] = (), *, is_made: bool = False) -> Iterator[int]:
        """Open the directory, or one below it; yield the descriptor.

        Args:
            below: Names of directories from this one on.
            is_made: Whether to make the missing directories among ``below``.

        Raises:
            NotADirectoryError: A name below the base refers to a link, or to another entry that is no directory.
        """
        descriptor = os.open(self._base, _FOLDER)
        try:
            for depth, name in enumerate((*self._below, *below)):
                try:
                    if is_made and depth >= len(self._below):
                        with suppress(FileExistsError):
                            os.mkdir(name, dir_fd=descriptor)
                    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP):
                        raise _kind_error(errno.ENOTDIR, name, "is a link, or no directory") from None
                    raise
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _entry(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the directory that an entry is in; yield the descriptor and the entry's own name."""
        *below, last = name.split("/")
        with self._opened(below) as folder:
            yield folder, last

    # --- reading ------------------------------------------------------------------------------------------------

    def open_regular(self, name: str) -> tuple[int, int]:
        """Open a file for reading; return its descriptor and its size. A link is followed.

        Raises:
            FileNotFoundError: There is no such file.
            MalformedError: The name leads to something other than a regular file.
        """
        descriptor, status = open_regular(f"{self.path}/{name}")
        return descriptor, status.st_size

    def file_nbytes(self, name: str) -> int:
        """Return a file's size. A link is followed. Raises: as `open_regular`."""
        return regular_nbytes(f"{self.path}/{name}")

    @override
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        descriptor, nbytes = self.open_regular(name)
        try:
            # The size bounds the read: Python allocates as many bytes as it is asked for, however short the file is.
            return _pread(descriptor, start, nbytes if stop is None else min(stop, nbytes))
        finally:
            os.close(descriptor)

    @override
    def read_whole(self, name: str, most: int) -> bytes:
        descriptor, nbytes = self.open_regular(name)
        try:
            # The size of the open file: a save may have replaced the file at this path.
            if nbytes > most:
                raise too_long_error(name, most)
            return _pread(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)

    @override
    def open_local(self, name: str) -> OpenFile:
        return OpenFile(f"{self.path}/{name}")

    @override
    def find_short_file(self, sizes: Mapping[str, int]) -> str | None:
        # -1 is less than any size, so a missing file is a short one, even where it may be empty.
        return next((name for name, least in sizes.items() if self._nbytes(name) < least), None)

    def _nbytes(self, name: str) -> int:
        """Return a file's size; -1 if there is no such file."""
        try:
            return self.file_nbytes(name)
        except FileNotFoundError:
            return -1

    @override
    def names(self, prefix: str = "") -> list[str]:
        """Return the names of entries of this very directory that begin with ``prefix``, sorted."""
        return sorted(name for name in os.listdir(self.path) if name.startswith(prefix))

    def open_file(self, name: str) -> int:
        """Open a regular file for reading; return its descriptor. A link below the base directory is not followed.

        So a copy of a directory that a stranger prepared takes along no file from elsewhere.

        Raises:
            FileNotFoundError: There is no such file.
            NotADirectoryError: A link has the name of a folder.
            MalformedError: The name leads to a link, or to something other than a regular file.
        """
        with self._entry(name) as (folder, last):
            try:
                descriptor = os.open(last, os.O_RDONLY | _LOCK, dir_fd=folder)
            except OSError as error:
                if error.errno in NOT_A_FILE:
                    raise MalformedError(f"{self}/{name} is a link, or no regular file") from None
                raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise MalformedError(f"{self}/{name} is no regular file")
        return descriptor

    def inode(self, name: str) -> tuple[int, int]:
        """Return device and inode of an entry, which tell it from a later entry of its name."""
        with self._entry(name) as (folder, last):
            status = os.lstat(last, dir_fd=folder)
            return status.st_dev, status.st_ino

    def identity(self, name: str) -> FileIdentity:
        """Return the identity of a file, whatever takes its name later."""
        with self._entry(name) as (folder, last):
            return file_identity(os.lstat(last, dir_fd=folder))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each regular file below this directory; links are passed over, not followed.

        Raises:
            NotADirectoryError: The directory is a link.
            OSError: A directory cannot be read.
        """
        pending: list[tuple[str, ...]] = [()]
        while pending:  # not by recursion: a stranger's directories may be deeper than Python's stack
            below = pending.pop()
            with self._opened(below) as folder:
                for name in sorted(os.listdir(folder)):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        status = os.lstat(name, dir_fd=folder)
                        if stat.S_ISREG(status.st_mode):
                            yield "/".join([*below, name]), status
                        elif stat.S_ISDIR(status.st_mode) and len(below) < MAX_DEPTH:
                            pending.append((*below, name))

    # --- writing ------------------------------------------------------------------------------------------------

    def make(self, *, exist_ok: bool = True, mode: int = 0o777) -> None:
        """Make the directory, if it is not there.

        Args:
            exist_ok: Whether it may be there.
            mode: Its permissions, less the umask.

        Raises:
            FileExistsError: The directory is there, or something else has its name, and ``exist_ok`` is false.
            NotADirectoryError: A link has its name, or something else.
        """
        try:
            if self._below:
                with type(self)(self._base, *self._below[:-1])._opened() as parent:
                    os.mkdir(self._below[-1], mode, dir_fd=parent)
            else:
                os.mkdir(self._base, mode)
        except FileExistsError:
            if not exist_ok:
                raise
            with self._opened():
                pass

    def make_private(self) -> None:
        """Make a directory, if it is not there, that other users can neither read nor write.

        Raises:
            PermissionError: The directory is there, and others may write to it, or another user made it.
            NotADirectoryError: As `make`.
        """
        self.make(mode=0o700)
        with self._opened() as folder:
            found = os.fstat(folder)
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            reason = f"user {found.st_uid} made it" if found.st_uid else "other users may write to it"
            raise PermissionError(errno.EPERM, f"{reason} (mode {stat.S_IMODE(found.st_mode):o}): remove it", str(self))

    def new_file(self, name: str) -> int:
        """Create a file; return its descriptor, to write and to read. Raises: FileExistsError: The name is taken."""
        with self._entry(name) as (folder, last):
            return os.open(last, _NEW_FILE, 0o666, dir_fd=folder)

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file if there is none of that name yet; return whether there was none.

        Raises:
            OSError: The file system has no hard links.
        """
        with self._draft(name, data) as (folder, draft, last):
            try:
                os.link(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                return False
            return True

    @override
    def write(self, name: str, data: bytes) -> None:
        """Write a whole file; whatever has the name is removed first."""
        with self._entry(name) as (folder, last):
            _fill(_new_file(last, folder), data)

    @override
    def replace(self, name: str, data: bytes) -> None:
        """Write a draft, and rename it; a process that dies meanwhile may leave the draft. See `remove_drafts`."""
        with self._draft(name, data) as (folder, draft, last):
            os.rename(draft, last, src_dir_fd=folder, dst_dir_fd=folder)

    @contextmanager
    def rewrite(self, name: str) -> Iterator[int]:
        """Write a new file in the place of a file: as a draft, which is synced and renamed when the context ends well.

        Yields:
            The descriptor of the draft, to write and to read.
        """
        with self._draft(name, b"") as (folder, draft, last):
            descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def link(self, name: str, other: LocalFolder, other_name: str) -> None:
        """Give a file of another directory a further name here, in the place of whatever has the name. Durable.

        Raises:
            OSError: The file system has no hard links, or the other directory is on another one.
        """
        with self._entry(name) as (folder, last), other._entry(other_name) as (other_folder, other_last):
            draft = _draft_name(last)
            try:
                os.link(other_last, draft, src_dir_fd=other_folder, dst_dir_fd=folder, follow_symlinks=False)
                os.rename(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                # A rename of one name of a file to another name of it does nothing, so the draft may be left.
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
            os.fsync(folder)

    @contextmanager
    def _draft(self, name: str, data: bytes) -> Iterator[tuple[int, str, str]]:
        """Write a draft beside a file, and remove it at the end, if it is still there.

        Yields:
            The descriptor of their directory; the names of the draft and of the file there.
        """
        with self._entry(name) as (folder, last):
            draft = _draft_name(last)
            try:
                _fill(os.open(draft, _NEW_FILE, 0o666, dir_fd=folder), data)
                yield folder, draft, last
            finally:
                with suppress(OSError):
                    os.unlink(draft, dir_fd=folder)

    @override
    def share(self, source: Folder, sizes: Mapping[str, int]) -> bool:
        """Share files by hard links; where the file system refuses one, copy the file: as a reflink, where it can."""
        if not isinstance(source, LocalFolder):
            return False
        refusal: OSError | None = None
        for below, names in groupby(sorted(sizes), lambda name: name.rpartition("/")[0]):
            inner = below.split("/") if below else []
            with source._opened(inner) as old, self._opened(inner, is_made=True) as new:
                for name in names:
                    refusal = _share_file(name.rpartition("/")[2], sizes[name], old, new) or refusal
        if refusal is not None:
            _tell_copies(os.strerror(refusal.errno or 0), Path(str(source)).parent, self._base)
        return True

    def open_lock(self, name: str, *, to_write: bool) -> int:
        """Open a file whose record locks tell processes apart; return its descriptor. Does not wait.

        Args:
            name: The file.
            to_write: Whether to make the file if it is not there, and to write to it.

        Raises:
            FileNotFoundError: The file is not there.
            OSError: The name leads to a link, no regular file, or a file that has other names, maybe elsewhere.
        """
        with self._opened() as folder:
            try:
                mode = os.O_RDWR | os.O_CREAT if to_write else os.O_RDONLY
                descriptor = os.open(name, _LOCK | mode, 0o666, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                    raise _kind_error(error.errno, name, "is a link, or no file") from None
                raise
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(descriptor)
            raise _kind_error(errno.EMLINK, name, "is no regular file, or has other names")
        return descriptor

    @override
    def sync(self, names: Iterable[str]) -> None:
        """Wait until the files survive a power loss; the name of a directory stands for the names in it."""
        fsync.sync_all(self.path / name for name in names)

    @override
    def settle(self, names: Iterable[str]) -> None:
        fsync.settle(self.path / name for name in names)

    @override
    def early_sync(self, folder: str) -> AbstractContextManager[None]:
        return fsync.early_writeback(self.path / folder)

    @override
    def kvstore(self, *, to_write: bool = False) -> dict[str, Any]:
        """Return the specification; TensorStore reads fast only from memory-mapped files."""
        mode: dict[str, Any] = {"file_io_sync": False} if to_write else {"file_io_mode": {"mode": "memmap"}}
        return {"driver": "file", "path": f"{self.path.absolute()}/", **mode}

    # --- removing -----------------------------------------------------------------------------------------------

    @override
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and this directory once it is empty."""
        self.remove_files(names)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files; this directory stays."""
        for name in names:
            with self._entry(name) as (folder, last), suppress(FileNotFoundError):
                os.unlink(last, dir_fd=folder)

    @override
    def remove_tree(self, name: str) -> None:
        """Remove an entry with its whole content, if it is there; a link as a link.

        Raises:
            OSError: Something cannot be removed; whatever else can be is gone.
        """
        with self._entry(name) as (folder, last), suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(last, dir_fd=folder).st_mode):
                os.unlink(last, dir_fd=folder)
                return
            with suppress(RecursionError):
                shutil.rmtree(last, ignore_errors=True, dir_fd=folder)
            if _is_there(last, folder):
                _flatten(last, folder)
                shutil.rmtree(last, dir_fd=folder)  # also for the error

    def remove_drafts(self, *, before_s: float) -> None:
        """Remove the drafts of `replace` that processes which died have left.

        Args:
            before_s: Only entries that were last written before this time, in seconds since the epoch.
        """
        with self._opened() as folder:
            for name in os.listdir(folder):
                if _DRAFT_NAME.fullmatch(name):
                    with suppress(FileNotFoundError, IsADirectoryError):
                        if os.lstat(name, dir_fd=folder).st_mtime < before_s:
                            os.unlink(name, dir_fd=folder)


class _Anchor:
    """A descriptor that is closed when the last folder that has it is gone."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


@cache
def _tell_copies(reason: str, source: Path, target: Path) -> None:
    """Log that files are copied and not linked; once for a pair of folders, as it will be so for every checkpoint."""
    logger.warning("files shared by checkpoints in %s and %s are copied, not linked: %s", source, target, reason)


def _share_file(name: str, least: int, old: int, new: int) -> OSError | None:
    """Make a file of one open directory a file of another; return why it had to be copied, if it had to be."""
    found = os.stat(name, dir_fd=old, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_size < least:
        raise MalformedError(f"{name} is no file of at least {least} bytes")
    try:
        os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
    except FileExistsError:
        # Another client needs the file, too. If it is another file, that client has copied it.
        return None
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        _copy_file(name, old, new)
        return error
    return None


def _copy_file(name: str, old: int, new: int) -> None:
    """Copy a file; it gets its name when it is whole."""
    draft = f".{name.lstrip('.')}.{secrets.token_hex(8)}{_DRAFT_SUFFIX}"
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=old)
    try:
        with open(source, "rb", closefd=False) as read, open(os.open(draft, _NEW_FILE, 0o666, dir_fd=new), "wb") as to:
            try:
                while os.copy_file_range(source, to.fileno(), _COPY_NBYTES):
                    pass
            except OSError as error:
                if error.errno not in _NO_COPY_RANGE or read.tell():
                    raise
                shutil.copyfileobj(read, to)
        os.rename(draft, name, src_dir_fd=new, dst_dir_fd=new)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=new)
        raise
    finally:
        os.close(source)


def _new_file(name: str, folder: int) -> int:
    """Create a file in the place of whatever has its name; return the descriptor."""
    for _ in range(_NUM_TRIES):
        with suppress(FileExistsError):
            return os.open(name, _NEW_FILE, 0o666, dir_fd=folder)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    """Return bytes of an open file; fewer where it ends before. The kernel reads up to 2 GiB at a time."""
    if start >= stop:
        return b""
    data = os.pread(descriptor, stop - start, start)
    parts = [data]
    position = start + len(data)
    while data and position < stop:
        data = os.pread(descriptor, stop - position, position)
        parts.append(data)
        position += len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _fill(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


def _flatten(name: str, folder: int) -> None:
    """Move all directories of a tree up to its top: a tree deeper than Python's stack cannot be removed as it is."""
    top = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    try:
        pending = _folders_in(top)
        while pending:
            with suppress(OSError):  # a directory that is not moved fails the removal
                inner = os.open(pending.pop(), _FOLDER | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for each in _folders_in(inner):
                        new = secrets.token_hex(8)
                        os.rename(each, new, src_dir_fd=inner, dst_dir_fd=top)
                        pending.append(new)
                finally:
                    os.close(inner)
    finally:
        os.close(top)


def _folders_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _is_there(name: str, folder: int) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def is_draft(name: str) -> bool:
    """Whether a file's name is a draft's; a process that died may have left it."""
    return _DRAFT_NAME.fullmatch(name.rpartition("/")[2]) is not None


def _draft_name(name: str) -> str:
    return f".{name.lstrip('.')}.{secrets.token_hex(8)}{_DRAFT_SUFFIX}"


def _kind_error(number: int, name: str, kind: str) -> OSError:
    return OSError(number, f"{name} {kind}, and nothing is written through it: remove it", name)


def make_folders(folder: Path) -> None:
    """Make a directory and its parents, durably: a power loss that took a parent takes all checkpoints below it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    for path in missing:
        fsync.sync(path.parent)


def rename(source: Path, target: Path, flag: int = 0) -> None:
    """Rename an entry of a directory; if it is a link, the link.

    Args:
        source: Its path.
        target: Its new path.
        flag: `NO_REPLACE`, `EXCHANGE`, or 0: a file or an empty directory at the target is replaced.

    Raises:
        OSError: The system refuses, with one of `UNSUPPORTED` if it cannot exchange names.
    """
    if not flag:
        os.rename(source, target)
        return
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS  # also where the C library has no such function
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
            return
        code = ctypes.get_errno()
    if flag == NO_REPLACE and code in UNSUPPORTED:
        if not os.path.lexists(target):
            # A plain rename replaces an empty directory at most, never a checkpoint.
            os.rename(source, target)
            return
        code = errno.EEXIST
    raise OSError(code, os.strerror(code), str(target))
