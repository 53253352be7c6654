"""The DTensor runtime: tensors of global shape whose components live on the devices of a mesh."""

from dtckpt.dtensor.moving import call_with_layout, copy_to_mesh, relayout, run_on
from dtckpt.dtensor.packing import pack, unpack
from dtckpt.dtensor.tensor import DTensor, check_layout, fetch_layout
from dtckpt.placement import Partial, Placement, Replicate, Shard

__all__ = [
    "DTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "call_with_layout",
    "check_layout",
    "copy_to_mesh",
    "fetch_layout",
    "pack",
    "relayout",
    "run_on",
    "unpack",
]
