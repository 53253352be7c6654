"""One attempt at a save, as one client goes through it: plan and agree, stage, write, merge, commit.

`SaveAttempt.begin` ends when all clients agree on what is saved, and returns a `BegunSave`; `BegunSave.complete` does
the rest, also in another thread. The drawing in `dtckpt.checkpoint.collective` shows both.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving import exchange, save_handle
from dtckpt.checkpoint.saving.description import described
from dtckpt.checkpoint.saving.exchange import DESCRIPTION_NAME, TREE_NAME, put_text, read_texts
from dtckpt.checkpoint.saving.merge import merge_clients, remove_working_files
from dtckpt.checkpoint.saving.plan import SavePlan, kept_plan
from dtckpt.checkpoint.saving.replica_rules import validate_rules_used
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.checkpoint.saving.stored_dtypes import validate_all_used
from dtckpt.checkpoint.saving.union import passed_by_all
from dtckpt.checkpoint.saving.votes import Agreement, Summary, Written
from dtckpt.checkpoint.saving.write import ClientWriter
from dtckpt.checkpoint.timing import Phases, find_slow
from dtckpt.coordination.api import Coordination
from dtckpt.errors import CheckpointError, DtckptError
from dtckpt.format.manifest import Manifest
from dtckpt.storage import commit
from dtckpt.storage.failures import taken_over_error, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.location import Location, location_of
from dtckpt.storage.zarr_files import validate_kind

logger = logging.getLogger("dtckpt.checkpoint")

Stage = Callable[[State, SavePlan, Collective], State]
"""Copies a client's planned state, so that later changes of its tensors do not reach the copy."""


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

    def begin(self) -> BegunSave:
        """Plan, agree with the other clients on what is saved, and stage.

        Collective: Barrier ``save/begin``; and ``save/described`` and ``save/united`` where clients save different
        things for the first time.
        """
        collective, phases = self.collective, self.collective.phases
        phases.begin(self._path, is_shown=self._options.progress and collective.client == 0)
        construction = _Construction(phases)
        with construction.removed_on_failure():
            prepared, payloads = collective.run_first_round(
                "begin",
                lambda: self._prepare(construction),
                step=self._step,
                phase="plan",
                meanwhile=self._stage_state,
            )
            # All clients have the same payloads, so all of them come to the same result without another barrier.
            agreement = Agreement.of(payloads)
            if agreement.needs_exchange:
                plan = self._exchange(prepared, agreement, construction)
            else:
                plan = prepared.plan_of_all() if agreement.is_same else exchange.take_union(agreement.union)
            validate_all_used(tuple(rule[0] for rule in self._options.stored_dtypes), plan)
            validate_rules_used(self._options, plan)
            if plan is not prepared.plan:
                # What was staged while the others were waited for is not what this client writes.
                prepared = self._stage_state(replace(prepared, plan=plan, staged=None))
            if isinstance(prepared.staged, Exception):
                # The others are past their last round; they learn of the failure in their next one.
                collective.run_round(prepared.next_round, prepared.raise_staging_failure)
            phases.expect("write", plan.loads.get(collective.client, 0))
            return BegunSave(
                path=self._path,
                options=self._options,
                job=self._member.job,
                extra_files=self._extra_files,
                collective=collective,
                place=prepared.place,
                plan=plan,
                state=prepared.state_to_write(),
                agreement=agreement,
                construction=construction,
            )

    def _prepare(self, construction: _Construction) -> tuple[_Prepared, bytes]:
        """Describe and plan the state; on the leader, begin to build. Return the plan, and the vote's payload."""
        # If the last save failed in the background and nobody has looked, its error is raised here, on all clients.
        save_handle.raise_unseen_failure()
        # Resolved here: a save in the background keeps its path when the process changes its working directory.
        place = commit.commit_target_of(location_of(self._path, follow_link=self._follow_link))
        clients, chunk_nbytes = self.collective.participants, self._options.chunk_nbytes
        state = self._collect()
        # Alone, a client compares its description with nobody's.
        text, digest = described(state.specs, state.values) if len(clients) > 1 else (b"", 0)
        # What all clients will agree on, most likely: that others pass what they passed before, or what this one does.
        plan = exchange.latest_union(digest) or kept_plan(passed_by_all(state.specs, clients), chunk_nbytes)
        token = ""
        if self.collective.is_leader:
            validate_kind(self._options.kvstore, place.folder, (spec.codec for spec in state.specs))
            # Before the attempt begins: a save that is refused must not take away what another one has under
            # construction.
            place.check_target(overwrite=self._options.overwrite)
            member = self._member
            # The number of the job's attempt comes first: `commit_by_rename` compares it. The random part tells apart
            # the saves of one process.
            token = construction.lead(place, f"{member.attempt}-{member.incarnation:x}-{secrets.token_hex(4)}")
        # Everything else in the options must be equal: it decides what the clients write.
        agreed = replace(self._options, progress=False)  # one client alone may show its progress
        summary = Summary.of(str(place.where), token, digest, state.tree, agreed, unions=exchange.kept_unions())
        return _Prepared(place, state, text, digest, plan, clients, chunk_nbytes), summary.to_bytes()

    def _stage_state(self, prepared: _Prepared) -> _Prepared:
        """Stage the state while the others are waited for: the copy hides the wait.

        A state that is not staged is read later, by threads on streams of their own; so the work that fills it on
        cards must have ended.
        """
        try:
            if self._stage is not None:
                with self.collective.phases.measure("stage"):
                    return replace(prepared, staged=self._stage(prepared.state, prepared.plan, self.collective))
            if isinstance(prepared.state.source, MemorySource):
                prepared.state.source.synchronize()
        except Exception as error:
            return replace(prepared, staged=error)
        return prepared

    def _exchange(self, prepared: _Prepared, agreement: Agreement, construction: _Construction) -> SavePlan:
        """Tell the other clients what this one saves, and plan the union of all; the plan is kept."""
        collective = self.collective
        attempt = construction.join(prepared.place, agreement.token)

        def describe() -> None:
            put_text(attempt, collective.client, DESCRIPTION_NAME, agreement.descriptions, prepared.text)
            put_text(attempt, collective.client, TREE_NAME, agreement.trees, prepared.state.tree)

        def plan_union() -> tuple[SavePlan | DtckptError, bytes]:
            descriptions = read_texts(attempt.folder, DESCRIPTION_NAME, agreement.descriptions)
            trees = read_texts(attempt.folder, TREE_NAME, agreement.trees)
            try:
                return exchange.plan_union(descriptions, trees, self._options), b""
            # All clients have the same texts, and so the same error: no vote need tell it to them.
            except DtckptError as error:
                return error, b""

        collective.run_round("described", describe, phase="plan")
        plan, _ = collective.run_round_with_value("united", plan_union, phase="plan")
        if isinstance(plan, Exception):
            raise plan
        exchange.keep_union(agreement.union, prepared.digest, plan)
        return plan


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The result of a client's part of the first round.

    Args:
        place: Where the checkpoint will be.
        state: This client's state, in the tensors' own memory.
        text: Its description.
        digest: That of its description.
        plan: What all clients write, if they agree on what this one expects.
        clients: The clients that save.
        chunk_nbytes: Bound on a chunk's bytes.
        staged: The state in staging memory, or the error of this client's staging, on which no round depends.
    """

    place: commit.CommitTarget
    state: State
    text: bytes
    digest: int
    plan: SavePlan
    clients: tuple[int, ...]
    chunk_nbytes: int
    staged: State | Exception | None = None

    def plan_of_all(self) -> SavePlan:
        """Return the plan if all clients pass the same."""
        return kept_plan(passed_by_all(self.state.specs, self.clients), self.chunk_nbytes)

    @property
    def next_round(self) -> str:
        """Name of the round in which the clients begin to write."""
        return "edges" if self.plan.has_moves else "written"

    def raise_staging_failure(self) -> None:
        """Raise the error of the staging, as this client's part of a round."""
        assert isinstance(self.staged, Exception)  # noqa: S101  (else nobody calls this)
        raise self.staged

    def state_to_write(self) -> State:
        """Return the staged state; if nothing was staged, the state in the tensors' own memory."""
        return self.staged if isinstance(self.staged, State) else self.state


