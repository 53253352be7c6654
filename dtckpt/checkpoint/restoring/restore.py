"""`restore`: read a checkpoint into the tensors of a target tree, or as new tensors on any mesh.

A restore has two rounds. In ``planned`` every client opens the checkpoint, plans, and refuses a misfit before it writes
to the target; all clients must have opened the same save. In ``read`` every client fills its tensors. If clients ask
for different names, they exchange these names between the two rounds (`dtckpt.checkpoint.restoring.unexpected`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.leaves import validate_mode
from dtckpt.checkpoint.live.versions import is_live
from dtckpt.checkpoint.open import mapped, open_checkpoint
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.participants import Group, participants_of
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.verified_reads import spare_threads
from dtckpt.checkpoint.restoring.aside import AsideMemory, copy_into
from dtckpt.checkpoint.restoring.fill import fill_tensors, has_elements, own_buffers, read_nbytes
from dtckpt.checkpoint.restoring.layout_choice import Layouts
from dtckpt.checkpoint.restoring.match import plan_target
from dtckpt.checkpoint.restoring.new_layouts import MeshFacts, mesh_facts, validate_same_layouts
from dtckpt.checkpoint.restoring.new_tensors import meshes_of_layouts, plan_new_tensors
from dtckpt.checkpoint.restoring.plan import RestorePlan, validate_expected, validate_report
from dtckpt.checkpoint.restoring.read_by_host import HandedOn, handed_on
from dtckpt.checkpoint.restoring.read_once import SharedTensor, agreed_tensors, digests_by_mesh, shareable_tensors
from dtckpt.checkpoint.restoring.report import RestoreReport
from dtckpt.checkpoint.restoring.shared_memory import NamedLeaf, TiedLeaf, split_tied, validate_apart
from dtckpt.checkpoint.restoring.target import visit_target
from dtckpt.checkpoint.restoring.unexpected import Unasked
from dtckpt.checkpoint.signing.keys import KeySource
from dtckpt.checkpoint.timing import Written, find_slow
from dtckpt.comm.background_threads import Pool
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import CheckpointConflictError, CheckpointUntrustedError, DtckptError, TreeError
from dtckpt.layout.device_mesh import MeshLike, as_mesh
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

Open = Callable[[], Checkpoint]
Choose = Callable[[Collective], AbstractContextManager[Open]]
"""Agrees with the other clients on the checkpoint that they restore; yields the function that opens it.

