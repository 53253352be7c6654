"""Restore checkpoints: into the tensors of a target tree, or as new tensors on any mesh."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dtckpt.checkpoint.collective import Rounds
from dtckpt.checkpoint.gc_pause import uncollected
from dtckpt.checkpoint.leaves import Leaf, as_leaf, host_array, mesh_of, own_array, validate_mode
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint, TensorInfo, new_memory, open_checkpoint
from dtckpt.checkpoint.restoring.read_once import Shared, agreed, announced, read_shared, shareable
from dtckpt.checkpoint.restoring.renaming import renamed
from dtckpt.checkpoint.restoring.report import Cast, Reshaped, RestoreReport
from dtckpt.checkpoint.restoring.shared_memory import Named, split_tied, validate_apart
from dtckpt.checkpoint.restoring.targets import Matcher, tensors_of
from dtckpt.checkpoint.saving.votes import Written
from dtckpt.checkpoint.timing import Phases, find_slow
from dtckpt.comm import host_memory
from dtckpt.comm.torch_device import device_of
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.components import same_bits
from dtckpt.errors import (
    CheckpointConflictError,
    DtckptError,
    DTypeError,
    LayoutError,
    LayoutTypeError,
    ReplicaMismatchError,
    ShapeMismatchError,
    TensorNotFoundError,
    TreeError,
    UnexpectedTensorError,
    capped,
)
from dtckpt.format import tree as trees
from dtckpt.format.dtypes import is_convertible, is_lossless
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

MAX_TRIES = 3
"""How often a local restore begins anew when a save replaces the checkpoint meanwhile."""
SOON_NBYTES = 256 << 20
"""Reads of no more bytes soon end; the cycle collector waits for them."""
MAX_PATH_CHARS = 250
"""What clients tell each other of a path; with twelve bytes a character, escaped, it still fits a barrier's payload."""

LayoutChoice = Layout | Callable[[str, TensorInfo], Layout]
Layouts = Mapping[str, LayoutChoice] | Callable[[str, TensorInfo], Layout]
"""Layouts by tensor name or glob (first match wins), each a Layout or a function of (name, info); or one function."""


