"""Models in safetensors files on several clients: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors.torch
from support.states import differences

import dtckpt
from checkpoint.client_cases import mesh_over_all
from dtckpt import Layout, RestoreOptions, RestoreReport, TensorInfo


def split_evenly(name: str, info: TensorInfo, mesh: dtckpt.Mesh) -> Layout:
    """Split the first dim over the first axis of a mesh, and the second over the second."""
    specs = [*mesh.dim_names, *["unsharded"] * len(info.shape)][: len(info.shape)]
    return Layout(specs, mesh)


def restore_and_save(source: str, target: str, axes: Mapping[str, int]) -> list[str]:
    """Restore a model onto a mesh over all clients and save it; return the names of its tensors."""
    mesh = mesh_over_all(axes)
    model = dtckpt.restore(source, mesh=mesh, layouts=lambda name, info: split_evenly(name, info, mesh))
    dtckpt.save(target, model)
    return list(model)


def restore_slices(source: str, specs: Mapping[str, Any], axes: Mapping[str, int]) -> tuple[list[str], int]:
    """Restore tensors into layouts; return the faults, and the bytes that this client read."""
    mesh = mesh_over_all(axes)
    reports: list[RestoreReport] = []
    options = RestoreOptions(report=reports.append)
    layouts = {name: Layout(each, mesh) for name, each in specs.items()}
    model = dtckpt.restore(source, mesh=mesh, layouts=layouts, options=options)
    expected = safetensors.torch.load_file(source)
    wrong = [text for name, tensor in expected.items() for text in differences(model[name], tensor)]
    return wrong, reports[0].nbytes_read