The function's errors reach all clients. The context ends when the clients have read, or have failed.
"""
MAX_TRIES = 3
"""How often a local restore begins anew when a save replaces the checkpoint meanwhile."""
MAX_SIGNERS = 8
"""Ids of keys that a client tells the others."""
MAX_PATH_CHARS = 250
"""Bound on the path that a client sends to the others: a barrier's payload has room for it, at up to twelve bytes per
escaped character."""


def restore(
    path: str | Location,
    target: Any = None,
    *,
    mesh: MeshLike | None = None,
    layouts: Layouts | None = None,
    options: RestoreOptions | None = None,
    group: Group | None = None,
    strict: str | None = None,
) -> Any:
    """Restore a checkpoint into any layout on any mesh, independent of the saved layout.

    With ``target``, a restore fills the tensors and DTensors of that tree in place, replaces plain values in its dicts
    and lists, and lets stateful objects load their state. Containers keep their classes; named tuples and dataclasses
    take fields by name. State that the target lacks, as a fresh optimizer does, takes the layout of its parameter, and
    tensors on the meta device get memory. The state of optimizers goes to the parameters of the same names in the tree,
    in any order and groups (docs/checkpointing.md). Without a target, a restore builds the saved tree anew, with plain
    CPU tensors, or with new DTensors if ``mesh`` or ``layouts`` ask for them. Stand-ins then replace named tuples and
    dataclasses.

    Every client reads the chunks that intersect its regions, straight into the destination, and verifies them. With
    `RestoreOptions.read_once` a client reads its share of the chunks that several clients need, and hands these on.

    Clients may ask for different parts of the checkpoint. A saved name that no client asks for is unexpected.

    Collective: Over the clients of ``group``. By default, with a target, over all clients of the meshes of its tensors;
    for a slice of a mesh the whole mesh counts. By default, without a target, over the clients of ``mesh`` and of the
    meshes of ``layouts``. Local if no tensor lies on another client. Barriers ``restore/planned``, ``restore/asked``
    (if clients ask for different names), ``restore/trusted`` (with ``trusted_keys``; the target is unchanged until
    here), and ``restore/read``.

    Args:
        path: The checkpoint.
        target: Tree to be filled.
        mesh: Mesh for new DTensors. Every tensor becomes a DTensor then, replicated if it was on no mesh; exceptions
            are arrays of numpy, and tensors of a `dtckpt.PerClient` that were on no mesh. Tensors that no entry of
            ``layouts`` matches keep their saved sharding specs as far as the mesh has those axes, and are unsharded
            otherwise. With a ``DeviceMesh`` of PyTorch the tensors are PyTorch's DTensors, and a tensor that was saved
            plain stays plain unless ``layouts`` match it: ready for ``load_state_dict(assign=True)``.
        layouts: See `Layouts`. With functions, also pass ``mesh``, whose clients take part.
        options: See `RestoreOptions`.
        group: The clients that restore: a process group, or a sequence of client ids.
        strict: Replaces the option of this name in ``options``: ``"names"`` refuses state that is matched by position.

    Returns:
        ``target``, or the new tree.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; `CheckpointIncompleteError`: only an unfinished one.
        TensorNotFoundError: The target asks for a name that the checkpoint lacks.
        UnexpectedTensorError: The checkpoint has a name that no client's target asks for.
        ShapeMismatchError: A tensor's shape differs.
        DTypeError: A dtype conversion is not allowed by ``options.cast``, or the elements of a target's tensor are not
            dense memory.
        TreeError: The target holds something that cannot be filled.
        CheckpointCorruptError: Stored bytes differ from the saved bytes.
        MeshError: ``group`` lacks this client, or names a client that the job lacks; or clients of one mesh ask for new
            tensors in different layouts, or on different meshes.
    """
    if strict is not None:
        options = replace(options or RestoreOptions(), strict=strict)
    options = options or RestoreOptions()
    choose = chooser_of(path, options.trusted_keys)
    request = _RestoreRequest.of(path, choose, target, options, mesh=mesh, layouts=layouts, group=group)
    return request.run(StagedRestore.apply)


def chooser_of(path: str | Location, trusted_keys: Sequence[KeySource] = ()) -> Choose:
    """Return the way in which clients agree on the checkpoint at a path: by the path, except for a live version."""
    if is_live(path) and not trusted_keys:
        # Here, because few restores need it, and it imports the coordinator's client.
        from dtckpt.checkpoint.live.version_choice import VersionChoice

        return VersionChoice.of_location(path)
    return lambda _: nullcontext(lambda: open_checkpoint(path, trusted_keys=trusted_keys))


def restore_opened(
    path: str | Location,
    open_: Open,
    target: Any = None,
    *,
    mesh: MeshLike | None = None,
    layouts: Layouts | None = None,
    options: RestoreOptions | None = None,
    group: Group | None = None,
) -> Any:
    """Restore a checkpoint that the caller's function opens. Otherwise as `restore`.

    Args:
        path: The checkpoint's name in messages.
        open_: Opens it; its errors reach all clients.
        target: As for `restore`, like the further arguments.
    """
    request = _RestoreRequest.of(
        path,
        lambda _: nullcontext(open_),
        target,
        options or RestoreOptions(),
        mesh=mesh,
        layouts=layouts,
        group=group,
    )
    return request.run(StagedRestore.apply)


def restore_chosen(
    path: str | Location,
    choose: Choose,
    target: Any,
    *,
    options: RestoreOptions,
    group: Group | None = None,
    begin: Callable[[], object],
) -> Any:
    """Restore a checkpoint that the clients choose together. Otherwise as `restore`.

    Args:
        path: The checkpoint's name in messages.
        choose: Chooses it.
        target: As for `restore`, like ``options`` and ``group``.
        begin: Called on every client before it or another client writes to this client's part of the target.
    """
    request = _RestoreRequest.of(path, choose, target, options, group=group)
    return replace(request, begin=begin).run(StagedRestore.apply)


def stage_restore(
    path: str | Location,
    choose: Choose,
    target: Any,
    aside: AsideMemory,
    *,
    mesh: MeshLike | None = None,
    layouts: Layouts | None = None,
    options: RestoreOptions,
    group: Group | None = None,
) -> StagedRestore:
    """Read a checkpoint into memory beside a target's tensors; `StagedRestore.apply` brings it into the target.

    Otherwise as `restore_chosen`.

    Args:
        aside: The memory; kept from one restore into the target to the next.
        mesh: As for `restore`, like ``layouts``.
    """
    request = _RestoreRequest.of(path, choose, target, options, mesh=mesh, layouts=layouts, group=group)
    staged: StagedRestore = replace(request, aside=aside).run(lambda staged: staged)
    return staged


def run_restore(
    path: str | Location,
    plan: Callable[[Checkpoint], RestorePlan],
    options: RestoreOptions,
    coordination: Coordination,
    participants: Sequence[int] | None,
) -> Any:
    """Run the restore protocol. Collective: Over ``participants`` (default: all clients of the job); as `restore`.

    Args:
        path: The checkpoint.
        plan: Plans this client's part; its errors reach all clients.
        options: See `RestoreOptions`.
        coordination: The connection to the other clients.
        participants: The clients that restore.
    """
    choose = chooser_of(path, options.trusted_keys)
    request = _RestoreRequest(path, choose, plan, options, coordination, participants)
    return request.run(StagedRestore.apply)


@dataclass(frozen=True, slots=True, eq=False)
class _RestoreRequest:
    """A request for a restore.

    Args:
        path: The checkpoint's name in messages.
        choose: Chooses the checkpoint.
        plan: Plans this client's part; its errors reach all clients.
        options: See `RestoreOptions`.
        coordination: The connection to the other clients.
        participants: The clients that restore; None: all clients of the job.
        aside: The memory that is read into; None: the target's own.
        begin: See `restore_chosen`.
    """

    path: str | Location
    choose: Choose
    plan: Callable[[Checkpoint], RestorePlan]
    options: RestoreOptions
    coordination: Coordination
    participants: Sequence[int] | None
    aside: AsideMemory | None = None
    begin: Callable[[], object] = lambda: None

    @classmethod
    def of(
        cls,
        path: str | Location,
        choose: Choose,
        target: Any,
        options: RestoreOptions,
        *,
        mesh: MeshLike | None = None,
        layouts: Layouts | None = None,
        group: Group | None = None,
    ) -> _RestoreRequest:
        """Return the request for the arguments of `restore`."""
        coordination = current_coordination()
        participants = everyone = participants_of(group, coordination.member)
        failure: Exception | None = None
        try:
            if target is not None and (mesh is not None or layouts is not None):
                raise TreeError("restore takes a target, or mesh and layouts for new tensors; got both")
            device_mesh = None if mesh is None or isinstance(mesh, Mesh) else mesh
            own_mesh = None if mesh is None else as_mesh(mesh)
            state = None if target is None else visit_target(target)
            meshes = meshes_of_layouts(own_mesh, layouts) if state is None else state.meshes
            if group is None:
                clients = {client for each in meshes for client in each.clients}
                participants = tuple(sorted({*clients, coordination.member.client}))
        except Exception as error:
            # The others wait for this client, so it must come and vote with its error.
            failure = error

        def plan(checkpoint: Checkpoint) -> RestorePlan:
            # Raised inside the first round, as this client's vote: all clients raise it.
            if failure is not None:
                raise failure
            if state is not None:
                # Not among the participants: the clients of a target's tensors say nothing about the other clients.
                return plan_target(checkpoint, state, options, ClientNumber.among(coordination.member.client, everyone))
            return plan_new_tensors(checkpoint, own_mesh, layouts, options, device_mesh)

        return cls(path, choose, plan, options, coordination, participants)

    def run(self, end: Callable[[StagedRestore], Any]) -> Any:
        """Run the restore protocol; ``end`` gets the restore when every client has read its tensors."""
        collective = Collective(self.coordination, "restore", self.options.timeout_s, self.participants)
        phases, is_shown = collective.phases, self.options.progress and collective.client == 0
        is_alone = len(collective.participants) == 1
        for is_last in (False,) * (MAX_TRIES - 1) + (True,):
            try:
                with (
                    collective.process_lock(),
                    phases.operation(self.path, is_shown=is_shown),
                    self.choose(collective) as open_,
                ):
                    return end(_run_once(self, open_, collective))
            except CheckpointConflictError:
                # A save replaced the checkpoint meanwhile. Several clients may not all notice, so they do not retry.
                if is_last or not is_alone:
                    raise
        raise AssertionError  # not reached: the last try returns or raises


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A restore that this client has planned, before any write.

    Args:
        checkpoint: The checkpoint, open.
        plan: See `RestorePlan`.
        report: The report, but for the phases.
        leaves: The tensors to be filled.
        beside: The leaves to read: the same, unless the restore reads into memory beside the target's.
        tied: Further names of the same memory.
        shared: The tensors that this client would read together with others.
        handed_on: The tensors that this client would read together with others of its host.
        unasked: The saved names that this client does not ask for.
    """

    checkpoint: Checkpoint
    plan: RestorePlan
    report: RestoreReport
    leaves: Sequence[NamedLeaf]
    beside: Sequence[NamedLeaf]
    tied: Sequence[TiedLeaf]
    shared: Sequence[SharedTensor]
    handed_on: HandedOn | None
    unasked: Unasked


