"""Restores that read each byte once: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from support.states import differences, packed, tensor_of

import dtckpt
from checkpoint.client_cases import mesh_over_all
from dtckpt import Layout, RestoreOptions, RestoreReport
from dtckpt.checkpoint.restoring import read_once as reading_once
from dtckpt.checkpoint.restoring import shared_rows

Specs = Mapping[str, Sequence[Any]]
SHAPES = {"even": (64, 32), "uneven": (37, 11), "few rows": (2, 300), "deep": (1, 40, 6)}
DTYPE = "float32"


def restore(
    path: str,
    axes: Mapping[str, int],
    specs: Specs,
    *,
    devices: int = 1,
    read_once: bool | None = None,
    extra: bool = False,
    min_nbytes: int = 1,
) -> tuple[list[str], int]:
    """Restore into tensors on a mesh over all clients, one of them into float64.

    Returns:
        What is wrong, and the bytes that this client read.
    """
    mesh = mesh_over_all(axes, devices)
    target: dict[str, Any] = {
        name: packed(torch.zeros(SHAPES[name], dtype=torch.float64), Layout(each, mesh)) for name, each in specs.items()
    }
    if extra and dtckpt.client_id() == 0:
        target["plain"] = torch.zeros(3)
    reports: list[RestoreReport] = []
    options = RestoreOptions(read_once=read_once, report=reports.append, allow_unexpected=True, timeout_s=20)
    small = mock.patch.object(shared_rows, "MIN_NBYTES", min_nbytes)
    with small, mock.patch.object(reading_once, "BATCH_NBYTES", 3000):
        dtckpt.restore(path, target, options=options)
    found = [
        f"{name}: {text}"
        for name in specs
        for text in differences(target[name], tensor_of(name, SHAPES[name], DTYPE).double())
    ]
    return found, reports[0].nbytes_read


def fail(path: str, specs: Specs, odd: int) -> None:
    """Restore, where one client cannot read."""
    read_all = dtckpt.Checkpoint.read_all

    def broken(self: Any, requests: Any, **options: Any) -> int:
        if dtckpt.client_id() == odd:  # the others wait for the bytes that it would send, until their timeout
            raise ZeroDivisionError("no read today")
        return read_all(self, requests, **options)

    with mock.patch.object(dtckpt.Checkpoint, "read_all", broken):
        restore(path, {"x": dtckpt.num_clients()}, specs, read_once=True)
