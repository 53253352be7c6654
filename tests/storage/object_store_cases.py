"""Functions that client processes run in the tests of object stores (`Pool.run`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from checkpoint import client_cases

import dtckpt
from dtckpt import SaveOptions


def save(environment: Mapping[str, str], *args: Any, **options: Any) -> dict[str, Any]:
    os.environ.update(environment)
    return client_cases.save(*args, **options)


def restore(environment: Mapping[str, str], *args: Any, **options: Any) -> list[str]:
    os.environ.update(environment)
    return client_cases.restore(*args, **options)


def save_and_die(
    environment: Mapping[str, str], path: str, axes: Mapping[str, int], tensors: Any, victim: int, when: str
) -> None:
    """Save, while one client is killed amid its writes, or when only the commit is left to be done."""
    os.environ.update(environment)
    mesh = client_cases.mesh_over_all(axes)
    if dtckpt.client_id() == victim:
        # Objects cannot be renamed: if they were written in place, readers would find the old checkpoint half replaced.
        if when == "amid its writes":
            client_cases._die_at_write(2)
        else:
            from dtckpt.storage.commit_by_decision import ObjectStoreAttempt

            ObjectStoreAttempt.commit = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    options = SaveOptions(overwrite=True, timeout_s=30, chunk_nbytes=64)
    dtckpt.save(path, client_cases.tree_on(mesh, tensors, "new"), options=options)


def manage(environment: Mapping[str, str], root: str, steps: int) -> list[int]:
    """Save steps with a manager that keeps two, restore the newest, return the remaining files."""
    os.environ.update(environment)
    mesh = client_cases.mesh_over_all({"x": 2})
    with dtckpt.CheckpointManager(root, keep=2) as manager:
        for step in range(steps):
            manager.save(step, client_cases.tree_on(mesh, client_cases.WEIGHT, str(step)))
        manager.wait()
        assert manager.restore(mesh=mesh).step == steps - 1
        return manager.all_steps()
