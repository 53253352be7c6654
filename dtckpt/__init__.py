"""Mesh-aware distributed checkpointing and resharding of sharded training state.

Names are loaded when they are first used, so ``import dtckpt`` costs next to nothing and the coordinator, which
needs the messages only, starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtckpt import dtensor, errors
    from dtckpt.checkpoint.asynchronous import SaveHandle, save_async
    from dtckpt.checkpoint.manager import CheckpointManager
    from dtckpt.checkpoint.named import name_based_restore, name_based_save, sharded_save
    from dtckpt.checkpoint.newest import RestoredStep
    from dtckpt.checkpoint.objects import DTensorCheckpoint
    from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
    from dtckpt.checkpoint.reader import Checkpoint, TensorInfo, open_checkpoint
    from dtckpt.checkpoint.restore import restore
    from dtckpt.checkpoint.restore_report import RestoreReport
    from dtckpt.checkpoint.retention import Retention
    from dtckpt.checkpoint.save import SaveReport, save
    from dtckpt.checkpoint.verifying import VerifyReport
    from dtckpt.clients import (
        abstract_mesh,
        client_id,
        configure_virtual_devices,
        create_distributed_mesh,
        create_mesh,
        device_name,
        full_job_name,
        heartbeat_enabled,
        initialize_tpu_system,
        job_name,
        jobs,
        local_devices,
        num_clients,
        num_global_devices,
        num_local_devices,
        shutdown_tpu_system,
    )
    from dtckpt.coordination import initialize_multi_client, job_status, shutdown_multi_client
    from dtckpt.dtensor import (
        DTensor,
        DVariable,
        call_with_layout,
        check_layout,
        copy_to_mesh,
        enable_save_as_bf16,
        fetch_layout,
        pack,
        relayout,
        run_on,
        unpack,
    )
    from dtckpt.layout import MATCH, UNSHARDED, Layout
    from dtckpt.mesh import Mesh
    from dtckpt.placement import Partial, Placement, Replicate, Shard
    from dtckpt.region import Region
    from dtckpt.rendezvous import init_process_group
    from dtckpt.resharding.engine import reshard

_MODULES = {
    "checkpoint.asynchronous": ("SaveHandle", "save_async"),
    "checkpoint.manager": ("CheckpointManager",),
    "checkpoint.named": ("name_based_restore", "name_based_save", "sharded_save"),
    "checkpoint.newest": ("RestoredStep",),
    "checkpoint.objects": ("DTensorCheckpoint",),
    "checkpoint.options": ("RestoreOptions", "SaveOptions"),
    "checkpoint.reader": ("Checkpoint", "TensorInfo", "open_checkpoint"),
    "checkpoint.restore": ("restore",),
    "checkpoint.retention": ("Retention",),
    "checkpoint.restore_report": ("RestoreReport",),
    "checkpoint.save": ("SaveReport", "save"),
    "checkpoint.verifying": ("VerifyReport",),
    "clients": (
        "abstract_mesh",
        "client_id",
        "configure_virtual_devices",
        "create_distributed_mesh",
        "create_mesh",
        "device_name",
        "full_job_name",
        "heartbeat_enabled",
        "initialize_tpu_system",
        "job_name",
        "jobs",
        "local_devices",
        "num_clients",
        "num_global_devices",
        "num_local_devices",
        "shutdown_tpu_system",
    ),
    "coordination": ("initialize_multi_client", "job_status", "shutdown_multi_client"),
    "dtensor": (
        "DTensor",
        "DVariable",
        "call_with_layout",
        "check_layout",
        "copy_to_mesh",
        "enable_save_as_bf16",
        "fetch_layout",
        "pack",
        "relayout",
        "run_on",
        "unpack",
    ),
    "layout": ("MATCH", "UNSHARDED", "Layout"),
    "mesh": ("Mesh",),
    "placement": ("Partial", "Placement", "Replicate", "Shard"),
    "region": ("Region",),
    "rendezvous": ("init_process_group",),
    "resharding.engine": ("reshard",),
}
_SUBMODULES = ("dtensor", "errors")
_HOME = {name: f"dtckpt.{module}" for module, names in _MODULES.items() for name in names}

__version__ = "0.1.0"

__all__ = [
    "MATCH",
    "UNSHARDED",
    "Checkpoint",
    "CheckpointManager",
    "DTensor",
    "DTensorCheckpoint",
    "DVariable",
    "Layout",
    "Mesh",
    "Partial",
    "Placement",
    "Region",
    "Replicate",
    "RestoreOptions",
    "RestoreReport",
    "RestoredStep",
    "Retention",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "Shard",
    "TensorInfo",
    "VerifyReport",
    "abstract_mesh",
    "call_with_layout",
    "check_layout",
    "client_id",
    "configure_virtual_devices",
    "copy_to_mesh",
    "create_distributed_mesh",
    "create_mesh",
    "device_name",
    "dtensor",
    "enable_save_as_bf16",
    "errors",
    "fetch_layout",
    "full_job_name",
    "heartbeat_enabled",
    "init_process_group",
    "initialize_multi_client",
    "initialize_tpu_system",
    "job_name",
    "job_status",
    "jobs",
    "local_devices",
    "name_based_restore",
    "name_based_save",
    "num_clients",
    "num_global_devices",
    "num_local_devices",
    "open_checkpoint",
    "pack",
    "relayout",
    "reshard",
    "restore",
    "run_on",
    "save",
    "save_async",
    "sharded_save",
    "shutdown_multi_client",
    "shutdown_tpu_system",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"dtckpt.{name}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except KeyError:
        raise AttributeError(f"module 'dtckpt' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
