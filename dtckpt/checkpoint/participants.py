"""The clients that take part in a save or a restore, as the caller names them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from dtckpt.coordination.api import Member
from dtckpt.errors import MeshError, MeshTypeError

Group = dist.ProcessGroup | Sequence[int]
"""Some clients of the job: a process group of PyTorch, or their ids in any order."""


def participants_of(group: Any, member: Member) -> tuple[int, ...]:
    """Return the ids of the clients of a group, ascending; of all clients of the job if there is no group.

    Args:
        group: The clients, a `Group` or None.
        member: This client.

    Raises:
        MeshTypeError: The group is neither a process group nor a sequence of client ids.
        MeshError: The group is empty, names a client twice, or lacks this client.
    """
    if group is None:
        return tuple(range(member.num_clients))
    if isinstance(group, dist.ProcessGroup):
        return tuple(sorted(dist.get_process_group_ranks(group)))
    # PyTorch's `new_group` returns this to clients outside of the group.
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise MeshError(f"client {member.client} is not in the group; only its members take part")
    if not isinstance(group, Sequence) or isinstance(group, str | bytes):
        raise MeshTypeError(f"group must be a process group or a sequence of client ids; got {group!r:.200}")
    try:
        clients = tuple(sorted(map(operator.index, group)))
    except TypeError:
        raise MeshTypeError(f"group must have client ids; got {group!r:.200}") from None
    if len(set(clients)) != len(clients) or member.client not in clients:
        raise MeshError(
            f"a group must name every client once, this one too; got {group!r:.200} on client {member.client}"
        )
    return clients