class StagedRestore:
    """A restore whose tensors every client has read and verified; `apply` ends it. Local.

    Args:
        prepared: The plan.
        report: The report.
        tell: Called with the report at the end.
    """

    def __init__(
        self, prepared: _Prepared, report: RestoreReport, tell: Callable[[RestoreReport], object] | None
    ) -> None:
        self.report = report
        self._prepared = prepared
        self._tell = tell

    def apply(self) -> Any:
        """Copy the tensors from the memory beside the target's into the target, then set plain values, then objects.

        If nothing of a tensor was read, the tensor in the target is digested, and not copied if it is the same already.

        Plain values and stateful objects change only here: after every client has read its tensors.

        Returns:
            The target, or the new tree.
        """
        prepared = self._prepared
        pairs = zip(prepared.leaves, prepared.beside, strict=True)
        moved = [(name, leaf, beside) for (name, leaf), (_, beside) in pairs if leaf is not beside]
        there = self._found_there([(name, leaf) for name, leaf, _ in moved])
        moved = [each for each in moved if id(each[1]) not in there]
        if moved:
            copy_into([leaf for _, leaf, _ in moved], [beside for *_, beside in moved])
        result = prepared.plan.finish()
        if self._tell is not None:
            self._tell(self.report)
        return result

    def _found_there(self, leaves: Sequence[NamedLeaf]) -> set[int]:
        """Return the ids of the leaves of a target that have the elements already.

        That nothing was read of a tensor says that the memory beside it has the elements since the last restore. The
        target may have been changed since then, or never have got them. So its memory is digested.
        """
        checkpoint = self._prepared.checkpoint
        likely = [each for each in leaves if not checkpoint.has_taken(each[0])]
        if not likely:
            return set()
        with Pool(spare_threads(), "dtckpt-apply") as pool:
            found = pool.map(lambda each: has_elements(checkpoint, *each), likely)
            return {id(leaf) for (_, leaf), is_there in zip(likely, found, strict=True) if is_there}


