"""Save state as one checkpoint: every client's part of it, agreed on at barriers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.agreement import Summary, validate_agreement
from dtckpt.checkpoint.leaves import Leaf, Stateful, as_leaf, host_array, is_tensor
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.reader import local_path
from dtckpt.checkpoint.rounds import Rounds
from dtckpt.checkpoint.writing import ClientWriter, Source, merge_clients
from dtckpt.coordination import Coordination, current_coordination
from dtckpt.errors import SliceError
from dtckpt.format import tree as trees
from dtckpt.format.manifest import Manifest
from dtckpt.format.slices import parse_slice_spec
from dtckpt.planning.save_plan import Holding, SavePlan, TensorPlan, TensorSpec, holdings_of, plan_save
from dtckpt.region import Region
from dtckpt.storage import directory


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save went, as one client saw it.

    Args:
        path: The checkpoint.
        nbytes: Bytes of tensor data in it.
        client_nbytes: Bytes that this client wrote.
        seconds: Seconds per round, waiting for the others included: ``begin``, ``edges``, ``written``, ``merged``.
    """

    path: Path
    nbytes: int
    client_nbytes: int
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Seconds of all rounds."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is to be saved.

    Args:
        specs: The tensors, as the plan sees them.
        source: Where this client's elements come from.
        tree: Structure and plain values as JSON.
        max_pending_nbytes: Bound on the elements that wait to be written; default none.
    """

    specs: Sequence[TensorSpec]
    source: Source
    tree: bytes = b""
    max_pending_nbytes: int | None = None


def save(path: str | Path, tree: Any, *, options: SaveOptions | None = None) -> SaveReport:
    """Save a state tree as the checkpoint at ``path``.

    Collective: Over all clients of the job, which pass the same tree; barriers ``save/begin``, ``save/written`` and
    ``save/merged`` (and ``save/edges`` where unevenly nested shards share chunks). Every client returns, or every
    client raises the same error. After an error the path holds what it held before, or, where a client was lost after
    the commit, the new checkpoint; never anything else.

    Blocks: On storage, and on the slowest client, each barrier at most ``options.timeout_s`` seconds.

    Args:
        path: Directory of the checkpoint; parents are made.
        tree: Nested dicts, lists and tuples of DTensors (also PyTorch's), tensors (a copy on every client), None,
            bool, int, float, str, bytes (the same on every client), and objects with ``state_dict()`` and
            ``load_state_dict()``.
        options: See `SaveOptions`.

    Raises:
        CheckpointExistsError: There is something at the path (and no consent to replace a checkpoint).
        TreeError: The tree holds something that cannot be saved.
        TensorNameError: A key cannot be part of a tensor's name.
        DTypeError: A tensor's dtype cannot be stored.
        SaveDisagreementError: Clients save different things.
        ClientLostError: A client died.
        BarrierTimeoutError: A client did not arrive in time.
        StorageError: Storage refused; `StorageFullError` and `StoragePermissionError` are its common cases.

    >>> import tempfile, torch, dtckpt
    >>> path = tempfile.mkdtemp() + "/step_1"
    >>> report = dtckpt.save(path, {"weight": torch.ones(2, 3), "step": 1})
    >>> dtckpt.restore(path)["step"]
    1
    """

    def collect() -> State:
        leaves, structure = trees.flatten(expand_stateful(tree), is_tensor)
        entries = [(name, value, "") for name, value in leaves.items()]
        everyone = range(coordination.member.num_clients)
        return state_of(entries, options or SaveOptions(), clients=everyone, tree=trees.dump(structure))

    coordination = current_coordination()
    return save_state(path, collect, options=options, coordination=coordination)


def expand_stateful(tree: Any, depth: int = 0) -> Any:
    """Replace every stateful object in a tree by its state."""
    if isinstance(tree, torch.Tensor) or depth > trees.MAX_DEPTH:
        return tree  # what is too deep is refused, by path, when the tree is flattened
    if isinstance(tree, Mapping):
        return {key: expand_stateful(child, depth + 1) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        # A named tuple comes back as a plain one; its class could not be named without running its code.
        children = [expand_stateful(child, depth + 1) for child in tree]
        return children if isinstance(tree, list) else tuple(children)
    if isinstance(tree, Stateful):
        return expand_stateful(tree.state_dict(), depth + 1)
    return tree


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
    specs: list[TensorSpec] = []
    parts: dict[str, list[tuple[Region, list[torch.Tensor]]]] = {}
    for name, tensor, slice_text in entries:
        leaf = as_leaf(tensor)
        place = parse_slice_spec(slice_text, leaf.shape)
        is_rounded = (options.save_as_bf16 or leaf.save_as_bf16) and leaf.dtype == "float32"
        stored = "bfloat16" if is_rounded else leaf.dtype
        holdings = _holdings(leaf, clients)
        moved = tuple(Holding(item.region.translate(place.region.offset), item.clients) for item in holdings)
        is_whole = place.full_shape == leaf.shape
        specs.append(TensorSpec(name, place.full_shape, leaf.dtype, stored, moved, leaf.layout if is_whole else None))
        parts.setdefault(name, []).extend(
            (region.translate(place.region.offset), copies) for region, copies in leaf.distinct_parts().items()
        )
    return State(specs, MemorySource(parts), tree)


def _holdings(leaf: Leaf, clients: Sequence[int]) -> tuple[Holding, ...]:
    if leaf.layout is not None:
        return holdings_of(leaf.layout, leaf.shape)
    whole = Region.full(leaf.shape)
    return () if whole.is_empty else (Holding(whole, tuple(clients)),)


class MemorySource:
    """Elements from tensors in this client's memory: per tensor name, boxes and the local copies of each."""

    def __init__(self, parts: Mapping[str, Sequence[tuple[Region, list[torch.Tensor]]]]) -> None:
        self._parts = parts
        self._host: dict[int, np.ndarray[Any, Any]] = {}

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return a view of the elements of a region inside one of the boxes."""
        for box, copies in self._parts[plan.spec.name]:
            if box.contains(region):
                array = self._host_array(copies[0])
                return array[region.relative_to(box).slices()] if region.ndim else array
        raise SliceError(f"this client does not hold {region} of tensor {plan.spec.name!r}")

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[np.ndarray[Any, Any]]:
        """Return all local copies of a box."""
        found = next(copies for box, copies in self._parts[plan.spec.name] if box == region)
        return [self._host_array(copy) for copy in found]

    def _host_array(self, memory: torch.Tensor) -> np.ndarray[Any, Any]:
        # A tensor on a card is copied to the host once, not once per chunk.
        if id(memory) not in self._host:
            self._host[id(memory)] = host_array(memory)
        return self._host[id(memory)]


def save_state(
    path: str | Path,
    collect: Callable[[], State],
    *,
    options: SaveOptions | None = None,
    coordination: Coordination | None = None,
    participants: Sequence[int] | None = None,
) -> SaveReport:
    """Run the save protocol. Collective and errors: as `save`, over ``participants``.

    Args:
        path: The checkpoint's directory.
        collect: Gives this client's side of the state; its errors reach all clients.
        options: See `SaveOptions`.
        coordination: The way to the other clients; default: that of this process.
        participants: The clients that save; default: all of the job.
    """
    options = options or SaveOptions()
    coordination = coordination or current_coordination()
    rounds = Rounds(coordination, "save", options.timeout_s, participants)
    attempt = _Attempt(path, collect, options, coordination, rounds)
    with rounds.exclusive():
        try:
            return attempt.run()
        except BaseException:
            attempt.abandon()
            raise


class _Attempt:
    """One attempt at a save, as one client goes through it."""

    def __init__(
        self,
        path: str | Path,
        collect: Callable[[], State],
        options: SaveOptions,
        coordination: Coordination,
        rounds: Rounds,
    ) -> None:
        self._path = path
        self._collect = collect
        self._options = options
        self._member = coordination.member
        self._rounds = rounds
        self._staging: directory.Staging | None = None
        self._client_nbytes = 0

    def run(self) -> SaveReport:
        """Go through all rounds."""
        state, plan, token = self._begin()
        target = local_path(self._path)
        writer = ClientWriter(
            plan,
            directory.staging_path(target, token),
            self._rounds.client,
            state.source,
            kvstore=self._options.kvstore,
            is_durable=self._options.fsync,
            max_pending_nbytes=state.max_pending_nbytes,
        )
        if plan.has_moves:
            self._rounds.run("edges", writer.hand_over)
        announced = self._rounds.run("written", lambda: self._write(writer))
        self._rounds.run("merged", lambda: self._finish(plan, state, token, announced))
        return SaveReport(target, plan.nbytes, self._client_nbytes, dict(self._rounds.seconds))

    def _begin(self) -> tuple[State, SavePlan, str]:
        found: list[tuple[State, SavePlan]] = []

        def prepare() -> bytes:
            target = local_path(self._path)
            state = self._collect()
            plan = plan_save(state.specs, self._options.chunk_nbytes)
            found.append((state, plan))
            token = ""
            if self._rounds.is_leader:
                token = f"{self._member.attempt}-{self._member.incarnation:x}-{secrets.token_hex(4)}"
                directory.check_target(target, overwrite=self._options.overwrite)
                self._staging = directory.begin(target, token)
            return Summary.of(str(target), token, plan, state.tree, self._options).to_bytes()

        payloads = self._rounds.run("begin", prepare)
        state, plan = found[0]
        validate_agreement(payloads, plan)
        return state, plan, Summary.from_bytes(payloads[self._rounds.leader]).token

    def _write(self, writer: ClientWriter) -> bytes:
        digest, self._client_nbytes = writer.write(check_replicas=self._options.check_replicas)
        return digest

    def _finish(self, plan: SavePlan, state: State, token: str, announced: Mapping[int, bytes]) -> None:
        if not self._rounds.is_leader or self._staging is None:
            return
        options = self._options
        manifest = Manifest(
            kvstore=options.kvstore,
            arrays={},
            tree=state.tree,
            job=self._member.job,
            num_clients=len(self._rounds.participants),
            attempt=token,
        )
        merge_clients(plan, self._staging.path, announced, manifest, is_durable=options.fsync)
        directory.commit(self._staging, overwrite=options.overwrite, is_durable=options.fsync)

    def abandon(self) -> None:
        """Remove what this attempt left under construction."""
        if self._staging is not None:
            directory.abandon(self._staging)
