"""The payloads of a save's votes: `Summary` in the first round, `Written` later; and the check that all clients agree.

A barrier's payload is small, so a client sends digests of its tree, options and plan. The digests tell whether clients
agree; 16 bits of digest per tensor, for the first tensors, tell which tensor they disagree on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.errors import BarrierConflictError, ComponentError, SaveDisagreementError
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import PhaseCost, costs_from_proto, phases_to_proto

MAX_PATH_CHARS = 250
MAX_FINGERPRINTS = 600
"""Tensors that are compared one by one, so that an error can name the odd one; the plan's digest compares all."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of one client's side of a save, small enough for a barrier's payload.

    Args:
        path: The target's path, cut to its end.
        whole_path: Digest of the whole path.
        token: The attempt's token, from the leader; empty from the others.
        names: Digest of all tensor names.
        tree: Digest of the tree's structure and plain values.
        options: Digest of the options.
        plan: Digest of the whole plan.
        fingerprints: Four hex digits for each of the first `MAX_FINGERPRINTS` tensors.
    """

    path: str
    whole_path: int
    token: str
    names: int
    tree: int
    options: int
    plan: str
    fingerprints: str

    @classmethod
    def of(cls, path: str, token: str, plan: SavePlan, tree: bytes, options: object) -> Summary:
        """Summarise a client's side of a save."""
        text = path.encode("utf-8", "backslashreplace")
        return cls(
            # Bytes of a name that are no UTF-8 become escapes: a payload is UTF-8, with room for so much of a path.
            path=text.decode()[-MAX_PATH_CHARS:],
            whole_path=bytes_digest(text),
            token=token,
            names=plan.names_digest,
            tree=bytes_digest(tree),
            options=bytes_digest(repr(options).encode()),
            plan=plan.topic.hex(),
            fingerprints="".join(f"{digest & 0xFFFF:04x}" for digest in plan.digests[:MAX_FINGERPRINTS]),
        )

    def to_bytes(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Summary:
        """Read a payload."""
        return cls(**json.loads(data))


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


def validate_agreement(payloads: Mapping[int, bytes], plan: SavePlan) -> str:
    """Check that all clients save the same thing; every client comes to the same result.

    Args:
        payloads: The `Summary` of every client, as bytes.
        plan: This client's plan, for the names of tensors.

    Returns:
        The attempt's token.

    Raises:
        BarrierConflictError: Clients save to different paths.
        SaveDisagreementError: Clients save different tensors, values or layouts.
    """
    summaries = {client: Summary.from_bytes(data) for client, data in sorted(payloads.items())}
    first_client, first = next(iter(summaries.items()))
    for client, other in summaries.items():
        pair = f"client {client} and client {first_client}"
        if other.whole_path != first.whole_path:
            raise BarrierConflictError(f"{pair} save to different paths; got {other.path!r} and {first.path!r}")
        if other.names != first.names:
            raise SaveDisagreementError(f"{pair} save tensors of different names; every client must pass the same tree")
        if other.options != first.options:
            raise SaveDisagreementError(f"{pair} save with different options; pass the same on every client")
        if other.fingerprints != first.fingerprints:
            count = min(len(other.fingerprints), len(first.fingerprints)) // 4
            odd = next(i for i in range(count) if other.fingerprints[4 * i :][:4] != first.fingerprints[4 * i :][:4])
            raise ComponentError(
                f"{pair} disagree on tensor {plan.tensors[odd].spec.name!r}: its global shape, dtype, layout or mesh "
                "differs; pass the same tensor on every client"
            )
        if other.plan != first.plan:
            raise SaveDisagreementError(f"{pair} disagree on shapes, dtypes or layouts of the tensors")
        if other.tree != first.tree:
            raise SaveDisagreementError(
                f"{pair} save different structure or plain values; values that differ by client belong into a "
                "tensor sharded over clients, or outside the tree"
            )
    return first.token