def _run_once(request: _RestoreRequest, open_: Open, collective: Collective) -> StagedRestore:
    options, phases = request.options, collective.phases
    with ExitStack() as stack:
        prepared, payloads = collective.run_round_with_value(
            "planned", lambda: _prepare(request, open_, collective, stack), phase="plan"
        )
        opened = {client: _CheckpointFacts(*json.loads(data)) for client, data in payloads.items()}
        checkpoint = stack.enter_context(prepared.checkpoint)
        # All clients compare the same payloads, so either all go on or all raise, without another barrier.
        _validate_same(opened)
        validate_same_layouts({client: facts.new_layouts for client, facts in opened.items()})
        shared = agreed_tensors(prepared.shared, {client: facts.shared for client, facts in opened.items()})
        unexpected = prepared.unasked.by_all(
            collective, checkpoint, {client: facts.unasked for client, facts in opened.items()}
        )
        handed = None
        if prepared.handed_on is not None:
            facts_by_client = {client: facts.handed_on for client, facts in opened.items()}
            handed = prepared.handed_on.agreed(facts_by_client, collective.client, options.timeout_s)
        report = replace(prepared.report, unexpected=prepared.plan.new_names_of(unexpected))
        if not all(facts.allows_unexpected for facts in opened.values()):
            with _told_of_refusal(options, report):
                validate_expected(report)

        if options.trusted_keys:
            collective.run_round("trusted", lambda: _look_for_share(checkpoint, collective))

        def read() -> bytes:
            request.begin()
            fill_tensors(checkpoint, prepared.beside, prepared.tied, shared, phases, handed_on=handed)
            return Written(0, phases.costs).to_bytes()

        payloads = collective.run_round("read", read)
        slow = find_slow({client: Written.from_bytes(data).costs for client, data in payloads.items()})
        if slow is not None and collective.is_leader:
            logger.warning("restore of %s: %s", request.path, slow)
    return StagedRestore(prepared, replace(report, phases=phases.costs), options.report)


