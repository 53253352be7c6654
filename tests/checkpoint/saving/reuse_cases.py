"""Saves with a base over several clients, and saves that are killed: functions that other processes run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.states import packed

import dtckpt
from checkpoint.client_cases import mesh_over_all
from dtckpt import Layout, SaveOptions
from dtckpt.checkpoint.saving.reuse import Reuse
from dtckpt.checkpoint.saving.write import ClientWriter
from dtckpt.errors import CheckpointCorruptError, CheckpointError

CHANGED_NBYTES = 2 * 32 * 64 * 4 + 256 * 64 * 4


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def whole(step: int) -> dict[str, Any]:
    """Return the state of a step; only the adapters change, and the part of `halves` that client 1 of 2 has."""
    return {
        "sharded": _noise(1, 512, 300),
        "copied": _noise(2, 200, 200),
        "norm": _noise(3, 333),
        "halves": torch.cat([_noise(4, 256, 64), _noise(300 + step, 256, 64)]),
        "adapter": _noise(100 + step, 32, 64),
        "plain": _noise(200 + step, 32, 64),
    }


def _on_mesh(step: int) -> dict[str, Any]:
    mesh = mesh_over_all({"x": 2}, 2 // dtckpt.num_clients())
    specs = {"sharded": ["x", "unsharded"], "copied": ["unsharded", "unsharded"], "norm": ["unsharded"]}
    specs["adapter"] = specs["halves"] = ["x", "unsharded"]
    tree = whole(step)
    return {name: packed(tree[name], Layout(specs[name], mesh)) if name in specs else tree[name] for name in tree}


def save_steps(root: str, kvstore: str) -> list[tuple[int, int]]:
    """Save three steps, each with the step before as its base; return all bytes, and the bytes that were reused."""
    return [save_step(root, kvstore, step) for step in range(3)]


def save_step(root: str, kvstore: str, step: int) -> tuple[int, int]:
    base = f"{root}/{step - 1}" if step else None
    options = SaveOptions(kvstore=kvstore)
    if step == 1:
        report = dtckpt.save_async(f"{root}/{step}", _on_mesh(step), options=options, base=base).result()
    else:
        report = dtckpt.save(f"{root}/{step}", _on_mesh(step), options=options, base=base)
    return report.nbytes, report.nbytes_reused


def save_with_other_base(root: str, kvstore: str, how: str) -> int:
    """Save step 3 where clients see different bases; return the bytes that were reused."""
    base = f"{root}/2"
    if (how, dtckpt.client_id()) in (("leader sees none", 0), ("other sees none", 1)):
        base = f"{root}/none"
    if (how, dtckpt.client_id()) == ("other sees another", 1):
        base = f"{root}/1"
    real = Reuse.share
    if (how, dtckpt.client_id()) == ("other cannot share", 1):
        Reuse.share = _refuse  # type: ignore[method-assign]
    try:
        return dtckpt.save(f"{root}/3", _on_mesh(3), options=SaveOptions(kvstore=kvstore), base=base).nbytes_reused
    finally:
        Reuse.share = real  # type: ignore[method-assign]


def _refuse(*_: Any) -> None:
    raise CheckpointError("storage refused")


def lie(root: str, kvstore: str) -> str:
    """Save step 3, and let client 1 leave a chunk of a tensor to the base that the base lacks; return the error."""
    real = ClientWriter._reused_bits
    if dtckpt.client_id() == 1:
        ClientWriter._reused_bits = lambda self: b"\xff" * len(real(self))  # type: ignore[method-assign]
    try:
        tree = {**_on_mesh(3), "new": packed(_noise(9, 512, 300), Layout(["x", "unsharded"], mesh_over_all({"x": 2})))}
        dtckpt.save(f"{root}/3", tree, options=SaveOptions(kvstore=kvstore), base=f"{root}/2")
    except CheckpointCorruptError as error:
        return str(error)
    finally:
        ClientWriter._reused_bits = real  # type: ignore[method-assign]
    return ""
