"""The commit, by which a checkpoint appears at its path whole, or not at all: its interface and its two kinds.

A `CommitTarget` is the path or URL of one checkpoint, which is there or will be. A save builds the checkpoint in the
folder of a `CommitAttempt`, and the attempt's `commit` makes it the checkpoint in one step:

* on a file system by a rename (`dtckpt.storage.commit_by_rename`);
* on an object store, which cannot rename, by a small object that is created once (`dtckpt.storage.commit_by_decision`).

::

    target = commit_target_of(location)
    leader:         attempt = target.begin(token)       other clients:  attempt = target.join(token)
                                                                        attempt.validate(client)
    every client:   attempt.folder.write(...)
    leader:         attempt.commit(overwrite=...)  or  attempt.abandon()
    reader:         target.locate().read(...)

The rest of the package saves and reads through these two interfaces, and does not know which commit it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from dtckpt.errors import ConfigError
from dtckpt.storage import s3_gcs_folder
from dtckpt.storage.commit_by_decision import AttemptRegister, ObjectStoreTarget
from dtckpt.storage.commit_by_rename import DirectoryTarget
from dtckpt.storage.folder import Folder, open_folder
from dtckpt.storage.location import Location


class CommitAttempt(Protocol):
    """One attempt at a save. Its leader begins it, and commits or abandons it; the other clients join it."""

    @property
    def token(self) -> str:
        """The attempt's name, with which the other clients join it."""
        ...

    @property
    def folder(self) -> Folder:
        """The folder in which the clients build the checkpoint."""
        ...

    def keep_alive(self) -> AbstractContextManager[None]:
        """Show, in a context, that the leader lives, so that no client collects the attempt as a leftover."""
        ...

    def validate(self, client: int) -> None:
        """Check that a client sees the attempt that the leader began.

        Raises:
            StorageError: The client does not see it.
        """
        ...

    def commit(
        self, *, overwrite: bool, is_durable: bool = True, markers: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        """Make the content of `folder` the checkpoint, in one step. Called by the leader, once the manifest is written.

        Args:
            overwrite: Whether to replace a checkpoint.
            is_durable: Whether to fsync.
            markers: Files, by name, by which other programs find a checkpoint. Markers appear at the target right after
                the commit, so that they lead only to a committed checkpoint.

        Raises:
            CheckpointExistsError: There is a checkpoint, or something else, at the target meanwhile.
            StorageError: Another attempt took over.
        """
        ...

    def is_taken_over(self) -> bool:
        """Whether another, newer attempt took this one's folder away, or gave this one up."""
        ...

    def abandon(self) -> None:
        """Remove the attempt's folder. Called by the leader of an attempt that failed; harmless after a commit."""
        ...

    def sweep(self) -> None:
        """Remove files that this client wrote after the attempt's folder was removed. Called after a failed attempt."""
        ...


class CommitTarget(Protocol):
    """The path or URL of one checkpoint, which is there or will be."""

    @property
    def where(self) -> Location:
        """The path or URL."""
        ...

    @property
    def folder(self) -> Folder:
        """The folder at that path or URL."""
        ...

    def check_target(self, *, overwrite: bool) -> None:
        """Check that a save may write here.

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

    def begin(self, token: str) -> CommitAttempt:
        """Begin an attempt; once it is committed, no older attempt can be. Called by the leader.

        A directory belongs to the newest attempt as soon as that begins, an object store's target when it commits.

        Args:
            token: Tells the attempt from others. On an object store the attempt's own token has a number in front.
        """
        ...

    def join(self, token: str) -> CommitAttempt:
        """Return the attempt of that token, which the leader has begun. Called by the other clients."""
        ...

    def pin(self) -> AbstractContextManager[None]:
        """Keep other processes, in a context, from removing the checkpoint, where storage has locks."""
        ...

    def remove(self) -> None:
        """Remove the checkpoint, in one step, unless it is pinned."""
        ...


def commit_target_of(where: Location) -> CommitTarget:
    """Return the commit target at a path or URL.

    Raises:
        ConfigError: No back end has this scheme, or the URL has no name to put a checkpoint at.
    """
    if isinstance(where, Path):
        return DirectoryTarget(where)
    parent = where.parent
    if not parent.text.strip("/") and where.scheme in s3_gcs_folder.SCHEMES:
        raise ConfigError(f"{where} is a bucket, not a checkpoint; name a place in it, as in {where}/step_1")
    return ObjectStoreTarget(AttemptRegister(where, open_folder(parent)))