class _Construction:
    """The attempt that one client has under construction on storage; a failure removes it.

    Its attributes are set one after the other, as the save goes on, because the save may fail after each.

    Args:
        phases: Ended by a failure.
    """

    def __init__(self, phases: Phases) -> None:
        self.led: commit.CommitAttempt | None = None
        """On the leader: the attempt that it began."""
        self.joined: commit.CommitAttempt | None = None
        """The attempt as this client writes to it."""
        self.alive = ExitStack()
        """On the leader: shows that the attempt lives, until it is closed."""
        self._phases = phases

    def lead(self, place: commit.CommitTarget, token: str) -> str:
        """Begin the attempt; return the token that the other clients join it by."""
        self.led = place.begin(token)
        self.alive.enter_context(self.led.keep_alive())
        return self.led.token

    def join(self, place: commit.CommitTarget, token: str) -> commit.CommitAttempt:
        """Return the attempt that the leader has begun."""
        self.joined = self.joined or place.join(token)
        return self.joined

    @contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Remove what is under construction if the work inside fails."""
        try:
            yield
        except BaseException as error:
            self._phases.end(error)
            if self.led is not None:
                self.led.abandon()
            if self.joined is not None:
                # The leader may have taken the folder away while this client wrote, which made it again.
                self.joined.sweep()
            self.alive.close()
            raise


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BegunSave:
    """A save on which all clients have agreed; `complete` writes and commits it.

    It does not refer to the caller's tensors if the state was staged.

    Args:
        path: The path that the caller gave.
        options: See `SaveOptions`.
        job: Name of the job.
        extra_files: Files, by name, that the leader adds to the checkpoint.
        collective: The operation, after its first round.
        place: Where the checkpoint will be.
        plan: What all clients write.
        state: This client's state.
        agreement: What the clients said of what they save.
        construction: What this client has under construction.
    """

    path: str | Location
    options: SaveOptions
    job: str
    extra_files: Mapping[str, bytes]
    collective: Collective
    place: commit.CommitTarget
    plan: SavePlan
    state: State
    agreement: Agreement
    construction: _Construction

    @property
    def where(self) -> Location:
        """Where the checkpoint will be, also if the process changes its working directory meanwhile."""
        return self.place.where

    def complete(self) -> SaveReport:
        """Write and commit. Collective: barriers ``save/edges`` (where needed), ``save/written``, ``save/merged``."""
        construction, collective, plan = self.construction, self.collective, self.plan
        with construction.removed_on_failure(), construction.alive:
            writer = ClientWriter(
                plan,
                construction.join(self.place, self.agreement.token),
                client=collective.client,
                clients=collective.participants,
                source=self.state.source,
                options=self.options,
                count=collective.phases.count,
            )
            if plan.has_moves:
                collective.run_round("edges", lambda: self._hand_over(writer))
            # After this barrier all chunks are written, and synced if they must be: the leader may merge.
            payloads = collective.run_round("written", lambda: self._write(writer), phase="write")
            collective.run_round("merged", lambda: self._merge_and_commit(payloads), phase="merge")
            collective.phases.end()
            return SaveReport(self.where, plan.nbytes, collective.phases.costs)

    @contextmanager
    def _takeover_explained(self) -> Iterator[None]:
        """If the work inside fails because a newer attempt took this one's folder away, say so instead."""
        try:
            yield
        except CheckpointError as error:
            # Without its folder the work fails somewhere, with an error of storage that says nothing of the reason.
            joined = self.construction.joined
            if joined is not None and joined.is_taken_over():
                raise taken_over_error(self.where) from error
            raise

    def _hand_over(self, writer: ClientWriter) -> None:
        with self._takeover_explained():
            writer.hand_over()

    def _write(self, writer: ClientWriter) -> bytes:
        trees = self.agreement.trees
        with self._takeover_explained():
            # Where descriptions were exchanged, so were the trees.
            if len(trees) > 1 and not self.agreement.needs_exchange:
                joined = self.construction.join(self.place, self.agreement.token)
                put_text(joined, self.collective.client, TREE_NAME, trees, self.state.tree)
            digest = writer.write()
        return Written(digest, self.collective.phases.costs).to_bytes()

    def _merge_and_commit(self, payloads: Mapping[int, bytes]) -> None:
        """On the leader, make one checkpoint of what all clients wrote; on the others, do nothing.

        Args:
            payloads: What each client said when it had written its part.
        """
        led = self.construction.led
        if led is None:
            return
        options, plan, agreement = self.options, self.plan, self.agreement
        written = {client: Written.from_bytes(data) for client, data in payloads.items()}
        costs = {client: part.costs for client, part in written.items()}
        if slow := find_slow(costs):
            logger.warning("save of %s: %s", self.path, slow)
        chunk_lists = {client: part.chunk_list for client, part in written.items()}
        with self._takeover_explained():
            tree = self._united_tree(led.folder)
        manifest = Manifest(
            kvstore=options.kvstore,
            arrays={},
            tree=tree,
            job=self.job,
            num_clients=len(self.collective.participants),
            # By this a reader finds out that a save has replaced the checkpoint that it reads.
            attempt=agreement.token,
            costs=costs,
            raw_bits=bool(options.raw_bits),
        )
        with self._takeover_explained():
            for name, data in self.extra_files.items():
                with translate_errors(f"write {name}", led.folder):
                    led.folder.write(name, data)
                    if options.fsync:
                        led.folder.sync([name])
            contents = self.state.contents()
            merge_clients(plan, led.folder, chunk_lists, manifest, is_durable=options.fsync, contents=contents)
            # Before the commit: after it the folder is the checkpoint, and nobody changes it.
            names = ([DESCRIPTION_NAME] if agreement.needs_exchange else []) + [TREE_NAME] * (not agreement.is_same)
            remove_working_files(led.folder, sorted(written), has_moves=plan.has_moves, names=names)
        led.commit(overwrite=options.overwrite, is_durable=options.fsync)

    def _united_tree(self, root: Folder) -> bytes:
        """Return the union of all clients' trees."""
        if len(self.agreement.trees) == 1:
            return self.state.tree
        return exchange.unite_trees(read_texts(root, TREE_NAME, self.agreement.trees))