def _look_for_share(checkpoint: Checkpoint, collective: Collective) -> bytes:
    """Look for this client's share of the signed files, before any client fills a tensor.

    Their bytes are compared with the signed digests when they are read, before they get to a tensor.
    """
    assert checkpoint.signed is not None  # noqa: S101  `_prepare` has refused the others
    participants = collective.participants
    checkpoint.signed.validate_sizes(participants.index(collective.client), len(participants))
    return b""


def _prepare(
    request: _RestoreRequest, open_: Open, collective: Collective, stack: ExitStack
) -> tuple[_Prepared, bytes]:
    """Open the checkpoint and plan; return the plan, and the payload for the other clients.

    Args:
        request: The restore.
        open_: Opens the checkpoint.
        collective: The operation.
        stack: Closes the checkpoint, and other resources that the restore needs until its end.
    """
    options, aside = request.options, request.aside
    validate_mode()
    with gc_paused():
        checkpoint = open_()
        if options.trusted_keys and checkpoint.signed is None:
            raise CheckpointUntrustedError(f"{checkpoint.path} is not read by a signature; restore a signed checkpoint")
        checkpoint = mapped(checkpoint, options.map)
        planned = request.plan(checkpoint)
        checkpoint.validate_wanted(name for name, _ in planned.leaves)
        report = planned.report(checkpoint)
    with _told_of_refusal(options, report):
        validate_report(report, options)
    with gc_paused():
        leaves, tied = split_tied(planned.leaves)
        validate_apart(leaves)
        beside = leaves
        if aside is not None:
            # The tied leaves are of memory of the others, so their part costs nothing.
            named = [*leaves, *((name, leaf) for name, _, leaf in tied)]
            found = aside.beside(leaf for _, leaf in named)
            beside = [(name, leaf) for (name, _), leaf in zip(leaves, found, strict=False)]
            tied = [(name, other, leaf) for (name, other, _), leaf in zip(tied, found[len(leaves) :], strict=True)]
    # By default if storage is probably slower than the network between the clients.
    is_shared = checkpoint.is_remote if options.read_once is None else options.read_once
    is_alone = len(collective.participants) == 1
    shared = shareable_tensors(checkpoint, beside) if is_shared and not is_alone else []
    shared = [each for each in shared if not checkpoint.is_held(each.name, own_buffers(each.leaf))]
    handed = None
    if options.read_once is not False and not is_alone:
        handed = handed_on(checkpoint, beside, stack, is_forced=options.read_once is True)
    if collective.phases.is_shown:  # to count the bytes costs about as much as to plan
        collective.phases.expect("read", read_nbytes(checkpoint, leaves))
    # Of a long path the end, which has the step.
    path_end, unasked = str(checkpoint.path)[-MAX_PATH_CHARS:], Unasked.of(planned)
    facts = _CheckpointFacts(
        checkpoint.identity,
        path_end,
        digests_by_mesh(shared),
        [] if handed is None else handed.facts(),
        unasked.digest,
        options.allow_unexpected,
        [] if checkpoint.signed is None else sorted(checkpoint.signed.signers)[:MAX_SIGNERS],
        mesh_facts(leaves, collective.client, collective.participants) if planned.is_new and not is_alone else {},
    )
    prepared = _Prepared(checkpoint, planned, report, leaves, beside, tied, shared, handed, unasked)
    return prepared, json.dumps(facts).encode()


