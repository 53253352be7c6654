"""Save state as one checkpoint: every client's part of it, agreed on at barriers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.collective import Rounds
from dtckpt.checkpoint.gc_pause import uncollected
from dtckpt.checkpoint.leaves import as_leaf, host_array, is_tensor, state_of_object, validate_mode
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving import save_handle
from dtckpt.checkpoint.saving.plan import (
    KEPT_STRUCTURES,
    Holding,
    SavePlan,
    TensorPlan,
    TensorSpec,
    copies_of,
    holdings_of,
    kept_plan,
)
from dtckpt.checkpoint.saving.replica_check import Copy
from dtckpt.checkpoint.saving.stored_dtypes import StoredDtypes
from dtckpt.checkpoint.saving.votes import Summary, Written, validate_agreement
from dtckpt.checkpoint.saving.write import ClientWriter, Source, merge_clients, remove_working_files
from dtckpt.checkpoint.timing import find_slow
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import CheckpointError, SliceError
from dtckpt.format import tree as trees
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.manifest import Manifest, PhaseCost
from dtckpt.format.slices import parse_slice_spec
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.storage import commit
from dtckpt.storage.failures import taken_over_error, translate_errors
from dtckpt.storage.location import Location, location_of
from dtckpt.storage.zarr_files import validate_kind

logger = logging.getLogger("dtckpt.checkpoint")


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save went, as one client saw it.

    Args:
        path: The checkpoint.
        nbytes: Bytes of tensor data in it.
        phases: What each phase took on this client: ``plan``, ``edges`` (handing over pieces of chunks that shards
            share, where there are such), ``write`` (with digests), ``merge`` (on the leader, with the commit), and
            ``barrier``: waiting for the others, of which nothing is in the other phases.
    """

    path: Location
    nbytes: int
    phases: Mapping[str, PhaseCost]

    @property
    def client_nbytes(self) -> int:
        """Bytes that this client wrote."""
        return self.phases["write"].nbytes

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases.values())


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is to be saved.

    Args:
        specs: The tensors, as the plan sees them.
        source: Where this client's elements come from.
        tree: Structure and plain values as JSON.
        max_pending_nbytes: Bound on the elements that wait to be written; default none.
    """

    specs: tuple[TensorSpec, ...]
    source: Source
    tree: bytes = b""
    max_pending_nbytes: int | None = None


def save(path: str | Location, tree: Any, *, options: SaveOptions | None = None, step: int | None = None) -> SaveReport:
    """Save a state tree as the checkpoint at ``path``.

    Collective: Over all clients of the job, which pass the same tree; barriers ``save/begin``, ``save/written`` and
    ``save/merged`` (and ``save/edges`` where unevenly nested shards share chunks). Every client returns, or every
    client raises the same error. After an error the path holds what it held before, or, where a client was lost or
    storage failed amid the commit, the new checkpoint; never anything else.

    Blocks: On storage, and on the slowest client, each barrier at most ``options.timeout_s`` seconds; before that, on
    a `save_async` in flight. If that failed and nobody has looked, its error is raised here, and nothing is saved.

    Args:
        path: Directory of the checkpoint, whose parents are made; or a URL.
        tree: Nested containers of DTensors (also PyTorch's), tensors (a copy on every client), plain values (the same
            on every client), and objects with ``state_dict()`` and ``load_state_dict()``. Containers are dicts, lists,
            tuples, those of `collections`, namespaces, named tuples and dataclasses; see docs/checkpointing.md.
        options: See `SaveOptions`.
        step: Which save this is, from 0 on: the step of the training run. Clients compare it, so that what one of them
            began alone, or skipped, is never joined to another step of the others. Default: they compare how many saves
            each has begun, which tells the same as long as clients do not skip saves while others go on without them.

    Raises:
        CheckpointExistsError: There is something at the path (and no consent to replace a checkpoint).
        TreeError: The tree holds something that cannot be saved.
        TensorNameError: A key cannot be part of a tensor's name.
        DTypeError: A tensor's dtype cannot be stored, or the tensor is not dense memory of its own.
        SaveDisagreementError: Clients save different things, or are at different saves. Nothing is written then, and
            the next save finds them level.
        ConfigError: The step is none.
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
    return save_state(
        path,
        lambda: state_of_tree(tree, options, coordination),
        options=options,
        coordination=coordination,
        step=step,
    )