def restore(
    path: str | Location,
    target: Any = None,
    *,
    mesh: Mesh | None = None,
    layouts: Layouts | None = None,
    options: RestoreOptions | None = None,
) -> Any:
    """Restore a checkpoint, into any layout on any mesh, whatever it was saved from.

    With ``target``, tensors and DTensors of that tree are filled in place, plain values in its dicts and lists are
    replaced, stateful objects get their state; containers keep their classes, and named tuples and dataclasses take
    fields by name. Without, the saved tree comes back, with plain CPU tensors, or with new DTensors where ``mesh`` or
    ``layouts`` say so; named tuples and dataclasses have stand-ins then (docs/checkpointing.md).

    Every client reads only the chunks that meet its regions, straight into the destination, and verifies them; or its
    part of what several clients need, and hands it on (`RestoreOptions.read_once`).

    Collective: Over all clients of the meshes that the tensors lie on; barriers ``restore/planned`` (before anything
    is written) and ``restore/read``. Local where no tensor lies on another client.

    Args:
        path: The checkpoint.
        target: Tree to be filled.
        mesh: Mesh for new DTensors; every tensor becomes one then, replicated if it was on no mesh. Tensors that no
            entry of ``layouts`` matches keep their saved sharding specs as far as the mesh has those axes, and are
            unsharded otherwise.
        layouts: See `Layouts`. With functions, pass ``mesh`` too: it says which clients take part.
        options: See `RestoreOptions`.

    Returns:
        ``target``, or the new tree.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; `CheckpointIncompleteError`: only an unfinished one.
        TensorNotFoundError: The target asks for something that the checkpoint lacks.
        UnexpectedTensorError: The checkpoint has something that the target does not ask for.
        ShapeMismatchError: A tensor's shape differs.
        DTypeError: A dtype conversion is not allowed by ``options.cast``, or a tensor of the target is not dense
            memory of its own.
        TreeError: The target holds something that cannot be filled.
        CheckpointCorruptError: Stored bytes are not the bytes that were saved.
    """
    options = options or RestoreOptions()
    coordination = current_coordination()
    failure: Exception | None = None
    try:
        if target is not None and (mesh is not None or layouts is not None):
            raise TreeError("restore takes a target, or mesh and layouts for new tensors; got both")
        meshes = _meshes_of(target) if target is not None else _meshes_asked(mesh, layouts)
        clients = {client for item in meshes for client in item.clients}
        participants = sorted(clients | {coordination.member.client}) if clients else [coordination.member.client]
    except Exception as error:
        # The others wait for this client; it must come and say why it cannot go on.
        failure, participants = error, list(range(coordination.member.num_clients))

    def plan(checkpoint: Checkpoint) -> Filling:
        if failure is not None:
            raise failure
        if target is not None:
            return plan_target(checkpoint, target, options)
        return plan_new(checkpoint, mesh, layouts, options)

    return run_restore(path, plan, options, coordination, participants)


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """What a restore will do: memory to be filled, by tensor name, and what to do and return afterwards."""

    leaves: Sequence[tuple[str, Leaf]]
    finish: Callable[[], Any] = field(repr=False)
    renamed: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    defaulted: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def report(self, checkpoint: Checkpoint) -> RestoreReport:
        """Say what will be done."""
        restored: list[str] = []
        reshaped: list[Reshaped] = []
        cast: list[Cast] = []
        for source, leaf in self.leaves:
            name, kind = self.renamed.get(source, source), checkpoint.entry(source).kind
            restored.append(name)
            if kind.grid.shape != leaf.shape:
                reshaped.append(Reshaped(name, kind.grid.shape, leaf.shape))
            if kind.dtype != leaf.dtype:
                cast.append(Cast(name, kind.dtype, leaf.dtype))
        return RestoreReport(
            path=checkpoint.path,
            restored=tuple(restored),
            missing=tuple(self.missing),
            defaulted=tuple(self.defaulted),
            unexpected=tuple(self.unexpected),
            reshaped=tuple(reshaped),
            cast=tuple(cast),
            renamed=dict(self.renamed),
        )


def run_restore(
    path: str | Location,
    plan: Callable[[Checkpoint], Filling],
    options: RestoreOptions,
    coordination: Coordination,
    participants: Sequence[int] | None,
) -> Any:
    """Run the restore protocol. Collective: Over ``participants`` (default: all clients of the job)."""
    rounds = Rounds(coordination, "restore", options.timeout_s, participants)
    is_alone = len(rounds.participants) == 1
    for is_last in (False,) * (MAX_TRIES - 1) + (True,):
        try:
            with rounds.exclusive(), rounds.phases.operation(path, is_shown=options.progress and rounds.client == 0):
                return _run_once(path, plan, options, rounds)
        except CheckpointConflictError:
            # A save replaced the checkpoint meanwhile. Several clients cannot tell that alike, so they give up.
            if is_last or not is_alone:
                raise
    return None


