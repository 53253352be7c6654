"""Agree on the content of a save: each client describes its state, all vote, and all plan the union.

A barrier's payload is small, so a client votes with a `Summary`: digests of its description and of its tree. If the
digests of all clients are equal, all of them plan the same. Otherwise they read each other's texts, and plan the union.
The first of all clients with the same text shows it to the others. A save does that by files in the attempt's folder,
which every client reads once; the local tier by a server on each client::

    client_0/description.json    the tensors of clients 0, 1, ...
    client_0/tree.json           the plain values of clients 0, 1, ...
    client_4/description.json    the tensors of clients 4, 5, ...

The plan of such a union is kept. When each client saves the same structure again, the clients exchange no
descriptions: all say in their first round that they have the plan. Only the leader reads the trees then, as it merges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan, kept_plan, plan_save
from dtckpt.checkpoint.saving.state import State
from dtckpt.checkpoint.saving.union import Description, described, passed_by_all, unite, validate_same_names
from dtckpt.errors import BarrierConflictError, CheckpointCorruptError, DtckptError, SaveDisagreementError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.commit_target import CommitAttempt
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.zarr_tensorstore import client_folder

DESCRIPTION_NAME = "description.json"
TREE_NAME = "tree.json"
MAX_PATH_CHARS = 250

Groups = Mapping[int, tuple[int, ...]]
"""Digest of a text -> the clients that have this text, ascending; see `Agreement`."""
Texts = Mapping[tuple[int, ...], bytes]
"""The different texts, by the clients that have each, the lowest client first."""
ReadText = Callable[[str, int, int], bytes]
"""Returns a text of another client. Called with `DESCRIPTION_NAME` or `TREE_NAME`, the client, and the digest."""
Stage = Callable[[State, SavePlan], State]
"""Copies a client's planned state, so that later changes of its tensors do not reach the copy."""


