"""Build a checkpoint on storage: begin or join an attempt, keep it alive, merge all parts, commit or abandon it.

::

    leader            begin, keep alive --- write --- merge --- commit
    other clients     join ---------------- write
    a failure         the leader abandons the attempt; the others sweep files that they wrote too late

Clients that save together, ranks that save through DCP and workers that reshard all build in this way. How they meet in
between is their own: at barriers, in DCP's collectives, or on storage.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.merge import merge_clients, remove_working_files
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.reuse import Base
from dtckpt.errors import CheckpointError
from dtckpt.format.manifest import Costs, Manifest
from dtckpt.storage.commit_target import CommitAttempt, CommitTarget
from dtckpt.storage.failures import taken_over_error
from dtckpt.storage.zarr_files import validate_kind


def validate_target(target: CommitTarget, options: SaveOptions, codecs: Iterable[str]) -> None:
    """Check that a save may write at a target, and that storage there supports ``options.kvstore`` and the codecs.

    Raises:
        ConfigError: Storage there has no such kind of checkpoint, or no such codec.
        CheckpointExistsError: There is a checkpoint and ``options.overwrite`` is false, or something else.
    """
    validate_kind(options.kvstore, target.folder, codecs)
    target.check_target(overwrite=options.overwrite)


class Construction:
    """The attempt that one client has under construction on storage.

    Its attributes are set one after the other, as the save goes on, because the save may fail after each.

    Args:
        target: Where the checkpoint will be; None if only `build_at` says so.
        on_failure: Called with the error that ends the construction, before anything is removed.
    """

    def __init__(
        self, target: CommitTarget | None = None, *, on_failure: Callable[[BaseException], object] = lambda _: None
    ) -> None:
        self.led: CommitAttempt | None = None
        """On the leader: the attempt that it began."""
        self.joined: CommitAttempt | None = None
        """The attempt as this client writes to it."""
        self._target = target
        self._alive = ExitStack()
        self._on_failure = on_failure

    @property
    def target(self) -> CommitTarget:
        """Where the checkpoint will be."""
        assert self._target is not None  # noqa: S101  `build_at` comes first
        return self._target

    def build_at(self, target: CommitTarget) -> None:
        """Set the target of the attempt that this client leads or joins."""
        self._target = target

    def lead(self, number: int, incarnation: int) -> str:
        """Begin the attempt; return the token that the other clients join it by. See `validate_target`.

        Args:
            number: Number of the job's attempt. The token begins with this number: `commit_by_rename` compares it.
            incarnation: This process. A random part of the token tells apart the saves of one process.
        """
        self.led = self.target.begin(f"{number}-{incarnation:x}-{secrets.token_hex(4)}")
        self._alive.enter_context(self.led.keep_alive())
        return self.led.token

    def join(self, token: str) -> CommitAttempt:
        """Return the attempt that the leader has begun."""
        self.joined = self.joined or self.led or self.target.join(token)
        return self.joined

    @contextmanager
    def takeover_explained(self) -> Iterator[None]:
        """If the work inside fails because a newer attempt took this one's folder away, say so instead."""
        try:
            yield
        except CheckpointError as error:
            # Without its folder the work fails somewhere, with an error of storage that says nothing of the reason.
            if self.joined is not None and self.joined.is_taken_over():
                raise taken_over_error(self.target.where) from error
            raise

    @contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Remove the files under construction if the work inside fails."""
        try:
            yield
        except BaseException as error:
            self._on_failure(error)
            self.abandon()
            raise

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End the construction with the context: no longer keep the attempt alive, and remove it after a failure."""
        with self.removed_on_failure():
            yield
        self._alive.close()

    def commit(
        self,
        merge: Merge,
        options: SaveOptions,
        *,
        working_files: Sequence[str] = (),
        markers: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Make one checkpoint of all clients' parts. Called by the leader.

        Args:
            merge: The parts.
            options: See `SaveOptions`.
            working_files: Files in the clients' folders that no reader needs, beside the files of `ClientWriter`.
            markers: As for `CommitAttempt.commit`.

        Raises:
            CheckpointError: As `merge_clients` and `CommitAttempt.commit`.
        """
        attempt = self.led
        assert attempt is not None  # noqa: S101  the leader has begun it
        with self.takeover_explained():
            merge.run(attempt, options)
            # Before the commit: after it the folder is the checkpoint, which does not change any more.
            clients, has_moves = sorted(merge.chunk_lists), merge.plan.has_moves
            remove_working_files(attempt.folder, clients, has_moves=has_moves, names=working_files)
        # The folder moves with the commit: then it would look taken over.
        attempt.commit(overwrite=options.overwrite, is_durable=options.fsync, markers=markers)

    def abandon(self) -> None:
        """Remove the files under construction; harmless after a commit."""
        with self._alive:
            if self.led is not None:
                self.led.abandon()
            self.sweep()

    def sweep(self) -> None:
        """Remove a folder that late writes of this client made again, after the leader had taken it away."""
        if self.joined is not None:
            self.joined.sweep()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Merge:
    """The parts of all clients of a save, and the facts that make them one checkpoint.

    Args:
        plan: The plan that the clients followed.
        chunk_lists: Digest of every client's chunk list, by client.
        tree: The state tree, as JSON.
        job: Name of the job.
        num_clients: Number of clients that saved.
        costs: Cost of each client's phases.
        contents: As for `merge_clients`.
        document_writers: As for `merge_clients`.
        base: As for `merge_clients`.
    """

    plan: SavePlan
    chunk_lists: Mapping[int, int]
    tree: bytes
    job: str
    num_clients: int
    costs: Costs = field(default_factory=dict)
    contents: Mapping[str, int] = field(default_factory=dict)
    document_writers: Sequence[int] | None = None
    base: Base | None = None

    def run(self, attempt: CommitAttempt, options: SaveOptions) -> None:
        """Merge the parts, and write the manifest. Called by the leader. Raises: As `merge_clients`."""
        manifest = Manifest(
            kvstore=options.kvstore,
            arrays={},
            tree=self.tree,
            job=self.job,
            num_clients=self.num_clients,
            # By this a reader finds out that a save has replaced the checkpoint that it reads.
            attempt=attempt.token,
            costs=self.costs,
            raw_bits=bool(options.raw_bits),
        )
        merge_clients(
            self.plan,
            attempt.folder,
            self.chunk_lists,
            manifest,
            is_durable=options.fsync,
            contents=self.contents,
            document_writers=self.document_writers,
            base=self.base,
        )