def state_of_tree(tree: Any, options: SaveOptions, coordination: Coordination) -> State:
    """Describe a state tree for a save over all clients."""
    leaves, structure = trees.flatten(tree, is_tensor, state_of_object)
    entries = [(name, value, "") for name, value in leaves.items()]
    return state_of(entries, options, clients=range(coordination.member.num_clients), tree=trees.dump(structure))


def state_of(
    entries: Sequence[tuple[str, torch.Tensor, str]],
    options: SaveOptions,
    *,
    clients: Sequence[int],
    tree: bytes = b"",
) -> State:
    """Describe named tensors for a save.

    Args:
        entries: ``(name, tensor, slice string)``.
        options: See `SaveOptions`.
        clients: Who holds a copy of the plain tensors.
        tree: Structure and plain values as JSON.
    """
    validate_mode()
    with uncollected():
        leaves = [as_leaf(tensor, name) for name, tensor, _ in entries]
        structure = tuple(
            (name, leaf.shape, leaf.dtype, leaf.save_as_bf16, leaf.layout, slice_text)
            for (name, _, slice_text), leaf in zip(entries, leaves, strict=True)
        )
        parts: dict[str, list[tuple[Region, list[torch.Tensor]]]] = {}
        for (name, _, slice_text), leaf in zip(entries, leaves, strict=True):
            boxes = leaf.distinct_parts()
            if slice_text:
                start = parse_slice_spec(slice_text, leaf.shape).region.offset
                boxes = [(region.translate(start), copies) for region, copies in boxes]
            parts.setdefault(name, []).extend(boxes)
        # Of the options, only what makes a difference to the specs; saves that differ otherwise share a plan.
        stored = SaveOptions(
            save_as_bf16=options.save_as_bf16, stored_dtypes=options.stored_dtypes, codec=options.codec
        )
        specs = _specs(structure, stored, tuple(clients))
    return State(specs, MemorySource(parts), tree)


_Described = tuple[str, tuple[int, ...], str, bool, Layout | None, str]
"""A tensor to be saved: name, shape, dtype, whether it asks for bfloat16, layout, slice string."""


