"""Keys of random operations: all clients of a mesh draw equal keys, and compare them from time to time.

Each client draws from its own generator, without communicating. If the generators have different seeds, the clients
take the keys of the first client. If clients draw differently later, all raise an error.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dtckpt.comm.process_groups import validate_connected
from dtckpt.dtensor.gather_objects import gather_objects
from dtckpt.errors import CoordinationError, GeneratorMismatchError, RandomParameterError, capped
from dtckpt.layout.mesh import Mesh

_LOG = logging.getLogger("dtckpt.dtensor.randomness")

FIRST_COMPARED = 4
"""Clients compare so many first keys one by one, so they find different seeds at once."""
COMPARED_EVERY = 64
"""After that, clients compare every so many keys together, so they find different draws soon."""


def draw_key(generator: torch.Generator | None = None) -> int:
    """Draw a number from 0 to 2**63 - 1 from a generator, default torch's own of the CPU.

    Each key takes one draw, for any use. So ``torch.manual_seed`` and saved generator states determine all random
    tensors.

    Raises:
        RandomParameterError: A CUDA graph is being captured: the key is drawn on the host, so every replay would
            repeat the same numbers.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise RandomParameterError(
            "random numbers: a CUDA graph that draws them cannot be captured, since each replay would draw the same "
            "ones; draw them outside of the graph, or capture a model in eval mode"
        )
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def agreed_key(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """Return a key from `draw_key` that is equal on all clients of a mesh, which all call this in the same order.

    If the generators differ from the first draw on, as without ``torch.manual_seed``, all clients take the key of the
    first client, draw by draw, until their keys are equal.

    Collective: Over the mesh's clients, if there are several, at the first
    `FIRST_COMPARED` draws among these clients and at every `COMPARED_EVERY`-th, or at every draw if their generators
    differ; bounded by the group's timeout. Local at other draws and for other meshes.

    Raises:
        GeneratorMismatchError: Clients that had drawn equal keys drew different keys since the last comparison. All
            clients raise it.
        LayoutError: Other clients make another call.
        CoordinationError: A client is gone, or did not come in time, or no process group connects the clients.
    """
    key = draw_key(generator)
    if mesh.num_clients > 1 and not mesh.is_remote():
        validate_connected(mesh.clients, "comparing random keys")
        return _history_of(mesh.clients).add(key, mesh)
    return key


@dataclass
class _KeyHistory:
    """The keys that this client has drawn together with others.

    Args:
        clients: The clients, this one among them.
        count: Number of keys since the generators agree.
        digest: Digest of these keys.
        has_warned: Whether this client has warned that generators differ.
    """

    clients: tuple[int, ...]
    count: int = 0
    digest: bytes = b""
    has_warned: bool = False

    def add(self, key: int, mesh: Mesh) -> int:
        """Add a key, compare keys if that is due (collective then), and return the key that all clients use.

        Args:
            key: The key.
            mesh: A mesh of the clients.
        """
        self.count += 1
        self.digest = hashlib.blake2b(self.digest + key.to_bytes(8, "little"), digest_size=16).digest()
        if self.count > FIRST_COMPARED and self.count % COMPARED_EVERY:
            return key
        gathered = self._gather(key, mesh)
        if len({digest for digest, _ in gathered}) == 1:
            return key
        if self.count > 1:
            self._refuse([digest for digest, _ in gathered])
        if not self.has_warned:
            self.has_warned = True
            _LOG.warning(
                "the random generators of clients %s differ, so each random DTensor asks client %d for its key; "
                "torch.manual_seed with one seed on all clients saves that",
                capped(self.clients),
                self.clients[0],
            )
        self.count, self.digest = 0, b""
        return gathered[0][1]

    def _gather(self, key: int, mesh: Mesh) -> list[tuple[Any, int]]:
        """Return every client's count and digest since the last comparison, and its last key."""
        try:
            return gather_objects(((self.count, self.digest), key), mesh, "random_operators")
        except CoordinationError as error:
            raise CoordinationError(
                f"comparing random keys among clients {capped(self.clients)} failed: {error}; look for clients that "
                "ended, hang, or make fewer random tensors than others"
            ) from error

    def _refuse(self, digests: Sequence[Any]) -> NoReturn:
        by_digest: defaultdict[Any, list[int]] = defaultdict(list)
        for client, digest in zip(self.clients, digests, strict=True):
            by_digest[digest].append(client)
        # Clients with new seeds should agree again, so they compare the next keys one by one.
        self.count, self.digest = 0, b""
        sets = capped((f"[{capped(clients)}]" for clients in by_digest.values()), 4)
        raise GeneratorMismatchError(
            f"random numbers: clients {sets} drew different keys, so copies of one tensor would differ; the states "
            "of their generators have come to differ; call torch.manual_seed with one seed on all clients, and make "
            "random DTensors in one order on all of them"
        )


# By default process group, so that the histories of an ended group go with it.
_histories: WeakKeyDictionary[Any, dict[tuple[int, ...], _KeyHistory]] = WeakKeyDictionary()


def _history_of(clients: tuple[int, ...]) -> _KeyHistory:
    return _histories.setdefault(dist.group.WORLD, {}).setdefault(clients, _KeyHistory(clients))
