"""`save`: write a state tree as one checkpoint, together with all clients of the job.

Each client runs a save as a `SaveAttempt`. `SaveAttempt.begin` ends when all clients agree on the plan, and returns a
`BegunSave`. `BegunSave.complete` does the rest, also in another thread: write, merge, commit. The drawing in
`dtckpt.checkpoint.collective` shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.participants import Group, participants_of
from dtckpt.checkpoint.saving import save_handle
from dtckpt.checkpoint.saving.agree import (
    DESCRIPTION_NAME,
    TREE_NAME,
    Agreed,
    Agreement,
    Proposal,
    agree,
    put_text,
    read_all,
    read_text,
    unite_trees,
)
from dtckpt.checkpoint.saving.construction import Construction, Merge, validate_target
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.replica_rules import validate_rules_used
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.reuse import NO_REUSE, Base, Reuse, find_reuse, open_base
from dtckpt.checkpoint.saving.state import MemorySource, State, state_of_tree
from dtckpt.checkpoint.saving.stored_dtypes import validate_all_used
from dtckpt.checkpoint.saving.write import ClientWriter, stored_elements
from dtckpt.checkpoint.timing import Written, find_slow
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import CheckpointError, DtckptError
from dtckpt.storage import commit
from dtckpt.storage.commit_target import CommitAttempt
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.location import Location, location_of
from dtckpt.storage.reused_chunks import drop_nodes

logger = logging.getLogger("dtckpt.checkpoint")

Stage = Callable[[State, SavePlan, Collective], State]
"""Copies a client's planned state, so that later changes of its tensors do not reach the copy."""


def save(
    path: str | Location,
    tree: Any,
    *,
    options: SaveOptions | None = None,
    step: int | None = None,
    group: Group | None = None,
    base: str | Location | None = None,
) -> SaveReport:
    """Save a state tree as the checkpoint at ``path``.

    Clients may pass different keys: the checkpoint is the union of their trees. All clients that pass a key save it,
    and its value must be the same on them: either a tensor of one shape and dtype, whose shards are equal or apart, or
    one plain value. Tensors of one name on several slices of a mesh are one tensor.

    Collective: Over all clients of the job, or of ``group``; barriers ``save/begin``, ``save/written`` and
    ``save/merged``. Unevenly nested shards that share chunks need ``save/edges``, too; ``save/described`` and
    ``save/united`` are added where clients pass different things for the first time. Every client returns, or every
    client raises the same error. After an error the path is unchanged; or, if a client was lost or storage failed
    during the commit, it holds the new checkpoint. The path never holds anything else.

    Blocks: On storage, and on the slowest client, at each barrier at most ``options.timeout_s`` seconds; before that,
    on a `save_async` in flight. If that save failed and the caller has not seen its error, this call raises the error
    and saves nothing.

    Args:
        path: Directory of the checkpoint, whose parents are made; or a URL.
        tree: Nested containers of DTensors (also PyTorch's), tensors (a copy on every client that passes them, or parts
            as `Shards`), plain values, and objects with ``state_dict()`` and ``load_state_dict()``. Containers are
            dicts, lists, tuples, types of `collections`, namespaces, named tuples and dataclasses; see
            docs/checkpointing.md.
        options: See `SaveOptions`.
        step: The step of the training run, from 0 on, which tells which save this is. Clients compare it, so that a
            save that one of them began alone, or skipped, is never joined to another step of the others. Default:
            clients compare how many saves each has begun, which is as good unless clients skip saves while others go
            on without them.
        group: The clients that save: a process group, or a sequence of client ids; default: all clients of the job.
            Groups without a common client may save at the same time, to different paths.
        base: An earlier checkpoint of the same kind. Parts of tensors that have not changed since are shared with it,
            by hard links or copies inside the store, and not written again. Both checkpoints stay whole, whichever is
            removed. If it cannot serve as a base, a warning says why, and everything is written.

    Raises:
        CheckpointExistsError: There is something at the path; ``options.overwrite`` replaces a checkpoint.
        TreeError: The tree holds something that cannot be saved.
        TensorNameError: A key cannot be part of a tensor's name.
        DTypeError: A tensor's dtype cannot be stored, or its elements do not lie in dense memory.
        SaveDisagreementError: Clients pass different values under one key; or no client passes a part of a tensor; or,
            with ``SaveOptions(keys="same")``, some clients lack a key; or clients are at different saves. Nothing is
            committed then, and the next save finds them level.
        ComponentError: Clients disagree on a tensor's shape, dtype or layout.
        ReplicaMismatchError: Copies of one value differ; see `SaveOptions.check_replicas`, `Shards` and `PerClient`.
        MeshError: ``group`` lacks this client, or names a client that the job does not have.
        ConfigError: ``step`` is negative or not an integer.
        ClientLostError: A client died.
        BarrierTimeoutError: A client did not arrive in time.
        StorageError: Storage refused; `StorageFullError` and `StoragePermissionError` are its common cases.

    >>> import tempfile, torch, dtckpt
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> report = dtckpt.save(path, {"weight": torch.ones(2, 3), "step": 1})
    >>> dtckpt.restore(path)["step"]
    1
    """
    coordination = current_coordination()
    options = options or SaveOptions()
    participants = participants_of(group, coordination.member)
    return save_state(
        path,
        lambda: state_of_tree(tree, options, coordination.member.client, participants),
        options=options,
        coordination=coordination,
        participants=participants,
        step=step,
        base=base,
    )