@contextmanager
def _told_of_refusal(options: RestoreOptions, report: RestoreReport) -> Iterator[None]:
    """Report the reason to the caller if the body refuses the restore."""
    try:
        yield
    except DtckptError as error:
        if options.report is not None:
            options.report(replace(report, restored=(), refusal=error.message))
        raise


class _CheckpointFacts(NamedTuple):
    """Facts about the checkpoint that a client opened, for the other clients.

    Args:
        identity: See `Checkpoint.identity`.
        path: The path, cut to its end.
        shared: By mesh, a digest of the tensors that the client would read together with others.
        handed_on: `HandedOn.facts`; empty if there are no such tensors.
        unasked: Digest of the saved names that the client does not ask for.
        allows_unexpected: Whether the client skips names that no client asks for.
        trusted: The ids of its trusted keys that have signed the checkpoint.
        new_layouts: The meshes of its new tensors; empty if it fills a target.
    """

    identity: str
    path: str
    shared: dict[str, str]
    handed_on: list[Any]
    unasked: int
    allows_unexpected: bool
    trusted: list[str]
    new_layouts: MeshFacts


def _validate_same(opened: Mapping[int, _CheckpointFacts]) -> None:
    """Check that all clients opened the same checkpoint."""
    first, *others = sorted(opened)
    for client in others:
        if opened[client].trusted != opened[first].trusted:
            raise CheckpointUntrustedError(
                f"client {client} and client {first} trust different keys; got signatures of "
                f"{opened[client].trusted or 'none'} and {opened[first].trusted or 'none'}; pass the same trusted_keys"
            )
        # Not the paths: clients may see one checkpoint under different mounts.
        if opened[client].identity != opened[first].identity:
            raise CheckpointConflictError(
                f"client {client} and client {first} opened different checkpoints; got {opened[client].path} and "
                f"{opened[first].path}; if these are one path, a save replaced it meanwhile: restore again, and use "
                "one shared file system"
            )
