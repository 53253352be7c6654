"""The payloads of a save's votes: `Summary` in the first round, `Written` later; and what follows from all summaries.

A barrier's payload is small, so a client sends digests of what it saves. If those of all clients are equal, all of them
plan the same. Else they read each other's descriptions (`dtckpt.checkpoint.saving.exchange`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dtckpt._proto import checkpoint_pb2
from dtckpt.errors import BarrierConflictError, SaveDisagreementError
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import PhaseCost, costs_from_proto, phases_to_proto

MAX_PATH_CHARS = 250


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
    """

    path: str
    whole_path: int
    token: str
    description: int
    tree: int
    options: int
    unions: tuple[int, ...]

    @classmethod
    def of(
        cls, path: str, token: str, description: int, tree: bytes, options: object, *, unions: tuple[int, ...] = ()
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
    """What follows from the summaries of all clients, the same on every client.

    Args:
        token: The attempt's token.
        descriptions: The clients, ascending, that have the very same description, by its digest.
        trees: The clients, ascending, that have the very same tree, by its digest.
        union: The key of the union of the descriptions.
        is_known: Whether all clients have planned this union before.
    """

    token: str
    descriptions: Mapping[int, tuple[int, ...]]
    trees: Mapping[int, tuple[int, ...]]
    union: int
    is_known: bool

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
        return cls(first.token, descriptions, trees, union, is_known)


@dataclass(frozen=True, slots=True)
class Written:
    """The vote of a client that has written its part of a save, or read its part of a restore.

    Args:
        chunk_list: Digest of the file of its chunk list; 0 in a restore.
        costs: Cost of each phase so far, by name.
    """

    chunk_list: int
    costs: Mapping[str, PhaseCost]

    def to_bytes(self) -> bytes:
        """Return the payload."""
        message = checkpoint_pb2.Written(chunk_list=self.chunk_list, phases=phases_to_proto({0: self.costs}))
        return message.SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Written:
        """Read a payload."""
        message = checkpoint_pb2.Written.FromString(data)
        return cls(message.chunk_list, costs_from_proto([0], message.phases)[0])
