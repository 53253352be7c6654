"""Mesh-aware distributed checkpointing and resharding of sharded training state.

Every public name is imported when it is first used. So ``import dtckpt`` costs next to nothing, and the coordinator,
which needs the generated messages and the errors only, starts without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtckpt import dtensor, errors, interop
    from dtckpt.checkpoint.converting.convert import convert
    from dtckpt.checkpoint.converting.report import ConvertReport
    from dtckpt.checkpoint.converting.shared_export import ExportOptions
    from dtckpt.checkpoint.copying.copy import CopyReport, copy
    from dtckpt.checkpoint.copying.scrub import ScrubReport, scrub
    from dtckpt.checkpoint.live.lent_version import LentVersion
    from dtckpt.checkpoint.live.publisher import Publisher
    from dtckpt.checkpoint.live.subscriber import LiveReport, LiveVersion, StagedVersion, Subscriber
    from dtckpt.checkpoint.managing.interval import AutoInterval, optimal_interval
    from dtckpt.checkpoint.managing.manager import CheckpointManager
    from dtckpt.checkpoint.managing.mirror import Mirror
    from dtckpt.checkpoint.managing.resize import ResizedState
    from dtckpt.checkpoint.managing.restore_newest import RestoredStep
    from dtckpt.checkpoint.managing.retention import Retention
    from dtckpt.checkpoint.mapping.map_rules import TensorMap
    from dtckpt.checkpoint.open import open_checkpoint
    from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
    from dtckpt.checkpoint.per_client import PerClient
    from dtckpt.checkpoint.reading.checkpoint import Checkpoint
    from dtckpt.checkpoint.reading.tensor_info import TensorInfo
    from dtckpt.checkpoint.reading.verify import VerifyReport
    from dtckpt.checkpoint.resharding.reshard import reshard
    from dtckpt.checkpoint.restoring.report import RestoreReport
    from dtckpt.checkpoint.restoring.restore import restore
    from dtckpt.checkpoint.rng_state import RngState
    from dtckpt.checkpoint.saving.report import SaveReport
    from dtckpt.checkpoint.saving.save import save
    from dtckpt.checkpoint.saving.save_async import SaveHandle, save_async
    from dtckpt.checkpoint.shards import Shards
    from dtckpt.checkpoint.signing.sign import SignReport, sign
    from dtckpt.checkpoint.simulating.simulate import Machine, Simulation, simulate
    from dtckpt.checkpoint.tensorflow.dtensor_checkpoint import DTensorCheckpoint
    from dtckpt.checkpoint.tensorflow.named_tensors import name_based_restore, name_based_save, sharded_save
    from dtckpt.checkpoint.tiers.local_restore import LocalRestore
    from dtckpt.checkpoint.tiers.options import LocalTier
    from dtckpt.comm.default_process_group import init_process_group
    from dtckpt.coordination.connect import initialize_multi_client, job_status, shutdown_multi_client
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
    from dtckpt.format.containers import ClientValues, TensorParts
    from dtckpt.format.plain_values import EnumMember
    from dtckpt.interop.zarr_store import zarr_store
    from dtckpt.layout.clients import (
        client_id,
        configure_virtual_devices,
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
    from dtckpt.layout.create_mesh import abstract_mesh, create_distributed_mesh, create_mesh
    from dtckpt.layout.layout import MATCH, UNSHARDED, Layout
    from dtckpt.layout.mesh import Mesh
    from dtckpt.layout.placement import Partial, Placement, Replicate, Shard
    from dtckpt.layout.region import Region

# The imports above, which only type checkers see, again for `__getattr__`: names by module.
_MODULES = {
    "checkpoint.saving.save_async": ("SaveHandle", "save_async"),
    "checkpoint.converting.convert": ("convert",),
    "checkpoint.converting.report": ("ConvertReport",),
    "checkpoint.converting.shared_export": ("ExportOptions",),
    "checkpoint.copying.copy": ("CopyReport", "copy"),
    "checkpoint.copying.scrub": ("ScrubReport", "scrub"),
    "checkpoint.managing.mirror": ("Mirror",),
    "checkpoint.managing.interval": ("AutoInterval", "optimal_interval"),
    "checkpoint.managing.manager": ("CheckpointManager",),
    "checkpoint.tensorflow.named_tensors": ("name_based_restore", "name_based_save", "sharded_save"),
    "checkpoint.managing.resize": ("ResizedState",),
    "checkpoint.managing.restore_newest": ("RestoredStep",),
    "checkpoint.tensorflow.dtensor_checkpoint": ("DTensorCheckpoint",),
    "checkpoint.options": ("RestoreOptions", "SaveOptions"),
    "checkpoint.per_client": ("PerClient",),
    "checkpoint.tiers.local_restore": ("LocalRestore",),
    "checkpoint.tiers.options": ("LocalTier",),
    "checkpoint.open": ("open_checkpoint",),
    "checkpoint.mapping.map_rules": ("TensorMap",),
    "checkpoint.reading.checkpoint": ("Checkpoint",),
    "checkpoint.live.lent_version": ("LentVersion",),
    "checkpoint.live.publisher": ("Publisher",),
    "checkpoint.live.subscriber": ("LiveReport", "LiveVersion", "StagedVersion", "Subscriber"),
    "checkpoint.reading.tensor_info": ("TensorInfo",),
    "checkpoint.restoring.restore": ("restore",),
    "checkpoint.rng_state": ("RngState",),
    "checkpoint.managing.retention": ("Retention",),
    "checkpoint.restoring.report": ("RestoreReport",),
    "checkpoint.saving.report": ("SaveReport",),
    "checkpoint.saving.save": ("save",),
    "checkpoint.reading.verify": ("VerifyReport",),
    "format.containers": ("ClientValues", "TensorParts"),
    "format.plain_values": ("EnumMember",),
    "interop.zarr_store": ("zarr_store",),
    "layout.clients": (
        "client_id",
        "configure_virtual_devices",
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
    "layout.create_mesh": ("abstract_mesh", "create_distributed_mesh", "create_mesh"),
    "coordination.connect": ("initialize_multi_client", "job_status", "shutdown_multi_client"),
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
    "layout.layout": ("MATCH", "UNSHARDED", "Layout"),
    "layout.mesh": ("Mesh",),
    "layout.placement": ("Partial", "Placement", "Replicate", "Shard"),
    "layout.region": ("Region",),
    "comm.default_process_group": ("init_process_group",),
    "checkpoint.resharding.reshard": ("reshard",),
    "checkpoint.shards": ("Shards",),
    "checkpoint.signing.sign": ("SignReport", "sign"),
    "checkpoint.simulating.simulate": ("Machine", "Simulation", "simulate"),
}
_SUBMODULES = ("dtensor", "errors", "interop")
_MODULE_OF = {name: f"dtckpt.{module}" for module, names in _MODULES.items() for name in names}

__version__ = "0.2.0"

__all__ = [
    "MATCH",
    "UNSHARDED",
    "AutoInterval",
    "Checkpoint",
    "CheckpointManager",
    "ClientValues",
    "ConvertReport",
    "CopyReport",
    "DTensor",
    "DTensorCheckpoint",
    "DVariable",
    "EnumMember",
    "ExportOptions",
    "Layout",
    "LentVersion",
    "LiveReport",
    "LiveVersion",
    "LocalRestore",
    "LocalTier",
    "Machine",
    "Mesh",
    "Mirror",
    "Partial",
    "PerClient",
    "Placement",
    "Publisher",
    "Region",
    "Replicate",
    "ResizedState",
    "RestoreOptions",
    "RestoreReport",
    "RestoredStep",
    "Retention",
    "RngState",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "ScrubReport",
    "Shard",
    "Shards",
    "SignReport",
    "Simulation",
    "StagedVersion",
    "Subscriber",
    "TensorInfo",
    "TensorMap",
    "TensorParts",
    "VerifyReport",
    "abstract_mesh",
    "call_with_layout",
    "check_layout",
    "client_id",
    "configure_virtual_devices",
    "convert",
    "copy",
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
    "interop",
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
    "optimal_interval",
    "pack",
    "relayout",
    "reshard",
    "restore",
    "run_on",
    "save",
    "save_async",
    "scrub",
    "sharded_save",
    "shutdown_multi_client",
    "shutdown_tpu_system",
    "sign",
    "simulate",
    "unpack",
    "zarr_store",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"dtckpt.{name}")
    try:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    except KeyError:
        raise AttributeError(f"module 'dtckpt' has no attribute {name!r}") from None
    globals()[name] = value
    if "dtckpt.layout.mesh" in sys.modules:
        importlib.import_module("dtckpt.pictures.notebook")  # so that notebooks draw meshes and layouts
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
