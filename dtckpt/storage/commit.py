"""Places: where a checkpoint appears whole, or not at all; a directory, or a prefix on an object store.

The rest of the package saves and reads by what is said here, and does not know which of the two it has.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from dtckpt.errors import ConfigError, StorageError
from dtckpt.storage import commit_by_rename
from dtckpt.storage.commit_by_decision import ObjectPlace, Register
from dtckpt.storage.directory_lock import locked
from dtckpt.storage.failures import translated
from dtckpt.storage.folder import Folder, KeyValueFolder, LocalFolder, ObjectFolder
from dtckpt.storage.location import Location, Url

SILENCE_S = 60
"""How long an object store may send and take nothing until a request is given up, and made anew (`folders.RETRIES`)."""


class Attempt(Protocol):
    """One attempt at a save. Its leader begins it, and commits or abandons it; the other clients join it."""

    @property
    def token(self) -> str:
        """What the other clients join by."""
        ...

    @property
    def folder(self) -> Folder:
        """Where the checkpoint is built."""
        ...

    def alive(self) -> AbstractContextManager[None]:
        """Show, in a context, that the leader lives: whoever collects leftovers leaves the attempt alone."""
        ...

    def validate(self, client: int) -> None:
        """Check that a client sees what the leader began.

        Raises:
            StorageError: It does not.
        """
        ...

    def commit(self, *, overwrite: bool, is_durable: bool = True) -> None:
        """Make what was built the checkpoint, in one step. Called by the leader, when the manifest is written.

        Raises:
            CheckpointExistsError: Something took the place meanwhile.
            StorageError: Another attempt took over.
        """
        ...

    def is_taken_over(self) -> bool:
        """Whether what is built was taken away, as by another attempt, which then is the newest."""
        ...

    def abandon(self) -> None:
        """Take away what was built. Called by the leader of an attempt that failed; harmless if it is committed."""
        ...

    def sweep(self) -> None:
        """Take away what this client wrote when all was taken away already. Called when an attempt has failed."""
        ...


class Place(Protocol):
    """Where a checkpoint is, or will be."""

    @property
    def where(self) -> Location:
        """Its path or URL."""
        ...

    @property
    def folder(self) -> Folder:
        """The folder of that name."""
        ...

    def check_target(self, *, overwrite: bool) -> None:
        """Refuse a place that may not be written.

        Raises:
            CheckpointExistsError: There is a checkpoint and ``overwrite`` is false, or something else.
        """
        ...

    def locate(self) -> Folder:
        """Return the folder that holds the committed checkpoint.

        Raises:
            CheckpointNotFoundError: Nothing is there.
            CheckpointIncompleteError: There is data, but it was never committed.
        """
        ...

    def begin(self, token: str) -> Attempt:
        """Begin an attempt; once it is committed, no older one is. Called by the leader.

        A directory is owned by the newest attempt from its beginning on, an object store's place from its commit on.
        """
        ...

    def join(self, token: str) -> Attempt:
        """Return the attempt of that token, which the leader has begun."""
        ...

    def pinned(self) -> AbstractContextManager[None]:
        """Keep the checkpoint, in a context, from being removed by another process, where locks can."""
        ...

    def remove(self) -> None:
        """Remove the checkpoint, in one step, unless it is pinned."""
        ...


class DirectoryPlace:
    """A directory on a file system; see `dtckpt.storage.commit_by_rename`."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.folder = LocalFolder(where)

    def check_target(self, *, overwrite: bool) -> None:
        """As `Place.check_target`."""
        commit_by_rename.check_target(self.where, overwrite=overwrite)

    def locate(self) -> LocalFolder:
        """As `Place.locate`."""
        return LocalFolder(commit_by_rename.locate(self.where))

    def begin(self, token: str) -> DirectoryAttempt:
        """As `Place.begin`."""
        return DirectoryAttempt(commit_by_rename.begin(self.where, token))

    def join(self, token: str) -> DirectoryAttempt:
        """As `Place.join`."""
        path = commit_by_rename.staging_path(self.where, token)
        return DirectoryAttempt(commit_by_rename.Staging(path, self.where, token, commit_by_rename.identity(path)))

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """As `Place.pinned`."""
        with ExitStack() as held:
            # Why it is not there is for the reader to say: it says so to all clients.
            with suppress(OSError):
                held.enter_context(locked(commit_by_rename.locate(self.where), is_shared=True))
            yield

    def remove(self) -> None:
        """As `Place.remove`."""
        folder = commit_by_rename.locate(self.where)
        with translated("remove the checkpoint", self.where), locked(folder) as is_free:
            if is_free:
                commit_by_rename.discard(folder, self.where, is_durable=True)


