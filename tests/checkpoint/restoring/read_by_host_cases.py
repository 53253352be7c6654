"""Restores in which clients of one host hand blocks on: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.states import differences, packed, tensor_of, zeros_of

import dtckpt
from checkpoint.client_cases import mesh_over_all
from dtckpt import Layout, RestoreOptions, RestoreReport
from dtckpt.checkpoint.reading import read_chunks
from dtckpt.checkpoint.restoring import read_by_host
from dtckpt.comm import host_rings
from dtckpt.errors import DtckptError

Tensors = Mapping[str, tuple[Sequence[int], str, str, Sequence[Any]]]
"""By name: shape, stored dtype, dtype of the target, sharding specs."""
TIMEOUT_S = 6.0


def restore(
    path: str,
    axes: Mapping[str, int],
    tensors: Tensors,
    *,
    devices: int = 1,
    read_once: bool | None = True,
    cores: int = 1,
    timeout_s: float = 20.0,
    sabotage: Callable[[], Any] | None = None,
) -> tuple[list[str], int]:
    """Restore tensors whose elements follow from their names; return the faults, and the bytes that were read."""
    mesh = mesh_over_all(axes, devices)
    wholes = {
        name: tensor_of(name, shape, stored).to(getattr(torch, dtype))
        for name, (shape, stored, dtype, _) in tensors.items()
    }
    target = {name: packed(zeros_of(whole), Layout(tensors[name][3], mesh)) for name, whole in wholes.items()}
    reports: list[RestoreReport] = []
    options = RestoreOptions(read_once=read_once, report=reports.append, cast="any", timeout_s=timeout_s)
    with ExitStack() as stack:
        for module, name, value in (
            (read_by_host, "MIN_CHUNK_NBYTES", 1),
            (read_by_host, "MIN_NBYTES", 1),
            (read_chunks, "SPAN_NBYTES", 256 << 10),
            (read_by_host, "spare_threads", lambda: cores),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        if sabotage is not None:
            stack.enter_context(sabotage())
        failure = None
        try:
            dtckpt.restore(path, target, options=options)
        except DtckptError as error:
            # Without its frames, which refer to the memory of the rings.
            failure = type(error)(error.message)
    gc.collect()  # an error and its frames refer to each other
    assert "dtckpt-ring" not in Path("/proc/self/maps").read_text(), "a ring is still mapped"
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not any("dtckpt-ring" in link or "pidfd" in link for link in links), links
    if failure is not None:
        raise failure
    found = [f"{name}: {text}" for name, whole in wholes.items() for text in differences(target[name], whole)]
    return found, reports[0].nbytes_read


def at_second_span(act: Callable[[], object]) -> Callable[[], Any]:
    """Return a patch that lets client 1 act before it hands on its second span."""
    publish = host_rings.HostRings.publish

    def patched(self: host_rings.HostRings) -> None:
        if self._num_published == 1 and dtckpt.client_id() == 1:
            act()
        publish(self)

    return lambda: mock.patch.object(host_rings.HostRings, "publish", patched)


def killed(path: str, axes: Mapping[str, int], tensors: Tensors) -> None:
    """Restore; client 1 is killed in the middle."""
    restore(path, axes, tensors, sabotage=at_second_span(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def stopped(path: str, axes: Mapping[str, int], tensors: Tensors) -> None:
    """Restore; client 1 is stopped in the middle, and goes on when the others have given up."""

    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    restore(path, axes, tensors, timeout_s=TIMEOUT_S, sabotage=at_second_span(stop))


def refused(path: str, axes: Mapping[str, int], tensors: Tensors, how: str) -> tuple[list[str], int]:
    """Restore where client 1 has no ring, or cannot open the rings of the others."""

    def forbidden(*_: Any) -> None:
        raise PermissionError("forbidden")

    if dtckpt.client_id() != 1:
        return restore(path, axes, tensors)
    cls = host_rings.OwnRing if how == "no ring" else host_rings._PeerRing
    return restore(path, axes, tensors, sabotage=lambda: mock.patch.object(cls, "__init__", forbidden))
