"""Move a training state from the old world's clients to the new world's clients, directly between their tensors.

::

    old world    client 0       client 1       client 2       client 3
                    |              |            (lost)           |
    new world    client 0       client 1                      client 2
                    |----------- resize/met -------------------|       old client numbers and steps
                 describe       describe                    describe
                    |----------- lend/begin -------------------|       is each part of each tensor here? then a plan
                 digests        digests                     digests
                    |----------- resize/lent ------------------|       each lends its part: nothing is copied
                    |----------- restore/planned, read --------|       each reads its part of the new layouts, verified
                 apply          apply                       apply      only now the target's tensors change
                    |----------- resize/moved -----------------|

The lent parts are a checkpoint in memory (`dtckpt.checkpoint.parts.part_files`), so the rest is the restore of any
checkpoint. The target may share memory with the old state. Such tensors are read into memory beside them, and copied
when no client reads any more.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dtckpt.checkpoint.collective import Collective, is_step
from dtckpt.checkpoint.leaves import is_elsewhere
from dtckpt.checkpoint.managing.restore_newest import RestoredStep
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.parts.lending_folder import LendingFolder
from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.mapped_folder import MappedFolder
from dtckpt.checkpoint.parts.part_files import PartCheckpoint, PartFiles, PartHolder, PartTraffic
from dtckpt.checkpoint.parts.part_writer import described_pieces
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.records import NO_COPIES, PartIndex, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.checkpoint.restoring.aside import AsideMemory
from dtckpt.checkpoint.restoring.layout_choice import Layouts
from dtckpt.checkpoint.restoring.restore import stage_restore
from dtckpt.checkpoint.saving.agree import Proposal, agree
from dtckpt.checkpoint.saving.plan import Holding
from dtckpt.checkpoint.saving.state import MemorySource, State, state_of_tree
from dtckpt.comm import torch_private
from dtckpt.comm.background_threads import Pool
from dtckpt.coordination.api import Coordination, Member, wire_text
from dtckpt.errors import (
    BarrierConflictError,
    ConfigError,
    SourceLostError,
    StorageError,
    TensorPartMissingError,
    capped,
)
from dtckpt.layout.device_mesh import MeshLike

KIND = "memory of clients"
ANSWER_S = 60.0
"""Longest wait for an answer of another client."""
MAX_REASON_CHARS = 500
MAX_ASKED = 8
"""Clients that are asked for indexes at a time."""


@dataclass(frozen=True, slots=True)
class ResizedState:
    """The result of `CheckpointManager.resize`.

    Args:
        step: The step that training goes on from.
        tree: The target, or the new tree.
        steps_lost: Steps that the clients had made, and that must be made again.
        reason: Why the state could not be moved out of the clients' memory; empty if it was.
        restored: The restore of a checkpoint that took its place; None if the state was moved out of memory.
        local_nbytes: Bytes that this client took from its own tensors.
        received_nbytes: Bytes that other clients sent to it.
    """

    step: int
    tree: Any
    steps_lost: int = 0
    reason: str = ""
    restored: RestoredStep | None = None
    local_nbytes: int = 0
    received_nbytes: int = 0


# --- former clients; pure ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormerClient:
    """The facts that a client of the new world tells the others.

    Args:
        step: The step of its state; None: it has none.
        world: The job, the attempt and the number of clients of the world that the state belongs to.
        client: Its number there.
        host: Its host.
        server: The address of its server.
        token: From the leader: lets the clients ask each other's servers.
        save: From the leader: the name of the state as a save.
        seen: The newest step that it has reached, if it has a state that cannot be lent.
        origin: The checkpoint that its run was restored from last, and has saved none since: a `Candidate`'s fields.
    """

    step: int | None
    world: tuple[str, int, int]
    client: int
    host: str
    server: str
    token: str = ""
    save: str = ""
    seen: int | None = None
    origin: tuple[int, str, bool] | None = None

    def to_bytes(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> FormerClient:
        """Read a payload."""
        facts = json.loads(data)
        origin = facts["origin"]
        return cls(**{**facts, "world": tuple(facts["world"]), "origin": None if origin is None else tuple(origin)})


@dataclass(frozen=True, slots=True)
class Givers:
    """The clients that have a state together.

    Args:
        numbers: By number in the old world, their number in the new one; a client that is lost has a number that no
            client of the new world has.
        step: The step of all of them; None if they are at different ones, or there are none.
        newest: The newest step of any; None if there are none.
        reason: Why the state cannot be moved; empty if it may be.
        origin: As in `FormerClient`.
    """

    numbers: Mapping[int, int]
    step: int | None
    newest: int | None
    reason: str
    origin: tuple[int, str, bool] | None = None


def plan_givers(former: Mapping[int, FormerClient]) -> Givers:
    """Return the clients that have a state together.

    Args:
        former: By client of the new world, the client's facts of the old one.

    Raises:
        BarrierConflictError: Two clients were one client of the old world, or come from different worlds.
    """
    seen = [step for each in former.values() for step in (each.step, each.seen) if step is not None]
    newest = max(seen, default=None)
    having = {client: each for client, each in sorted(former.items()) if each.step is not None}
    if not having:
        return Givers({}, None, newest, "no client has a state")
    first = next(iter(having))
    world = having[first].world
    numbers: dict[int, int] = {}
    for client, each in having.items():
        if each.world != world:
            raise BarrierConflictError(
                f"the states of client {first} and client {client} come from different jobs; got {_told(world)} and "
                f"{_told(each.world)}; pass state=None on the clients that are new"
            )
        if each.client in numbers:
            raise BarrierConflictError(
                f"client {numbers[each.client]} and client {client} both were client {each.client} of "
                f"{_told(world)}; pass state=None on the client that is new"
            )
        numbers[each.client] = client
    steps = {client: each.step for client, each in having.items()}
    is_same = len(set(steps.values())) == 1
    reason = "" if is_same else f"the clients are at different steps; got {capped(steps.items())}"
    numbers |= {old: len(former) + old for old in range(world[2]) if old not in numbers}
    return Givers(numbers, steps[first] if is_same else None, newest, reason, having[first].origin)


def _told(world: tuple[str, int, int]) -> str:
    job, attempt, num_clients = world
    return f"job {job!r}, attempt {attempt}, of {num_clients} clients"


def renumbered(state: State, numbers: Mapping[int, int]) -> State:
    """Return the state of a client of the old world with the clients' numbers in the new one."""
    kept: dict[int, tuple[Holding, ...]] = {}
    specs = []
    for spec in state.specs:
        # Tensors that are alike share their holdings, and so their plan.
        if id(spec.holdings) not in kept:
            kept[id(spec.holdings)] = tuple(
                Holding(each.region, tuple(sorted(numbers[client] for client in each.clients)))
                for each in spec.holdings
            )
        specs.append(replace(spec, holdings=kept[id(spec.holdings)]))
    return replace(state, specs=tuple(specs))


