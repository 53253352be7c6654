"""The interface of the commit: a target, and the attempts to save to it. See `dtckpt.storage.commit`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from dtckpt.storage.folder import Folder
from dtckpt.storage.url import Url


class CommitAttempt(Protocol):
    """One attempt at a save. Its leader begins it, and commits or abandons it; the other clients join it."""

    token: str
    """The attempt's name, with which the other clients join it."""
    folder: Folder
    """The folder in which the clients build the checkpoint."""

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

    where: Path | Url
    """The path or URL."""
    folder: Folder
    """The folder at that path or URL."""

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

    def resume(self, token: str) -> AbstractContextManager[CommitAttempt]:
        """Begin an attempt alone, in a context, or go on with the files of the attempt that a dead process left.

        The files stay if the context ends without a commit, so that a later call finds them.

        Args:
            token: The digest of the content: equal tokens promise equal files.

        Raises:
            CheckpointConflictError: Another process of this token is at work, as far as storage tells.
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
