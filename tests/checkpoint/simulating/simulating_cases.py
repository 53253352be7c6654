"""Saves, restores and redistributions whose bytes are counted: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from support.states import packed

import dtckpt
from checkpoint.client_cases import mesh_over_all
from dtckpt import Layout, Mesh, RestoreOptions, SaveOptions
from dtckpt.checkpoint.saving import staging
from dtckpt.comm.observers import Communication, observed_by

Specs = Mapping[str, Sequence[Any]]
"""Sharding specs by the end of a tensor's name."""
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by name."""


def state_on(mesh: Mesh, shapes: Shapes, specs: Specs) -> dict[str, Any]:
    return {
        name: packed(torch.zeros(shape, dtype=getattr(torch, dtype)), Layout(specs[name.rpartition("/")[2]], mesh))
        for name, (shape, dtype) in shapes.items()
    }


def count_save(
    path: str, axes: Mapping[str, int], shapes: Shapes, specs: Specs, *, devices: int, on_gpus: bool
) -> dict[str, int]:
    """Save in the background; return the bytes that this client staged, handed over and wrote.

    Args:
        path: Where.
        axes: The mesh.
        shapes: The tensors.
        specs: Their layouts.
        devices: Devices of each client.
        on_gpus: Whether the save takes the tensors to be on GPUs, and so stages and compares all copies.
    """
    state = state_on(mesh_over_all(axes, devices), shapes, specs)
    options = SaveOptions(check_replicas=on_gpus, chunk_nbytes=1 << 16)
    with mock.patch.object(staging, "is_elsewhere", return_value=on_gpus):
        report = dtckpt.save_async(path, state, options=options).result()
    return {name: cost.nbytes for name, cost in report.phases.items()}


def count_restore(
    path: str, axes: Mapping[str, int], shapes: Shapes, specs: Specs, *, devices: int, read_once: bool
) -> tuple[int, int]:
    """Restore; return the bytes that this client read, and the bytes that it received."""
    reports: list[Any] = []
    state = state_on(mesh_over_all(axes, devices), shapes, specs)
    seen: list[Communication] = []
    with observed_by(seen.append):
        dtckpt.restore(path, state, options=RestoreOptions(read_once=read_once, report=reports.append))
    return reports[0].nbytes_read, received(seen)


def count_redistribution(
    axes: Mapping[str, int], target: Mapping[str, int], shapes: Shapes, specs: Specs, new: Specs, *, devices: int
) -> int:
    """Bring all tensors to layouts on another mesh; return the bytes that this client received."""
    mesh, other = (mesh_over_all(each, devices) for each in (axes, target))
    seen: list[Communication] = []
    with observed_by(seen.append):
        for name, tensor in state_on(mesh, shapes, specs).items():
            dtckpt.copy_to_mesh(tensor, Layout(new[name.rpartition("/")[2]], other))
    return received(seen)


def received(seen: Sequence[Communication]) -> int:
    return sum(each.nbytes for each in seen if each.kind == "exchange")