def save_state(
    path: str | Location,
    collect: Callable[[], State],
    *,
    options: SaveOptions | None = None,
    coordination: Coordination | None = None,
    participants: Sequence[int] | None = None,
    step: int | None = None,
    base: str | Location | None = None,
) -> SaveReport:
    """Run the save protocol. Collective and errors: as `save`, over ``participants``.

    Args:
        path: Where the checkpoint will be.
        collect: Returns this client's description of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The connection to the other clients; default: this process's connection.
        participants: The clients that save; default: all of the job.
        step: Which save this is; see `save`.
        base: See `save`.
    """
    options = options or SaveOptions()
    save_handle.wait_until_free(options.timeout_s)
    coordination = coordination or current_coordination()
    attempt = SaveAttempt(path, collect, options, coordination, participants, step=step, base=base)
    with attempt.collective.process_lock():
        return attempt.begin().complete()


class SaveAttempt:
    """A save that has not begun yet.

    The caller holds ``collective.process_lock()`` from `begin` to the end of `BegunSave.complete`. An attempt that
    fails in either leaves nothing under construction.

    Args:
        path: Where the checkpoint will be.
        collect: Returns this client's description of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The connection to the other clients.
        participants: The clients that save; default: all of the job.
        stage: Copies the state before `begin` returns; default: the state stays in the tensors' own memory.
        extra_files: Files, by name, that the leader adds to the checkpoint; ``collect`` may still change them.
        step: Which save this is; see `dtckpt.save`.
        follow_link: As for `location_of`.
        base: See `dtckpt.save`.
    """

    def __init__(
        self,
        path: str | Location,
        collect: Callable[[], State],
        options: SaveOptions,
        coordination: Coordination,
        participants: Sequence[int] | None = None,
        *,
        stage: Stage | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        step: int | None = None,
        follow_link: bool = True,
        base: str | Location | None = None,
    ) -> None:
        self.collective = Collective(coordination, "save", options.timeout_s, participants)
        self._path = path
        self._collect = collect
        self._options = options
        self._member = coordination.member
        self._stage = stage
        self._extra_files = {} if extra_files is None else extra_files
        self._step = step
        self._follow_link = follow_link
        self._base_path = base
        self._base: Base | None = None
        self._state: State | None = None

    def begin(self) -> BegunSave:
        """Plan, agree on the plan with the other clients, and stage.

        Collective: Barrier ``save/begin``; and ``save/described`` and ``save/united`` where clients save different
        things for the first time.
        """
        collective, phases = self.collective, self.collective.phases
        phases.begin(self._path, is_shown=self._options.progress and collective.client == 0)
        construction = Construction(on_failure=phases.end)

        def show(proposal: Proposal, agreement: Agreement) -> None:
            attempt = construction.join(agreement.token)
            put_text(attempt, collective.client, DESCRIPTION_NAME, agreement.descriptions, proposal.text)
            put_text(attempt, collective.client, TREE_NAME, agreement.trees, proposal.state.tree)

        def read(name: str, client: int, digest: int) -> bytes:
            assert construction.joined is not None  # noqa: S101  `show` comes first
            return read_text(construction.joined.folder, name, client, digest)

        with construction.removed_on_failure():
            agreed = agree(
                collective, lambda: self._propose(construction), self._copy, read, step=self._step, show=show
            )
            agreed = self._shared(agreed, construction)
            plan, staged = agreed.plan, agreed.staged
            validate_all_used(tuple(rule[0] for rule in self._options.stored_dtypes), plan)
            validate_rules_used(self._options, plan)
            if isinstance(staged, Exception):
                # The others are past their last round; they learn of the failure in their next one.
                collective.run_round("edges" if plan.has_moves else "written", lambda: _fail(staged))
            phases.expect("write", plan.loads.get(collective.client, 0) - agreed.state.reuse.nbytes)
            return BegunSave(
                path=self._path,
                options=self._options,
                job=self._member.job,
                extra_files=self._extra_files,
                collective=collective,
                agreed=agreed,
                construction=construction,
                base=self._base,
            )

    def _propose(self, construction: Construction) -> tuple[Proposal, bytes]:
        """Describe and plan the state; on the leader, begin to build. Return this client's vote, too."""
        # If the last save failed in the background and the caller has not seen it, all clients raise its error here.
        save_handle.raise_unseen_failure()
        # Resolved here: a save in the background keeps its path when the process changes its working directory.
        target = commit.commit_target_of(location_of(self._path, follow_link=self._follow_link))
        construction.build_at(target)
        proposal = Proposal.of(self._collect(), self.collective.participants, self._options)
        token = ""
        if self.collective.is_leader:
            # Before the attempt begins: a save that is refused must not remove another save's files under
            # construction.
            validate_target(target, self._options, (spec.codec for spec in proposal.state.specs))
            token = construction.lead(self._member.attempt, self._member.incarnation)
        if self._base_path is not None:
            self._state, self._base = proposal.state, self._open_base(self._base_path, construction.led)
        base = 0 if self._base is None else self._base.identity
        return proposal, proposal.summary(str(target.where), token, base).to_bytes()

    def _open_base(self, path: str | Location, led: CommitAttempt | None) -> Base | None:
        """Open the base; on the leader, also note its facts for the merge. None if it cannot be a base."""
        try:
            base = open_base(location_of(path), self._options.kvstore)
            if led is not None:
                with translate_errors("share the database of the base {}", led.folder, path, is_read=True):
                    if not base.chunks.share_nodes(led.folder):
                        raise CheckpointError(f"storage at {led.folder} cannot copy files by itself")
        except DtckptError as error:
            if led is not None:
                self._tell_written(error)
                drop_nodes(led.folder)
            return None
        return base

    def _tell_written(self, reason: object) -> None:
        logger.warning("save of %s: nothing is reused of %s: %s", self._path, self._base_path, reason)

    def _copy(self, state: State, plan: SavePlan) -> State:
        """Stage the state while waiting for the others: the copy hides the wait.

        Without staging, other threads read the state later, on other streams; so the GPU work that fills it must have
        ended. The chunks that the base has are found before the copy, unless elements must be copied to be looked at.
        """
        if isinstance(state.source, MemorySource):
            state.source.synchronize()
            if not state.source.is_elsewhere:
                state = self._compared(state, plan)
        if self._stage is not None:
            with self.collective.phases.measure("stage"):
                state = self._stage(state, plan, self.collective)
        return self._compared(state, plan)

    def _compared(self, state: State, plan: SavePlan) -> State:
        """Find the chunks that the base has already; once."""
        base, client = self._base, self.collective.client
        if base is None or state.reuse is not NO_REUSE:
            return state
        fetch, with_content = partial(stored_elements, state.source), self._options.content_digest
        with self.collective.phases.measure("compare"):
            try:
                return replace(state, reuse=find_reuse(plan, client, base, fetch, with_content=with_content))
            except CheckpointError as error:
                self._tell_written(error)
                return replace(state, reuse=Reuse())

    def _shared(self, agreed: Agreed, construction: Construction) -> Agreed:
        """Share the base's files, now that all clients agree on the base; else stage all of the state.

        The tensors have not changed yet: so the save loses nothing if the base is gone meanwhile.
        """
        base, state, self._state = self._base, self._state, None
        if base is None or state is None or isinstance(agreed.staged, Exception):
            return agreed
        try:
            if agreed.agreement.base == base.identity:
                if agreed.staged.reuse.shared:
                    with self.collective.phases.measure("compare"):
                        attempt = construction.join(agreed.agreement.token)
                        attempt.validate(self.collective.client)
                        agreed.staged.reuse.share(base, attempt.folder)
                return agreed
            self._base = None
            if construction.led is not None:
                self._tell_written("the clients see different checkpoints there")
                drop_nodes(construction.led.folder)
        except CheckpointError as error:
            self._tell_written(error)
        try:
            # An empty `Reuse` is a result, so nothing is compared again.
            return replace(agreed, staged=self._copy(replace(state, reuse=Reuse()), agreed.plan))
        except Exception as error:
            return replace(agreed, staged=error)


