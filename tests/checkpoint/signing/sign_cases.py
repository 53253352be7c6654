"""Functions that client processes run in the tests of signatures."""

from __future__ import annotations

from typing import Any

import torch
from support.states import bits_of

import dtckpt
from checkpoint.client_cases import Tensors, mesh_over_all, tree_on
from dtckpt import RestoreOptions

TENSORS: Tensors = {"w": ((600, 256), "float32", ["x", "unsharded"]), "copies": ((40, 5), "int64", ["unsharded"] * 2)}


def save(path: str) -> None:
    """Save the tensors on all clients."""
    dtckpt.save(path, tree_on(mesh_over_all({"x": 2}, 1), TENSORS, "signed"))


def restore(path: str, key: str, read_once: bool | None) -> bool:
    """Restore by a trusted key; return whether the elements are right. A refused restore fills in signed ones only."""
    mesh = mesh_over_all({"x": 2}, 1)
    wanted, target = tree_on(mesh, TENSORS, "signed"), tree_on(mesh, TENSORS, "other")
    before = tree_on(mesh, TENSORS, "other")
    try:
        dtckpt.restore(path, target, options=RestoreOptions(trusted_keys=[key], read_once=read_once))
    except dtckpt.errors.CheckpointUntrustedError:
        for name in TENSORS:
            found, old, signed = (
                [part.contiguous().view(torch.uint8) for part in dtckpt.unpack(tree[name])]
                for tree in (target, before, wanted)
            )
            assert all(((a == b) | (a == c)).all() for a, b, c in zip(found, old, signed, strict=True))
        raise
    return _is_equal(target, wanted)


def restore_by_own_keys(path: str, key: str) -> None:
    """Restore with a trusted key on client 0 only."""
    target = tree_on(mesh_over_all({"x": 2}, 1), TENSORS, "other")
    keys = [key] if dtckpt.client_id() == 0 else []
    dtckpt.restore(path, target, options=RestoreOptions(trusted_keys=keys))


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        bits_of(part) == bits_of(theirs)
        for name in TENSORS
        for part, theirs in zip(dtckpt.unpack(one[name]), dtckpt.unpack(other[name]), strict=True)
    )
