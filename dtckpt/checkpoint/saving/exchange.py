"""Exchange descriptions between clients that save different things, through files in the attempt's folder.

A barrier's payload has room for a digest, not for a description. So the first of all clients with the same description
writes it to a file in its folder, and so with trees. Every client then reads each different file once::

    client_0/description.json    the tensors of clients 0, 1, ...
    client_0/tree.json           their plain values
    client_4/description.json    those of clients 4, 5, ...

The plan of such a union is kept. When the very same clients save the same structures again, no descriptions are
exchanged: all say in their first round that they have the plan. Only the leader reads the trees then, as it merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.description import Description
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan, plan_save
from dtckpt.checkpoint.saving.union import unite, validate_same_names
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.commit import CommitAttempt
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.zarr_tensorstore import client_folder

DESCRIPTION_NAME = "description.json"
TREE_NAME = "tree.json"

Groups = Mapping[int, tuple[int, ...]]
"""The clients, ascending, that have the very same text, by its digest; see `Agreement`."""
Texts = Mapping[tuple[int, ...], bytes]
"""The different texts, by the clients that have each, the lowest client first."""


@dataclass(frozen=True, slots=True, eq=False)
class _KeptUnion:
    """A union that was planned: the description that this client had in it, by its digest, and the plan."""

    own: int
    plan: SavePlan


_kept: dict[int, _KeptUnion] = {}
"""The unions of the last saves, by key, the latest last. Changed by the one save of several clients under way only."""


def kept_unions() -> tuple[int, ...]:
    """Return the keys of the unions whose plans are kept."""
    return tuple(_kept)


def latest_union(own: int) -> SavePlan | None:
    """Return the plan of the last union in which this client had the description of that digest."""
    return next((kept.plan for kept in reversed(list(_kept.values())) if kept.own == own), None)


def take_union(key: int) -> SavePlan:
    """Return the plan of a union that is kept, which is the latest from then on."""
    # To the end: a dict keeps the order of insertion, so its first key was not used for the longest time.
    _kept[key] = _kept.pop(key)
    return _kept[key].plan


def keep_union(key: int, own: int, plan: SavePlan) -> None:
    """Keep the plan of a union, and forget the oldest of too many."""
    _kept.pop(key, None)
    _kept[key] = _KeptUnion(own, plan)
    while len(_kept) > KEPT_STRUCTURES:
        del _kept[next(iter(_kept))]


def put_text(attempt: CommitAttempt, client: int, name: str, groups: Groups, data: bytes) -> None:
    """Write a client's description or tree for the others, if it is the first of those that have the very same.

    Args:
        attempt: The attempt.
        client: This client.
        name: `DESCRIPTION_NAME` or `TREE_NAME`.
        groups: Who has the very same.
        data: The text.
    """
    # All clients have the same groups, so each text has one writer.
    if not any(clients[0] == client for clients in groups.values()):
        return
    folder = attempt.folder / client_folder(client)
    with translate_errors(f"write {name}", folder):
        # A client that sees another file system than the leader would write where nobody reads.
        attempt.validate(client)
        folder.make()
        # Not synced: it is read once, and removed before the commit.
        folder.write(name, data)


def read_texts(root: Folder, name: str, groups: Groups) -> Texts:
    """Return the different texts that clients wrote.

    Raises:
        CheckpointCorruptError: A text is not the one that its client announced.
        StorageError: Storage refused.
    """
    texts: dict[tuple[int, ...], bytes] = {}
    # By lowest client, on every client alike: the order decides the order of keys in the union.
    for digest, clients in sorted(groups.items(), key=lambda item: item[1]):
        folder = root / client_folder(clients[0])
        with translate_errors(f"read {name} of client {clients[0]}", folder):
            texts[clients] = folder.read(name)
        # The digest came with the vote, past storage: a stale or torn file must not become a plan.
        if bytes_digest(texts[clients]) != digest:
            raise CheckpointCorruptError(
                f"{name} of client {clients[0]} is not what it announced; nothing was committed, save again"
            )
    return texts


def unite_trees(texts: Texts) -> bytes:
    """Return the union of trees, as JSON.

    Raises:
        SaveDisagreementError: Clients have different things at one path.
    """
    if len(texts) == 1:  # the very bytes that all clients have
        return next(iter(texts.values()))
    return trees.dump(tree_union.unite({clients[0]: json.loads(text) for clients, text in texts.items()}))


def plan_union(descriptions: Texts, texts: Texts, options: SaveOptions) -> SavePlan:
    """Return the plan of the union of what clients pass; the same on every client.

    Args:
        descriptions: The different descriptions.
        texts: The different trees, which are checked, and say what differs by client.
        options: Of these, ``keys`` and ``chunk_nbytes`` count.

    Raises:
        ComponentError: Clients disagree on a tensor.
        SaveDisagreementError: Clients pass different plain values, or names that ``options.keys`` does not allow, or
            nobody passes a part of a tensor.
        TensorNameError: A name cannot be stored beside one of another client.
    """
    parsed = {clients: Description.from_bytes(data) for clients, data in descriptions.items()}
    # Trees are united before boxes: their errors name paths of the program.
    tree = unite_trees(texts)
    if options.keys == "same":
        validate_same_names(parsed, [path for path, _ in trees.per_client_nodes(json.loads(tree))] if tree else ())
    specs = unite(parsed)
    return plan_save(specs, options.chunk_nbytes)