# --- one client's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """One client's state for a save, and its guess at the plan of all clients.

    Args:
        state: The client's state, in the tensors' own memory.
        options: See `SaveOptions`.
        text: The client's description.
        digest: Digest of the description.
        plan: The plan of the save, if this client guesses the others' states right.
        staged: The staged state, or the error of this client's staging, on which no round depends.
    """

    state: State
    options: SaveOptions
    text: bytes
    digest: int
    plan: SavePlan
    staged: State | Exception | None = None

    @classmethod
    def of(cls, state: State, clients: tuple[int, ...], options: SaveOptions) -> Proposal:
        """Describe a state, and guess the plan: the others probably pass the same as last time, or as this client."""
        # A client alone has no other description to compare with.
        text, digest = described(state.specs, state.values) if len(clients) > 1 else (b"", 0)
        return cls(state, options, text, digest, _latest_union(digest) or _plan_if_same(state, clients, options))

    def summary(self, path: str = "", token: str = "", base: int = 0) -> Summary:
        """Return the client's vote.

        Args:
            path: The target's path.
            token: The attempt's token, from the leader.
            base: The identity of the save's base, as this client sees it; 0: it sees none.
        """
        # All other options must be equal, because they decide what the clients write.
        options = replace(self.options, progress=False)  # one client alone may show its progress
        return Summary.of(path, token, self.digest, self.state.tree, options, unions=tuple(_kept), base=base)

    def staged_by(self, stage: Stage) -> Proposal:
        """Stage the state as planned; keep an error for this client's next round."""
        try:
            return replace(self, staged=stage(self.state, self.plan))
        except Exception as error:
            return replace(self, staged=error)


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of one client's side of a save, small enough for a barrier's payload.

    Args:
        path: The target's path, cut to its end.
        whole_path: Digest of the whole path.
        token: The attempt's token, from the leader; empty from the others.
        description: Digest of the client's description: names, shapes, dtypes and layouts.
        tree: Digest of the tree's structure and plain values.
        options: Digest of the options.
        unions: The unions of different descriptions that the client has planned before, by their keys.
        base: The identity of the save's base; 0: none.
    """

    path: str
    whole_path: int
    token: str
    description: int
    tree: int
    options: int
    unions: tuple[int, ...]
    base: int = 0

    @classmethod
    def of(
        cls,
        path: str,
        token: str,
        description: int,
        tree: bytes,
        options: object,
        *,
        unions: tuple[int, ...] = (),
        base: int = 0,
    ) -> Summary:
        """Summarise a client's side of a save."""
        text = path.encode("utf-8", "backslashreplace")
        return cls(
            # Bytes of a name that are no UTF-8 become escapes: a payload is UTF-8, with room for so much of a path.
            path=text.decode()[-MAX_PATH_CHARS:],
            whole_path=bytes_digest(text),
            token=token,
            description=description,
            tree=bytes_digest(tree),
            options=bytes_digest(repr(options).encode()),
            unions=unions,
            base=base,
        )

    def to_bytes(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Summary:
        """Read a payload."""
        facts = json.loads(data)
        return cls(**{**facts, "unions": tuple(facts["unions"])})


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """The result of comparing the summaries of all clients; the same on every client.

    Args:
        token: The attempt's token.
        descriptions: Digest of a description -> the clients that have this description, ascending.
        trees: Digest of a tree -> the clients that have this tree, ascending.
        union: The key of the union of the descriptions.
        is_known: Whether all clients have planned this union before.
        base: The identity of the base that all clients see; 0 if they see none, or different ones.
    """

    token: str
    descriptions: Mapping[int, tuple[int, ...]]
    trees: Mapping[int, tuple[int, ...]]
    union: int
    is_known: bool
    base: int = 0

    @property
    def is_same(self) -> bool:
        """Whether all clients save the same."""
        return len(self.descriptions) == len(self.trees) == 1

    @property
    def needs_exchange(self) -> bool:
        """Whether clients must read each other's descriptions."""
        return not self.is_same and not self.is_known

    @classmethod
    def of(cls, payloads: Mapping[int, bytes]) -> Agreement:
        """Compare the summaries.

        Args:
            payloads: The `Summary` of every client, as bytes.

        Raises:
            BarrierConflictError: Clients save to different paths.
            SaveDisagreementError: Clients save with different options.
        """
        summaries = {client: Summary.from_bytes(data) for client, data in sorted(payloads.items())}
        first_client, first = next(iter(summaries.items()))
        descriptions: dict[int, tuple[int, ...]] = {}
        trees: dict[int, tuple[int, ...]] = {}
        for client, other in summaries.items():
            pair = f"client {client} and client {first_client}"
            if other.whole_path != first.whole_path:
                raise BarrierConflictError(f"{pair} save to different paths; got {other.path!r} and {first.path!r}")
            if other.options != first.options:
                raise SaveDisagreementError(f"{pair} save with different options; pass the same on every client")
            descriptions[other.description] = (*descriptions.get(other.description, ()), client)
            trees[other.tree] = (*trees.get(other.tree, ()), client)
        # Clients that hold the same things write other chunks under other options.
        union = bytes_digest(repr((first.options, sorted(descriptions.items()))).encode())
        is_known = all(union in summary.unions for summary in summaries.values())
        bases = {summary.base for summary in summaries.values()}
        return cls(first.token, descriptions, trees, union, is_known, bases.pop() if len(bases) == 1 else 0)


# --- all clients ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The agreed plan of a save, with one client's staged state.

    The plan does not refer to the caller's tensors if the state was staged.

    Args:
        agreement: The result of the vote.
        plan: The plan of all clients.
        staged: This client's staged state, or the error of its staging, on which no round depends.
        payloads: Every client's payload of the first round.
    """

    agreement: Agreement
    plan: SavePlan
    staged: State | Exception
    payloads: Mapping[int, bytes]

    @property
    def state(self) -> State:
        """This client's staged state. Raises: Exception: This client could not stage it."""
        if isinstance(self.staged, Exception):
            raise self.staged
        return self.staged


def agree(
    collective: Collective,
    propose: Callable[[], tuple[Proposal, bytes]],
    stage: Stage,
    read: ReadText,
    *,
    step: int | None,
    show: Callable[[Proposal, Agreement], None] | None = None,
    summary_of: Callable[[bytes], bytes] = bytes,
) -> Agreed:
    """Agree with the other clients on the plan of a save, and stage the state while waiting for them.

    Collective: Round ``begin``; and ``described`` and ``united`` where clients save different things for the first
    time. Only `Agreed.staged` says whether this client could stage its state.

    Args:
        collective: The operation.
        propose: Returns this client's proposal, and its payload; its errors reach all clients.
        stage: Copies the state.
        read: Reads the other clients' texts.
        step: Which save this is; see `dtckpt.save`.
        show: Shows this client's texts to the others, in round ``described``; default: the others can read them from
            the vote on, and there is no such round.
        summary_of: Returns the `Summary` in a payload, as bytes.
    """
    proposal, payloads = collective.run_first_round(
        "begin", propose, step=step, phase="plan", meanwhile=lambda proposal: proposal.staged_by(stage)
    )
    # All clients have the same payloads, so all of them come to the same result without another barrier.
    agreement = Agreement.of({client: summary_of(data) for client, data in payloads.items()})
    plan = _agreed_plan(collective, agreement, proposal, read, show)
    if plan is not proposal.plan:
        # The state was staged by the guessed plan, and the agreed plan differs.
        proposal = replace(proposal, plan=plan, staged=None).staged_by(stage)
    assert proposal.staged is not None  # noqa: S101  the state, or an error
    return Agreed(agreement, plan, proposal.staged, payloads)


def _agreed_plan(
    collective: Collective,
    agreement: Agreement,
    proposal: Proposal,
    read: ReadText,
    show: Callable[[Proposal, Agreement], None] | None,
) -> SavePlan:
    """Return the plan of all clients. If it is new, the clients read each other's texts, and keep the plan."""
    if agreement.is_same:
        return _plan_if_same(proposal.state, collective.participants, proposal.options)
    if not agreement.needs_exchange:
        return _take_union(agreement.union)

    def plan() -> tuple[SavePlan | DtckptError, bytes]:
        descriptions = read_all(DESCRIPTION_NAME, agreement.descriptions, read)
        tree_texts = read_all(TREE_NAME, agreement.trees, read)
        try:
            return plan_union(descriptions, tree_texts, proposal.options), b""
        # All clients have the same texts, and so the same error: no vote need tell it to them.
        except DtckptError as error:
            return error, b""

    if show is not None:
        collective.run_round("described", lambda: show(proposal, agreement), phase="plan")
    planned, _ = collective.run_round_with_value("united", plan, phase="plan")
    if isinstance(planned, Exception):
        raise planned
    _keep_union(agreement.union, proposal.digest, planned)
    return planned


def _plan_if_same(state: State, clients: tuple[int, ...], options: SaveOptions) -> SavePlan:
    """Return the plan if all clients pass the same."""
    return kept_plan(passed_by_all(state.specs, clients), options.chunk_nbytes)


# --- texts ------------------------------------------------------------------------------------------------------------


def put_text(attempt: CommitAttempt, client: int, name: str, groups: Groups, data: bytes) -> None:
    """Write a client's description or tree for the others, if it is the first client that has this text.

    Args:
        attempt: The attempt.
        client: This client.
        name: `DESCRIPTION_NAME` or `TREE_NAME`.
        groups: The clients that have each text.
        data: The text.
    """
    # All clients have the same groups, so each text has one writer.
    if not any(clients[0] == client for clients in groups.values()):
        return
    folder = attempt.folder / client_folder(client)
    with translate_errors(f"write {name}", folder):
        # A client that sees another file system than the leader would write files that the others cannot read.
        attempt.validate(client)
        folder.make()
        # Not synced: it is read once, and removed before the commit.
        folder.write(name, data)


def read_text(root: Folder, name: str, client: int, digest: int) -> bytes:
    """Return a text that a client wrote with `put_text`.

    Raises:
        CheckpointCorruptError: The text differs from the digest that the client announced.
        StorageError: Storage refused.
    """
    folder = root / client_folder(client)
    with translate_errors(f"read {name} of client {client}", folder):
        text = folder.read(name)
    # The digest came with the vote, past storage: a stale or torn file must not become a plan.
    if bytes_digest(text) != digest:
        raise CheckpointCorruptError(
            f"{name} of client {client} differs from the client's announcement; nothing was committed, save again"
        )
    return text


def read_all(name: str, groups: Groups, read: ReadText) -> Texts:
    """Return the different texts of all clients. Raises: The errors of ``read``."""
    # By lowest client, on every client alike: the order decides the order of keys in the union.
    return {
        clients: read(name, clients[0], digest) for digest, clients in sorted(groups.items(), key=lambda item: item[1])
    }


def unite_trees(texts: Texts) -> bytes:
    """Return the union of trees, as JSON.

    Raises:
        SaveDisagreementError: Clients have different things at one path.
    """
    if len(texts) == 1:  # the very bytes that all clients have
        return next(iter(texts.values()))
    return trees.dump(tree_union.unite({clients[0]: json.loads(text) for clients, text in texts.items()}))


def plan_union(descriptions: Texts, texts: Texts, options: SaveOptions) -> SavePlan:
    """Return the plan of the union of the clients' states; the same on every client.

    Args:
        descriptions: The different descriptions.
        texts: The different trees, which are checked, and name the paths of `dtckpt.PerClient` values.
        options: Of these, ``keys`` and ``chunk_nbytes`` count.

    Raises:
        ComponentError: Clients disagree on a tensor.
        SaveDisagreementError: Clients pass different plain values, or names that ``options.keys`` does not allow, or
            no client passes a part of a tensor.
        TensorNameError: A name cannot be stored beside one of another client.
    """
    parsed = {clients: Description.from_bytes(data) for clients, data in descriptions.items()}
    # Trees are united before boxes: their errors name paths of the program.
    tree = unite_trees(texts)
    if options.keys == "same":
        validate_same_names(parsed, [path for path, _ in trees.per_client_nodes(json.loads(tree))] if tree else ())
    specs = unite(parsed)
    return plan_save(specs, options.chunk_nbytes)


# --- kept unions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _KeptUnion:
    """A union that was planned: the description that this client had in it, by its digest, and the plan."""

    own: int
    plan: SavePlan


_kept: dict[int, _KeptUnion] = {}
"""The unions of the last saves, by key, the latest last. Changed by the one save of several clients under way only."""


def _latest_union(own: int) -> SavePlan | None:
    """Return the plan of the last union in which this client had the description of that digest."""
    return next((kept.plan for kept in reversed(list(_kept.values())) if kept.own == own), None)


def _take_union(key: int) -> SavePlan:
    """Return the plan of a union that is kept, which is the latest from then on."""
    # To the end: a dict keeps the order of insertion, so its first key was not used for the longest time.
    _kept[key] = _kept.pop(key)
    return _kept[key].plan


def _keep_union(key: int, own: int, plan: SavePlan) -> None:
    """Keep the plan of a union, and forget the oldest of too many."""
    _kept.pop(key, None)
    _kept[key] = _KeptUnion(own, plan)
    while len(_kept) > KEPT_STRUCTURES:
        del _kept[next(iter(_kept))]