def _run_once(
    path: str | Location, plan: Callable[[Checkpoint], Filling], options: RestoreOptions, rounds: Rounds
) -> Any:
    opened: list[tuple[Checkpoint, Filling, list[Named], list[tuple[str, str, Leaf]], list[Shared]]] = []
    reports: list[RestoreReport] = []
    phases = rounds.phases

    def prepare() -> bytes:
        validate_mode()
        with uncollected():
            checkpoint = open_checkpoint(path)
            filling = plan(checkpoint)
            reports.append(filling.report(checkpoint))
        try:
            _validate_report(reports[0], options)
        except DtckptError as error:
            if options.report is not None:
                options.report(replace(reports[0], restored=(), refusal=error.message))
            raise
        with uncollected():
            apart, tied = split_tied(filling.leaves)
            validate_apart(apart)
        is_shared = checkpoint.is_remote if options.read_once is None else options.read_once
        shared = shareable(checkpoint, apart) if is_shared and len(rounds.participants) > 1 else []
        opened.append((checkpoint, filling, apart, tied, shared))
        if phases.is_shown:  # it costs about as much as a plan
            phases.expect("read", sum(_read_nbytes(checkpoint, name, leaf) for name, leaf in apart))
        facts = _Opened(checkpoint.manifest.attempt, str(checkpoint.path)[-MAX_PATH_CHARS:], announced(shared))
        return json.dumps(facts).encode()

    found = {
        client: _Opened(*json.loads(data)) for client, data in rounds.run("planned", prepare, phase="plan").items()
    }
    checkpoint, filling, apart, tied, shared = opened[0]
    with checkpoint:
        _validate_same(found)
        together = agreed(shared, {client: facts.shared for client, facts in found.items()})

        def read() -> bytes:
            _read(checkpoint, apart, tied, together, phases)
            return Written(0, phases.costs).to_bytes()

        told = rounds.run("read", read)
        slow = find_slow({client: Written.from_bytes(data).costs for client, data in told.items()})
        if slow is not None and rounds.is_leader:
            logger.warning("restore of %s: %s", path, slow)
        result = filling.finish()
    if options.report is not None:
        options.report(replace(reports[0], phases=phases.costs))
    return result


class _Opened(NamedTuple):
    """What a client says of the checkpoint that it opened: whose, where, and what it would read with others."""

    attempt: str
    path: str
    shared: dict[str, str]


def _validate_same(found: Mapping[int, _Opened]) -> None:
    """Check that all clients opened one checkpoint: that of one attempt."""
    first, *others = sorted(found)
    for client in others:
        if found[client].attempt != found[first].attempt:
            raise CheckpointConflictError(
                f"client {client} and client {first} opened different checkpoints; got {found[client].path} and "
                f"{found[first].path}; if these are one path, a save replaced it meanwhile: restore again, and use one "
                "shared file system"
            )


def _validate_report(report: RestoreReport, options: RestoreOptions) -> None:
    """Refuse what the options do not allow."""
    missing = sorted((*report.missing, *report.defaulted))
    if missing and not options.allow_missing:
        raise TensorNotFoundError(
            f"checkpoint {report.path} has nothing at {capped(map(repr, missing))}; "
            "RestoreOptions(allow_missing=True) leaves the target as it is there",
            name=missing[0],
        )
    if report.unexpected and not options.allow_unexpected:
        raise UnexpectedTensorError(
            f"checkpoint {report.path} holds what the target does not ask for: "
            f"{capped(map(repr, report.unexpected))}; RestoreOptions(allow_unexpected=True) passes over it",
            names=report.unexpected,
        )
    if report.reshaped:
        first, *more = report.reshaped
        raise ShapeMismatchError(
            f"tensor {first.name!r} has another shape; got {first.target} in the target, expected {first.saved}"
            f"{_others(more)}"
        )
    fixed = [cast for cast in report.cast if not is_convertible(cast.saved, cast.target)]
    if fixed:
        raise DTypeError(
            f"tensor {fixed[0].name!r} cannot be converted; got {fixed[0].target} in the target, saved as "
            f"{fixed[0].saved}{_others(fixed[1:])}; restore it as {fixed[0].saved} and convert it then"
        )
    refused = [
        cast
        for cast in report.cast
        if options.cast == "exact" or (options.cast == "lossless" and not is_lossless(cast.saved, cast.target))
    ]
    if refused:
        raise DTypeError(
            f"tensor {refused[0].name!r} would be converted; got {refused[0].target} in the target, saved as "
            f"{refused[0].saved}{_others(refused[1:])}; conversions allowed now: {options.cast}; "
            "RestoreOptions(cast='any') allows all"
        )


