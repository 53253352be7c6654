"""Compare the layouts of new tensors between clients: the clients of a mesh must make the same tensors. Pure.

Without a target, each client makes its components of all tensors, in layouts that its caller names. If the clients of a
mesh named different layouts, each would fill its components rightly, and together they would be no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dtckpt.checkpoint.restoring.read_once import mesh_key
from dtckpt.checkpoint.restoring.shared_memory import NamedLeaf
from dtckpt.errors import MeshError, capped
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.mesh import Mesh

MAX_MESHES = 16
"""Most meshes that a client tells of: their facts must fit a barrier's payload. With more, it tells of none."""
_CURE = "pass the same mesh and layouts on all clients of a mesh"

MeshFacts = Mapping[str, tuple[str, int, bool]]
"""By key of a mesh: a digest of the layouts on it, the number of its clients that restore, and whether this client is
one of them."""


def mesh_facts(leaves: Iterable[NamedLeaf], client: int, participants: Iterable[int]) -> MeshFacts:
    """Return what a client tells the others of the meshes of its new tensors."""
    layouts: dict[Mesh, list[str]] = {}
    for name, leaf in leaves:
        if leaf.layout is not None:
            layouts.setdefault(leaf.layout.mesh, []).append(repr((name, leaf.layout.sharding_specs)))
    restoring, facts = frozenset(participants), dict[str, tuple[str, int, bool]]()
    for mesh, texts in layouts.items():
        digest = f"{bytes_digest(repr(sorted(texts)).encode()):016x}"
        facts[mesh_key(mesh)] = digest, len(restoring.intersection(mesh.clients)), client in mesh.clients
    return facts if len(facts) <= MAX_MESHES else {}


def validate_same_layouts(facts: Mapping[int, MeshFacts]) -> None:
    """Check that all clients of a mesh make the same tensors on it.

    A client that fills a target, makes plain tensors only, or has too many meshes, tells of none: it agrees with all.

    Args:
        facts: The `mesh_facts` of every client.

    Raises:
        MeshError: Clients of one mesh ask for different layouts, or for another mesh.
    """
    silent = sum(not each for each in facts.values())
    for key in sorted({key for each in facts.values() for key in each}):
        asking = {client: each[key] for client, each in sorted(facts.items()) if key in each}
        digests = {digest for digest, *_ in asking.values()}
        num_clients = max(number for _, number, _ in asking.values())
        num_members = sum(is_member for *_, is_member in asking.values())
        others = [client for client, each in sorted(facts.items()) if each and key not in each]
        if len(digests) > 1:
            raise MeshError(
                f"clients disagree on new tensors: got different layouts on one mesh from clients {capped(asking)}; "
                f"{_CURE}"
            )
        if num_members + silent < num_clients:
            raise MeshError(
                f"clients disagree on new tensors: got a mesh of {num_clients} clients from {capped(asking)}, and "
                f"other meshes from {capped(others)}; {_CURE}"
            )
