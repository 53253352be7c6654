"""Save a step in the local tier: copy, agree, take digests, vote, and copy to other hosts.

A local save has three rounds. In ``local/begin`` every client copies its share into a file of its host's tier, and
votes. Training waits only for this round. In the background the clients meet in ``local/staged`` when all have copied,
because digests would take the processor from a neighbour that still copies. Then they compute digests, and in
``local/held`` all learn whether all parts are whole. From then on the save counts, and clients copy the parts to other
hosts::

    training      | begin: copy |  next steps ...
    background                  | staged | digests | held: all parts are whole | copies to partners |  (written to root)
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.parts.part_writer import PartInProgress, described_pieces
from dtckpt.checkpoint.parts.records import PartIndex, SaveId
from dtckpt.checkpoint.saving.agree import Agreed, Proposal, agree
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.checkpoint.tiers.holdings import saves_to_keep
from dtckpt.checkpoint.tiers.near_copies import near_copies
from dtckpt.checkpoint.tiers.replicator import OutgoingPart
from dtckpt.checkpoint.tiers.session import Joined, TierSession, noted
from dtckpt.coordination.api import Coordination


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A step to save in the tier.

    Args:
        step: The step.
        collect: Returns this client's description of the state.
        options: How checkpoints are written.
        metrics: The step's metrics, on client 0.
        is_durable: Returns whether the step is also written to the root; called on client 0.
        compares_copies: Whether to digest replicas, for a comparison when the step is written to the root.
    """

    step: int
    collect: Callable[[], State]
    options: SaveOptions
    metrics: Mapping[str, float]
    is_durable: Callable[[], bool]
    compares_copies: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Begun:
    """A local save whose elements are in the tier, before the vote on the parts.

    Args:
        save: Its identity.
        joined: The facts about all clients' hosts when it began.
        agreed: The agreed plan, and this client's state in the tier.
        file: The file that holds it.
        metrics: The metrics of the step, on client 0.
        protected: By client, the newest saves that had all copies of the client's part.
        is_agreed: Whether all clients send copies of it; see `dtckpt.checkpoint.tiers.replicator`.
        has_compared: Whether all clients have digested their replicas.
    """

    save: SaveId
    joined: Joined
    agreed: Agreed
    file: PartInProgress
    metrics: Mapping[str, float]
    protected: Mapping[int, Sequence[SaveId]]
    is_agreed: bool
    has_compared: bool