def _others(found: Sequence[Reshaped | Cast]) -> str:
    return f" (and so have {capped(repr(item.name) for item in found)})" if found else ""


def _read_nbytes(checkpoint: Checkpoint, name: str, leaf: Leaf) -> int:
    info = checkpoint.info(name)
    return sum(info.read_nbytes(region) for region, _ in leaf.distinct_parts())


def _read(
    checkpoint: Checkpoint,
    leaves: Sequence[Named],
    tied: Sequence[tuple[str, str, Leaf]],
    shared: Sequence[Shared],
    phases: Phases,
) -> None:
    """Fill the tensors; those that are ``shared`` together with other clients."""
    read = partial(checkpoint.read_all, count=phases.count)
    with torch.no_grad():
        read_shared(checkpoint, shared, phases)
        filled = {id(one.leaf) for one in shared}
        direct: list[tuple[str, list[tuple[Region, np.ndarray[Any, Any]]]]] = []
        staged: list[tuple[str, Region, torch.Tensor]] = []
        copied: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        nbytes = 0
        with uncollected():
            for name, leaf in leaves:
                wanted = []
                for region, (first, *copies) in () if id(leaf) in filled else leaf.distinct_parts():
                    memory = own_array(first)
                    if memory is None:
                        staged.append((name, region, first))
                    else:
                        wanted.append((region, memory))
                        nbytes += memory.nbytes
                    if copies:
                        copied.append((first, copies))
                direct.append((name, wanted))
        with uncollected() if nbytes <= SOON_NBYTES else nullcontext():
            read(direct)
        for name, region, target in staged:
            # One tensor at a time, so that the host needs room for one only.
            host = host_memory.allocate(target.shape, target.dtype)
            read([(name, [(region, host_array(host))])])
            _move(host, [target], phases)
        for first, copies in copied:
            _move(first, copies, phases)
    _validate_tied(read, tied)


def _move(source: torch.Tensor, targets: Sequence[torch.Tensor], phases: Phases) -> None:
    with phases.measure("move"):
        for target in targets:
            target.copy_(source)
            phases.count(target.nbytes)


def _validate_tied(read: Callable[..., object], tied: Sequence[tuple[str, str, Leaf]]) -> None:
    """Check that names of one memory were saved with one value."""
    for name, other, leaf in tied:
        for region, copies in leaf.distinct_parts():
            stored = torch.empty(copies[0].shape, dtype=copies[0].dtype)
            read([(name, [(region, host_array(stored))])])
            if not same_bits(stored, copies[0]):
                raise ReplicaMismatchError(
                    f"tensors {name!r} and {other!r} share memory in the target, but were saved with different values; "
                    "give them memory of their own"
                )


# --- into a target tree ---------------------------------------------------------------------------------------------


def _meshes_of(target: Any) -> set[Mesh]:
    return {mesh for mesh in map(mesh_of, tensors_of(target)) if mesh is not None}


def renamed_by(checkpoint: Checkpoint, options: RestoreOptions) -> dict[str, str]:
    """Return the new names of a checkpoint's tensors and values."""
    if options.rename is None:
        return {}
    return renamed(options.rename, [*checkpoint.tensors, *checkpoint.values])


def plan_target(checkpoint: Checkpoint, target: Any, options: RestoreOptions) -> Filling:
    """Match a target tree with a checkpoint."""
    names = renamed_by(checkpoint, options)
    structure = trees.rename(checkpoint.structure, names) if names else checkpoint.structure
    matcher = Matcher(checkpoint, is_renamed=bool(names))
    replacement = matcher.visit(target, structure, ())

    def finish() -> Any:
        result = replacement()
        for load in matcher.loads:
            load()
        return result

    unused = {*checkpoint.tensors, *(path for path, _ in trees.values(structure))} - matcher.wanted
    unexpected = sorted(names.get(name, name) if name in checkpoint.tensors else name for name in unused)
    return Filling(matcher.leaves, finish, names, sorted(matcher.missing), sorted(matcher.defaulted), unexpected)