class DirectoryAttempt:
    """A directory under construction."""

    def __init__(self, staging: commit_by_rename.Staging) -> None:
        self.token = staging.token
        self.folder = LocalFolder(staging.path)
        self._staging = staging
        # While it is open, its inode is given to no directory that late writes make in its place.
        with suppress(FileNotFoundError):
            weakref.finalize(self, os.close, os.open(staging.path, os.O_RDONLY | os.O_DIRECTORY))

    @contextmanager
    def alive(self) -> Iterator[None]:
        """As `Attempt.alive`: the directory's lock."""
        with locked(self._staging.path):
            yield

    def validate(self, client: int) -> None:
        """As `Attempt.validate`."""
        if not self._staging.path.is_dir():
            raise StorageError(
                f"client {client} does not see {self._staging.path}, which the leader made; every client must see "
                "one shared file system"
            )

    def commit(self, *, overwrite: bool, is_durable: bool = True) -> None:
        """As `Attempt.commit`."""
        commit_by_rename.commit(self._staging, overwrite=overwrite, is_durable=is_durable)

    def is_taken_over(self) -> bool:
        """As `Attempt.is_taken_over`."""
        with suppress(OSError):  # asked when something has failed, which is what is to be said
            return not commit_by_rename.is_own(self._staging)
        return False

    def abandon(self) -> None:
        """As `Attempt.abandon`."""
        commit_by_rename.abandon(self._staging)

    def sweep(self) -> None:
        """As `Attempt.sweep`."""
        commit_by_rename.sweep(self._staging.path, self._staging.target, self._staging.inode)


def place_of(where: Location) -> Place:
    """Return the place of a checkpoint.

    Raises:
        ConfigError: Nothing is known of such URLs, or this one has no name to put a checkpoint at.
    """
    if isinstance(where, Path):
        return DirectoryPlace(where)
    parent = where.parent
    if not parent.text.strip("/") and where.scheme in _SPECS:
        raise ConfigError(f"{where} is a bucket, not a checkpoint; name a place in it, as in {where}/step_1")
    return ObjectPlace(Register(where, open_folder(parent)))


def open_folder(where: Url) -> ObjectFolder:
    """Return the folder at a URL. Raises: as `place_of`."""
    if where.scheme not in _SPECS:
        from dtckpt.storage.fsspec_folder import open_foreign

        return open_foreign(str(where))
    bucket, _, path = where.text.partition("/")
    if not bucket:
        raise ConfigError(f"{where} names no bucket")
    _bound_waits()
    return KeyValueFolder({**_SPECS[where.scheme](), "bucket": bucket}, path, str(where))


def _bound_waits() -> None:
    """Have TensorStore give up requests that a server leaves without an answer; it would wait for ever.

    It asks the environment alone, when it makes its first request. What is said there already stays.
    """
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(SILENCE_S))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def _s3_spec() -> dict[str, Any]:
    """Return TensorStore's specification of S3, as the environment has it.

    Conditional writes are asked for by name: left alone, TensorStore looks first and writes then, where the endpoint
    is not Amazon's.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    spec: dict[str, Any] = {"driver": "s3", "use_conditional_write": True}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}
    if endpoint:
        # TensorStore cannot ask an endpoint that is not Amazon's for the region.
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    return spec


def _gcs_spec() -> dict[str, Any]:
    """Return TensorStore's specification of Google Cloud Storage; it finds credentials by itself."""
    return {"driver": "gcs"}


_SPECS = {"s3": _s3_spec, "gs": _gcs_spec}
"""Schemes that TensorStore reaches, and how."""