@dataclass(frozen=True, slots=True)
class BeginVote:
    """The payload of ``local/begin``: the fields of `Begun`, the save from the leader, and the `Summary`."""

    protected: tuple[SaveId, ...]
    is_free: bool
    compares: bool
    save: SaveId | None
    summary: bytes

    def to_bytes(self) -> bytes:
        """Return the payload."""
        protected, save = [each.name for each in self.protected], self.save and self.save.name
        facts = [protected, self.is_free, self.compares, save, self.summary.decode()]
        return json.dumps(facts, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BeginVote:
        """Read a payload."""
        protected, is_free, compares, save, summary = json.loads(data)
        saves = tuple(SaveId.parse(name) for name in protected)
        return cls(saves, is_free, compares, SaveId.parse(save) if save else None, summary.encode())


def save_in_tier(
    session: TierSession,
    request: SaveRequest,
    coordination: Coordination,
    then: Callable[[Begun, SaveHandle], object],
) -> SaveHandle:
    """Save a step in the tier; return when the copy is complete and all clients agree on it.

    Collective: Over all clients; barriers ``local/begin`` (and ``local/united`` where clients pass different things
    for the first time), ``local/staged`` and ``local/held`` in the background.

    Args:
        session: The tier.
        request: The step to save, and how.
        coordination: The connection to the other clients.
        then: Called in the background after all clients know whether the save counts.

    Raises:
        StorageError: A tier cannot be written, or is full; nothing was saved.
        DtckptError: As `dtckpt.save_async`.
    """
    start = time.monotonic()
    timeout_s = request.options.timeout_s
    collective = Collective(coordination, "local", timeout_s)
    with ExitStack() as stack:
        stack.enter_context(collective.process_lock())
        begun = _begin(session, request, collective)
        locks = stack.pop_all()
    path = session.folder.path / begun.save.name
    handle = SaveHandle(path, collective.phases, timeout_s=timeout_s, blocking_s=time.monotonic() - start)

    def complete() -> SaveReport:
        _hold(session, begun, collective)
        return SaveReport(path, begun.agreed.plan.nbytes, collective.phases.costs)

    handle.launch(complete, locks, lambda ended: then(begun, ended))
    return handle


# --- begin: copy and agree --------------------------------------------------------------------------------------------


def _begin(session: TierSession, request: SaveRequest, collective: Collective) -> Begun:
    """Copy this client's share into the tier, and agree with the others. Collective: as `save_in_tier`."""
    joined, client, phases = session.joined, collective.client, collective.phases
    phases.begin(session.folder.path, is_shown=False)
    file = PartInProgress(session.folder, client, lambda plan: near_copies(plan, client, joined.neighbours))

    def compares(state: State) -> bool:
        return request.compares_copies and is_on_host(state)

    def propose() -> tuple[Proposal, bytes]:
        proposal = Proposal.of(request.collect(), collective.participants, request.options)
        # Here, so that a full tier becomes this client's vote.
        file.take(proposal.plan, proposal.state)
        summary = proposal.summary()
        # Texts of this save alone: a tree's text contains plain values, so it differs in each step.
        joined.server.keep_texts({proposal.digest: proposal.text, summary.tree: proposal.state.tree})
        vote = BeginVote(
            session.replicator.protected,
            session.replicator.is_free,
            compares(proposal.state),
            _new_save(session, request, len(collective.participants)) if collective.is_leader else None,
            summary.to_bytes(),
        )
        return proposal, vote.to_bytes()

    def stage(state: State, plan: SavePlan) -> State:
        memory = file.take(plan, state).staging
        near = near_copies(plan, client, joined.neighbours)
        with phases.measure("stage"):
            return memory.stage(state, plan, client, with_copies=compares(state), count=phases.count, beside=near)

    def read(_: str, other: int, digest: int) -> bytes:
        return joined.server.texts[digest] if other == client else joined.peer_of(other).text(digest)

    with file.given_back_on_failure():
        agreed = agree(
            collective,
            propose,
            stage,
            read,
            step=request.step,
            summary_of=lambda data: BeginVote.from_bytes(data).summary,
        )
    votes = {each: BeginVote.from_bytes(data) for each, data in agreed.payloads.items()}
    save = votes[collective.leader].save
    assert save is not None  # noqa: S101  the leader names it
    session.newest = save.number
    return Begun(
        save=save,
        joined=joined,
        agreed=agreed,
        file=file,
        metrics=request.metrics,
        protected={each: vote.protected for each, vote in votes.items()},
        # All clients or no client: if each left out different saves, no save would ever have all its copies.
        is_agreed=all(vote.is_free for vote in votes.values()),
        has_compared=all(vote.compares for vote in votes.values()),
    )


def _new_save(session: TierSession, request: SaveRequest, num_clients: int) -> SaveId:
    number, is_durable = session.next_number(), request.is_durable()
    return SaveId(number, request.step, num_clients, is_durable, secrets.token_hex(4), session.root)


def is_on_host(state: State) -> bool:
    """Tell whether all elements are in host memory: only there clients digest replicas without a copy."""
    source = state.source
    return isinstance(source, MemorySource) and not source.is_elsewhere


# --- in the background: take digests, vote, copy ----------------------------------------------------------------------


def _hold(session: TierSession, begun: Begun, collective: Collective) -> None:
    """Compute digests, make the part whole, vote, and begin to copy.

    Collective: Over all clients; barriers ``local/staged`` and ``local/held``.
    """
    save, plan, client, folder = begun.save, begun.agreed.plan, collective.client, session.folder
    host = session.tier.host_name

    def check_staged() -> None:
        _ = begun.agreed.state

    def put() -> tuple[PartIndex, bytes]:
        file = begun.file.take(plan, begun.agreed.state)
        near = near_copies(plan, client, begun.joined.neighbours)
        tensors, pieces, copies = described_pieces(begun.agreed.state, plan, file, client, near)
        tree = begun.agreed.state.tree
        index = PartIndex(save, client, file.nbytes, tree, tensors, pieces, begun.metrics, copies)
        folder.put(file, index, index.to_bytes(), is_voted=False)
        return index.without_copies(), b""

    with begun.file.given_back_on_failure():
        # Digests would take the processor, and memory bandwidth, from clients of this machine that still copy.
        collective.run_round("staged", check_staged, phase="digest")
        sent, _ = collective.run_round_with_value("held", put, phase="digest")
    collective.phases.end()
    # The save counts even if this host fails: the other clients go on, and so does this client.
    with noted(host):
        folder.note_voted(save, client)
    _copy(session, begun, sent)
    with noted(host):
        _remove_old(session, begun)


def _copy(session: TierSession, begun: Begun, index: PartIndex) -> None:
    """Begin to send this client's part to the hosts that hold copies of it."""
    save, joined, host = begun.save, begun.joined, session.tier.host_name
    senders = [info for other, info in joined.hosts.items() if host in joined.copy_hosts.partners(other)]
    session.expected.expect(save, (client for info in senders for client in info.clients))
    peers = [joined.peer(other) for other in joined.copy_hosts.partners(host)]
    unpin = session.folder.pin(save)
    data = begun.file.take(begun.agreed.plan, begun.agreed.state).view[: index.nbytes]
    protect = partial(session.replicator.protect, save)
    copy = OutgoingPart(save, joined.client, index, data, peers, unpin, protect, begun.is_agreed)
    session.replicator.submit(copy)


def _remove_old(session: TierSession, begun: Begun) -> None:
    save = begun.save
    voted = [each for each in session.folder.parts().voted if each <= save and each.belongs_to(save.root)]
    by_all = set.intersection(*(set(saves) for saves in begun.protected.values()))
    kept = saves_to_keep(voted, session.tier.keep, max(by_all, default=None))
    session.folder.remove_all_but(kept, with_others=begun.joined.is_first_on_host)