# --- as new tensors -------------------------------------------------------------------------------------------------


def _meshes_asked(mesh: Mesh | None, layouts: Layouts | None) -> set[Mesh]:
    found = set() if mesh is None else {mesh}
    if isinstance(layouts, Mapping):
        found |= {choice.mesh for choice in layouts.values() if isinstance(choice, Layout)}
    return found


def plan_new(checkpoint: Checkpoint, mesh: Mesh | None, layouts: Layouts | None, options: RestoreOptions) -> Filling:
    """Make memory for every tensor of a checkpoint, in the layouts asked for."""
    names = renamed_by(checkpoint, options)
    structure = trees.rename(checkpoint.structure, names) if names else checkpoint.structure
    infos = dict(checkpoint.tensors)
    chosen = {name: choose_layout(names.get(name, name), info, mesh, layouts) for name, info in infos.items()}
    checkpoint.validate_stored(
        (name, region) for name, layout in chosen.items() for region in _own_regions(infos[name].shape, layout)
    )
    tensors: dict[str, torch.Tensor] = {
        name: new_memory(name, infos[name].shape, infos[name].dtype)
        if layout is None
        else empty(infos[name].shape, infos[name].dtype, layout)
        for name, layout in chosen.items()
    }
    leaves = [(name, as_leaf(tensor, name)) for name, tensor in tensors.items()]
    return Filling(leaves, lambda: trees.build(structure, tensors.__getitem__), names)


def _own_regions(shape: tuple[int, ...], layout: Layout | None) -> set[Region]:
    """Return what this client will hold of a tensor."""
    if layout is None:
        return {Region.full(shape)}
    return {layout.region(device, shape) for device in layout.mesh.local_device_ids()}


def empty(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> DTensor:
    """Return a DTensor with uninitialised components."""
    components = [
        host_memory.allocate(layout.region(device, shape).shape, dtype, device_of(name))
        for device, name in zip(layout.mesh.local_device_ids(), layout.mesh.local_devices(), strict=True)
    ]
    return DTensor(components, layout, shape, dtype)


def choose_layout(name: str, info: TensorInfo, mesh: Mesh | None, layouts: Layouts | None) -> Layout | None:
    """Return the layout that a tensor is restored into; None for a plain tensor.

    Raises:
        LayoutError: The chosen layout does not have the tensor's rank.
        LayoutTypeError: What was chosen is no Layout.
    """
    choice: Any = None
    if callable(layouts) and not isinstance(layouts, Mapping):
        choice = layouts
    elif layouts is not None:
        choice = layouts.get(name) or next(
            (chosen for pattern, chosen in layouts.items() if fnmatch.fnmatchcase(name, pattern)), None
        )
    if callable(choice):
        choice = choice(name, info)
    if choice is None:
        return None if mesh is None else kept_layout(info, mesh)
    if not isinstance(choice, Layout):
        raise LayoutTypeError(f"layout for tensor {name!r} must be a Layout; got {type(choice).__name__}")
    if choice.rank != len(info.shape):
        raise LayoutError(
            f"layout for tensor {name!r} does not fit; got rank {choice.rank}, expected {len(info.shape)} dims"
        )
    return choice


def kept_layout(info: TensorInfo, mesh: Mesh) -> Layout:
    """Return the saved sharding specs on another mesh: axes that it lacks are left out."""
    specs: list[str | tuple[str, ...]] = []
    for spec in info.layout.sharding_specs if info.layout else [UNSHARDED] * len(info.shape):
        axes = [axis for axis in ((spec,) if isinstance(spec, str) else spec) if axis in mesh]
        specs.append(tuple(axes) if axes else UNSHARDED)
    return Layout(specs, mesh)