def lost_part(state: State, num_clients: int) -> str:
    """Return which part of a renumbered state only lost clients had, as text; empty if there is none.

    Args:
        state: The state of one client.
        num_clients: The clients of the new world.
    """
    for spec in state.specs:
        for holding in spec.holdings:
            if min(holding.clients) >= num_clients:
                lost = capped(client - num_clients for client in holding.clients)
                return f"{holding.region} of tensor {spec.name!r} was on client {lost} alone, which is lost"
    return ""


def validate_state(state: Any, step: int | None) -> None:
    """Check the arguments of a resize. Raises: ConfigError: A state has no step, or an invalid step."""
    if state is not None and not is_step(step):
        raise ConfigError(f"resize: a state needs the step that it is at, a whole number from 0 on; got step={step!r}")


# --- one client's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """The arguments of a client for a resize, as `CheckpointManager.resize` takes them.

    Args:
        state: Its state; None: it has none to lend.
        step: The step of the state.
        seen: The newest step that it has reached.
        origin: As in `FormerClient`.
        world: Its place in the job when it got the state.
        target: As for `dtckpt.restore`, like ``mesh``, ``layouts`` and ``options``.
        begin: Called before the target changes.
        host: Name of this host.
        address: Address at which other hosts reach it.
    """

    state: Any
    step: int | None
    seen: int | None
    origin: tuple[int, str, bool] | None
    world: Member
    target: Any
    mesh: MeshLike | None
    layouts: Layouts | None
    options: RestoreOptions
    begin: Callable[[], object]
    host: str
    address: str


class Resize:
    """One resize, as one client goes through it. A context: at its end nothing is lent any more.

    Args:
        coordination: The connection to the clients of the new world.
        request: This client's part.
    """

    def __init__(self, coordination: Coordination, request: ResizeRequest) -> None:
        self._coordination = coordination
        self._request = request
        self._client = coordination.member.client
        where = Path(tempfile.gettempdir(), f"dtckpt-resize-{secrets.token_hex(8)}")  # never made: all parts are lent
        self._folder = LendingFolder(where, KIND, host=request.host, title="a resize")
        self._server: PartServer | None = None
        self._memory = LentMemory()
        self._lent: SaveId | None = None
        self._is_lent: Callable[[torch.Tensor], bool] = lambda _: False
        self._former: Mapping[int, FormerClient] = {}
        self._lost_part = ""

    def __enter__(self) -> Resize:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lent is not None:
            self._folder.remove(self._lent, self._client)
        if self._server is not None:
            self._server.close()

    def run(self, prepare: Callable[[], object]) -> tuple[Givers, ResizedState | None]:
        """Move the state; return the clients that had it, and the result; None if memory lacks a part of the state.

        Collective: Over all clients of the new world; barriers ``resize/met``, ``resize/lent``, ``resize/moved``;
        ``lend/begin`` over the clients that have a state; and as `dtckpt.restore`.

        Args:
            prepare: Called in the first round.
        """
        timeout_s = self._request.options.timeout_s
        collective = Collective(self._coordination, "resize", timeout_s)
        with collective.process_lock():
            givers = self._meet(collective, prepare)
            if givers.reason:
                return givers, None
            lent = self._describe(givers, timeout_s)
            # A separate operation: clients without a state took no part in the operation before.
            collective = Collective(self._coordination, "resize", timeout_s)
            _, payloads = collective.run_round_with_value("lent", lambda: (None, self._lend(lent)))
            if reasons := [data.decode() for _, data in sorted(payloads.items()) if data]:
                return replace(givers, reason=reasons[0]), None
            with collective.as_parent():
                moved, _ = collective.run_round_with_value("moved", lambda: (self._move(givers), b""))
            return givers, moved

    # --- meet -------------------------------------------------------------------------------------------------------

    def _meet(self, collective: Collective, prepare: Callable[[], object]) -> Givers:
        """Exchange the clients' facts of the old world. Collective: round ``met``."""
        request = self._request

        def introduce() -> bytes:
            prepare()
            validate_state(request.state, request.step)
            try:
                server = self._server = PartServer(self._folder, request.address, ANSWER_S)
            except OSError as error:
                raise ConfigError(f"resize: this client cannot listen at {request.address!r}: {error}") from error
            world = request.world
            former = FormerClient(
                None if request.state is None else request.step,
                (world.job, world.attempt, world.num_clients),
                world.client,
                request.host,
                server.url,
                seen=request.seen,
                origin=request.origin,
            )
            if collective.is_leader:
                name = SaveId(time.time_ns(), 0, len(collective.participants), False, secrets.token_hex(4)).name
                former = replace(former, token=secrets.token_hex(16), save=name)
            return former.to_bytes()

        payloads = collective.run_round("met", introduce)
        self._former = {client: FormerClient.from_bytes(data) for client, data in sorted(payloads.items())}
        assert self._server is not None  # noqa: S101  made in the round
        self._server.open(self._former[collective.leader].token)
        return plan_givers(self._former)

    def _peer(self, client: int) -> Peer:
        own = self._former[client]
        return Peer(own.server, self._title(client), self._former[min(self._former)].token, ANSWER_S)

    def _title(self, client: int) -> str:
        return f"{self._former[client].host} (client {client})"

    # --- lend -------------------------------------------------------------------------------------------------------

    def _describe(self, givers: Givers, timeout_s: float) -> Callable[[], PartIndex | None]:
        """Agree with the other clients on the lender of each part; return a function that makes the index.

        The function raises the error of this, so that clients without a state learn it, too.

        Collective: Over the clients that have a state; as `agree`.
        """
        request, client = self._request, self._client
        lending = sorted(set(givers.numbers.values()) & self._former.keys())
        server = self._server
        assert server is not None  # noqa: S101  made in the first round
        if client not in lending:
            return lambda: None
        options = SaveOptions(keys="union", check_replicas=False)
        collective = Collective(self._coordination, "lend", timeout_s, lending)

        def propose() -> tuple[Proposal, bytes]:
            old, kept_by = request.world, ClientNumber(client, len(self._former))
            state = state_of_tree(request.state, options, old.client, range(old.num_clients), kept_by=kept_by)
            state = renumbered(state, givers.numbers)
            self._lost_part = lost_part(state, len(self._former))
            proposal = Proposal.of(state, collective.participants, options)
            summary = proposal.summary()
            server.keep_texts({proposal.digest: proposal.text, summary.tree: proposal.state.tree})
            return proposal, summary.to_bytes()

        def read(_: str, other: int, digest: int) -> bytes:
            return server.texts[digest] if other == client else self._peer(other).text(digest)

        try:
            agreed = agree(collective, propose, lambda state, _: state, read, step=givers.step)
        except Exception as failure:
            error = failure  # the name of the clause ends with it

            def fail() -> None:
                raise error

            return fail

        def describe() -> PartIndex:
            save = replace(SaveId.parse(self._former[min(self._former)].save), step=request.step or 0)
            staged = agreed.state
            tensors, pieces, _ = described_pieces(staged, agreed.plan, self._memory, client, NO_COPIES)
            assert isinstance(staged.source, MemorySource)  # noqa: S101  described above
            self._is_lent = overlap_with(staged.source.tensors)
            return PartIndex(save, client, self._memory.nbytes, staged.tree, tensors, pieces, {})

        return describe

    def _lend(self, describe: Callable[[], PartIndex | None]) -> bytes:
        """Lend this client's part; return why it cannot, empty if it can, or has none."""
        try:
            index = describe()
        except TensorPartMissingError as error:
            return wire_text(self._lost_part or error.message)[:MAX_REASON_CHARS].encode()
        if index is not None:
            self._folder.lend(self._memory, index, index.to_bytes())
            self._lent = index.save
        return b""

    # --- move -------------------------------------------------------------------------------------------------------

    def _move(self, givers: Givers) -> ResizedState:
        """Restore the lent parts as a checkpoint. Collective: As `dtckpt.restore` over all clients."""
        # The old state has just been described: a tensor of the target must not get the mesh of an equal tensor.
        torch_private.forget_meshes()
        request, opened = self._request, list[PartCheckpoint]()
        assert givers.step is not None  # noqa: S101  else the clients go back
        name = Path(f"memory of step {givers.step}")

        def open_() -> PartCheckpoint:
            opened.append(self._open(givers, name))
            return opened[-1]

        staged = stage_restore(
            name,
            lambda _: nullcontext(open_),
            request.target,
            AsideMemory(needs=self._is_lent),
            mesh=request.mesh,
            layouts=request.layouts,
            # The clients trust the state that they have trained: they would sign it.
            options=replace(request.options, trusted_keys=()),
            group=range(len(self._former)),
        )
        # Every client has read all that it needs, so the lent memory may change.
        request.begin()
        tree = staged.apply()
        traffic: PartTraffic = opened[-1].parts.traffic
        return ResizedState(givers.step, tree, local_nbytes=traffic.local, received_nbytes=traffic.received)

    def _open(self, givers: Givers, name: Path) -> PartCheckpoint:
        """Open the lent parts for reading. Local; asks the other clients for the indexes of their parts."""
        clients = sorted(set(givers.numbers.values()) & self._former.keys())
        save = replace(SaveId.parse(self._former[min(self._former)].save), step=givers.step or 0)
        own = MappedFolder(self._folder, self._request.host)
        sources = {client: own if client == self._client else self._peer(client) for client in clients}
        with Pool(MAX_ASKED, "dtckpt-resize-indexes") as pool:
            asked = {client: pool.submit(_index_of, source, save, client) for client, source in sources.items()}
            indexes = {client: index.result() for client, index in asked.items()}
        holders = {client: [PartHolder(self._title(client), source)] for client, source in sources.items()}
        title = f"step {givers.step} in the memory of the clients"
        files = PartFiles(save, indexes, holders, kind=KIND, title=title, lost_error=SourceLostError)
        return PartCheckpoint(files, name, is_remote=len(self._former) > 1)


def _index_of(source: MappedFolder | Peer, save: SaveId, client: int) -> PartIndex:
    """Return the index of a client's part. Raises: SourceLostError: The client does not answer."""
    try:
        return PartIndex.from_bytes(source.index_file(save, client))
    except StorageError as error:
        raise SourceLostError(f"client {client} does not lend its part any more: {error.message}") from error


def overlap_with(tensors: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Return a function that tells whether a tensor shares memory of the host with some of these tensors."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted({_span(tensor) for tensor in tensors if not is_elsewhere(tensor)}):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    starts = [start for start, _ in spans]

    def overlaps(tensor: torch.Tensor) -> bool:
        if not tensor.is_cpu:
            return False
        start, stop = _span(tensor)
        place = bisect_right(starts, stop)
        return place > 0 and spans[place - 1][1] > start

    return overlaps


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address and the end address of the memory of a tensor and of all its views."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