def _fail(error: Exception) -> None:
    """Raise an error, as this client's part of a round."""
    raise error


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BegunSave:
    """A save on which all clients have agreed; `complete` writes and commits it.

    Args:
        path: The path that the caller gave.
        options: See `SaveOptions`.
        job: Name of the job.
        extra_files: Files, by name, that the leader adds to the checkpoint.
        collective: The operation, after its first round.
        agreed: The agreed plan, and this client's staged state.
        construction: The checkpoint under construction, on this client's side.
        base: The base on which all clients have agreed, if any.
    """

    path: str | Location
    options: SaveOptions
    job: str
    extra_files: Mapping[str, bytes]
    collective: Collective
    agreed: Agreed
    construction: Construction
    base: Base | None = None

    @property
    def where(self) -> Location:
        """Where the checkpoint will be, also if the process changes its working directory meanwhile."""
        return self.construction.target.where

    def complete(self) -> SaveReport:
        """Write and commit. Collective: barriers ``save/edges`` (where needed), ``save/written``, ``save/merged``."""
        construction, collective, plan = self.construction, self.collective, self.agreed.plan
        with construction.ended():
            writer = ClientWriter(
                plan,
                construction.join(self.agreed.agreement.token),
                client=collective.client,
                clients=collective.participants,
                source=self.agreed.state.source,
                options=self.options,
                count=collective.phases.count,
                reuse=self.agreed.state.reuse,
            )
            if plan.has_moves:
                collective.run_round("edges", lambda: self._hand_over(writer))
            # After this barrier all chunks are written, and synced if they must be: the leader may merge.
            payloads = collective.run_round("written", lambda: self._write(writer), phase="write")
            collective.run_round("merged", lambda: self._commit(payloads), phase="merge")
            collective.phases.end()
            nbytes_reused = sum(Written.from_bytes(data).nbytes_reused for data in payloads.values())
            return SaveReport(self.where, plan.nbytes, collective.phases.costs, nbytes_reused)

    def _hand_over(self, writer: ClientWriter) -> None:
        with self.construction.takeover_explained():
            writer.hand_over()

    def _write(self, writer: ClientWriter) -> bytes:
        agreement, construction = self.agreed.agreement, self.construction
        with construction.takeover_explained():
            # Where descriptions were exchanged, so were the trees.
            if len(agreement.trees) > 1 and not agreement.needs_exchange:
                attempt = construction.join(agreement.token)
                put_text(attempt, self.collective.client, TREE_NAME, agreement.trees, self.agreed.state.tree)
            digest = writer.write()
        return Written(digest, self.collective.phases.costs, self.agreed.state.reuse.nbytes).to_bytes()

    def _commit(self, payloads: Mapping[int, bytes]) -> None:
        """On the leader, make one checkpoint of all clients' parts; on the others, do nothing.

        Args:
            payloads: Each client's `Written`, as bytes.
        """
        construction, agreement = self.construction, self.agreed.agreement
        if construction.led is None:
            return
        written = {client: Written.from_bytes(data) for client, data in payloads.items()}
        costs = {client: part.costs for client, part in written.items()}
        if slow := find_slow(costs):
            logger.warning("save of %s: %s", self.path, slow)
        with construction.takeover_explained():
            tree = self._united_tree(construction.led.folder)
            self._write_extra_files(construction.led.folder)
            contents = self.agreed.state.contents()
        merge = Merge(
            plan=self.agreed.plan,
            chunk_lists={client: part.chunk_list for client, part in written.items()},
            tree=tree,
            job=self.job,
            num_clients=len(self.collective.participants),
            costs=costs,
            contents=contents,
            base=self.base,
        )
        texts = ([DESCRIPTION_NAME] if agreement.needs_exchange else []) + [TREE_NAME] * (not agreement.is_same)
        construction.commit(merge, self.options, working_files=texts)

    def _united_tree(self, root: Folder) -> bytes:
        """Return the union of all clients' trees."""
        trees = self.agreed.agreement.trees
        if len(trees) == 1:
            return self.agreed.state.tree
        return unite_trees(read_all(TREE_NAME, trees, partial(read_text, root)))

    def _write_extra_files(self, root: Folder) -> None:
        for name, data in self.extra_files.items():
            with translate_errors(f"write {name}", root):
                root.write(name, data)
                if self.options.fsync:
                    root.sync([name])