@lru_cache(maxsize=KEPT_STRUCTURES)
def _specs(structure: tuple[_Described, ...], options: SaveOptions, clients: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """Return the tensors as the plan sees them: the very same for the same structure, which then has its plan."""
    specs: list[TensorSpec] = []
    rules, codec = StoredDtypes(options), options.codec or NO_CODEC
    for name, shape, dtype, save_as_bf16, layout, slice_text in structure:
        place = parse_slice_spec(slice_text, shape)
        stored = rules.choose(name, dtype, save_as_bf16=save_as_bf16)
        holdings = copies_of(clients, shape) if layout is None else holdings_of(layout, shape)
        if slice_text:
            holdings = tuple(Holding(item.region.translate(place.region.offset), item.clients) for item in holdings)
        kept = layout if place.full_shape == shape else None
        specs.append(TensorSpec(name, place.full_shape, dtype, stored, holdings, kept, codec=codec))
    rules.validate_all_used()
    return tuple(specs)


class MemorySource:
    """Elements from tensors in this client's memory.

    Args:
        parts: Per tensor name, boxes and the local copies of each.
        noted: By tensor name and box, the digests of all copies of boxes that are not here whole.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[tuple[Region, list[torch.Tensor]]]],
        noted: Mapping[tuple[str, Region], Sequence[Copy]] | None = None,
    ) -> None:
        self._parts = parts
        self._noted = noted or {}
        self._host: dict[int, np.ndarray[Any, Any]] = {}

    def synchronize(self) -> None:
        """Wait for what the current streams have still to do on cards: other threads read, too, on their own."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            copies = (copy for boxes in self._parts.values() for _, listed in boxes for copy in listed)
            for device in {copy.device for copy in copies if copy.is_cuda}:
                torch.cuda.current_stream(device).synchronize()

    def parts(self, name: str) -> Sequence[tuple[Region, list[torch.Tensor]]]:
        """Return the boxes of a tensor and the local copies of each."""
        return self._parts.get(name, ())

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return a view of the elements of a region inside one of the boxes."""
        for box, copies in self.parts(plan.spec.name):
            if box == region:
                return self._host_array(copies[0])
            if box.contains(region):
                return self._host_array(copies[0])[region.relative_to(box).slices()]
        raise SliceError(f"this client does not hold {region} of tensor {plan.spec.name!r}")

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Copy]:
        """Return all local copies of a box."""
        if (noted := self._noted.get((plan.spec.name, region))) is not None:
            return noted
        found = next(copies for box, copies in self.parts(plan.spec.name) if box == region)
        return [Copy(self._host_array(copy)) for copy in found]

    def _host_array(self, memory: torch.Tensor) -> np.ndarray[Any, Any]:
        # A tensor on a card is copied to the host once, not once per chunk.
        if id(memory) not in self._host:
            self._host[id(memory)] = host_array(memory)
        return self._host[id(memory)]


def save_state(
    path: str | Location,
    collect: Callable[[], State],
    *,
    options: SaveOptions | None = None,
    coordination: Coordination | None = None,
    participants: Sequence[int] | None = None,
    step: int | None = None,
) -> SaveReport:
    """Run the save protocol. Collective and errors: as `save`, over ``participants``.

    Args:
        path: Where the checkpoint will be.
        collect: Gives this client's side of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The way to the other clients; default: that of this process.
        participants: The clients that save; default: all of the job.
        step: Which save this is; see `save`.
    """
    options = options or SaveOptions()
    save_handle.wait(options.timeout_s)
    attempt = Attempt(path, collect, options, coordination or current_coordination(), participants, step=step)
    with attempt.rounds.exclusive():
        attempt.begin()
        return attempt.complete()


Stage = Callable[[State, SavePlan, int], State]
"""Turns a planned state of a client into one that later changes of its tensors do not reach."""


class Attempt:
    """One attempt at a save, as one client goes through it: `begin`, then `complete`.

    The caller is inside ``rounds.exclusive()``; a failure leaves nothing under construction.

    Args:
        path: Where the checkpoint will be.
        collect: Gives this client's side of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The way to the other clients.
        participants: The clients that save; default: all of the job.
        stage: Makes the state independent of its tensors, before `begin` returns; default: it stays as it is.
        extra_files: Files, by name, that the leader adds to the checkpoint; ``collect`` may still change them.
        step: Which save this is; see `save`.
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
    ) -> None:
        self._path = path
        self._step = step
        self._collect = collect
        self._options = options
        self._member = coordination.member
        self.rounds = Rounds(coordination, "save", options.timeout_s, participants)
        self._phases = self.rounds.phases
        self._stage = stage
        self._extra_files = {} if extra_files is None else extra_files
        self._led: commit.CommitAttempt | None = None
        self._alive = ExitStack()
        self._begun: list[tuple[State, SavePlan]] = []
        self._staging_failure: Exception | None = None
        self._token = ""
        self._place: commit.CommitTarget | None = None
        self._joined: commit.CommitAttempt | None = None

    def begin(self) -> None:
        """Plan, agree with the other clients on what is saved, and stage. Collective: barrier ``save/begin``."""
        self._phases.begin(self._path, is_shown=self._options.progress and self.rounds.client == 0)
        with self._tidy():
            payloads = self.rounds.begin(
                "begin",
                self._prepare,
                step=self._step,
                phase="plan",
                meanwhile=self._stage_state,
            )
            _, plan = self._begun[0]
            validate_agreement(payloads, plan)
            self._token = Summary.from_bytes(payloads[self.rounds.leader]).token
            if self._staging_failure is not None:
                # The others are past this round; they learn it in their next one.
                self.rounds.run("edges" if plan.has_moves else "written", self._fail_staging)
        del self._collect  # it holds the caller's tensors, which a staged save must not keep alive

    @property
    def place(self) -> commit.CommitTarget:
        """Where the checkpoint will be, whatever directory the process works in by then. Known once it has begun."""
        assert self._place is not None  # noqa: S101  (else `begin` has raised)
        return self._place

    def _prepare(self) -> bytes:
        save_handle.raise_unseen()
        self._place = place = commit.commit_target_of(location_of(self._path))
        state = self._collect()
        plan = kept_plan(state.specs, self._options.chunk_nbytes)
        token = ""
        if self.rounds.is_leader:
            token = f"{self._member.attempt}-{self._member.incarnation:x}-{secrets.token_hex(4)}"
            validate_kind(self._options.kvstore, place.folder, (spec.codec for spec in state.specs))
            place.check_target(overwrite=self._options.overwrite)
            self._led = place.begin(token)
            self._alive.enter_context(self._led.keep_alive())
            token = self._led.token
        self._phases.expect("write", plan.loads.get(self.rounds.client, 0))
        self._begun.append((state, plan))
        agreed = replace(self._options, progress=False)  # one client alone may show it
        return Summary.of(str(place.where), token, plan, state.tree, agreed).to_bytes()

    def _stage_state(self) -> None:
        """Make the state independent of its tensors, while the others are waited for: the copy hides the wait.

        A state that stays as it is must be there when it is read.
        """
        state, plan = self._begun.pop()
        try:
            if self._stage is not None:
                with self._phases.measure("stage"):
                    state = self._stage(state, plan, self.rounds.client)
            elif isinstance(state.source, MemorySource):
                state.source.synchronize()
        except Exception as error:
            self._staging_failure = error
        self._begun.append((state, plan))

    def _fail_staging(self) -> None:
        assert self._staging_failure is not None  # noqa: S101  (else nobody calls this)
        raise self._staging_failure

    def complete(self) -> SaveReport:
        """Write and commit. Collective: barriers ``save/edges`` (where needed), ``save/written``, ``save/merged``."""
        with self._tidy(), self._alive:
            state, plan = self._begun.pop()
            self._joined = self.place.join(self._token)
            writer = ClientWriter(
                plan,
                self._joined,
                self.rounds.client,
                self.rounds.participants,
                state.source,
                kvstore=self._options.kvstore,
                is_durable=self._options.fsync,
                max_pending_nbytes=state.max_pending_nbytes,
                count=self._phases.count,
            )
            if plan.has_moves:
                self.rounds.run("edges", self._owned()(writer.hand_over))
            announced = self.rounds.run("written", lambda: self._write(writer), phase="write")
            self.rounds.run("merged", lambda: self._finish(plan, state, announced), phase="merge")
            self._phases.end()
            return SaveReport(self.place.where, plan.nbytes, self._phases.costs)

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """Say who takes away what is under construction, where that is why the work inside fails."""
        try:
            yield
        except CheckpointError as error:
            if self._joined is not None and self._joined.is_taken_over():
                raise taken_over_error(self.place.where) from error
            raise

    def _write(self, writer: ClientWriter) -> bytes:
        options = self._options
        with self._owned():
            digest = writer.write(check_replicas=options.check_replicas, content_digest=options.content_digest)
        return Written(digest, self._phases.costs).to_bytes()

    def _finish(self, plan: SavePlan, state: State, payloads: Mapping[int, bytes]) -> None:
        if self._led is None:
            return
        options = self._options
        announced = {client: Written.from_bytes(data) for client, data in payloads.items()}
        costs = {client: written.costs for client, written in announced.items()}
        if slow := find_slow(costs):
            logger.warning("save of %s: %s", self._path, slow)
        manifest = Manifest(
            kvstore=options.kvstore,
            arrays={},
            tree=state.tree,
            job=self._member.job,
            num_clients=len(self.rounds.participants),
            attempt=self._token,
            costs=costs,
        )
        chunk_lists = {client: written.chunk_list for client, written in announced.items()}
        with self._owned():
            for name, data in self._extra_files.items():
                with translate_errors(f"write {name}", self._led.folder):
                    self._led.folder.write(name, data)
                    if options.fsync:
                        self._led.folder.sync([name])
            merge_clients(plan, self._led.folder, chunk_lists, manifest, is_durable=options.fsync)
            remove_working_files(self._led.folder, sorted(announced), has_moves=plan.has_moves)
        self._led.commit(overwrite=options.overwrite, is_durable=options.fsync)

    @contextmanager
    def _tidy(self) -> Iterator[None]:
        """Remove what is under construction if the work inside fails."""
        try:
            yield
        except BaseException as error:
            self._phases.end(error)
            if self._led is not None:
                self._led.abandon()
            if self._joined is not None:
                # The leader may have taken the folder away while this client wrote, which made it again.
                self._joined.sweep()
            self._alive.close()
            raise
