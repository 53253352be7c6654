"""The DTensor runtime: tensors of global shape whose components live on the devices of a mesh.

Mirrors ``torch.distributed.tensor`` name for name, and has TensorFlow's names for the same things beside them. The
public names are the names in ``__all__`` and the submodules `debug`, `experimental`, `parallel` and `placement_types`.
Programs import these submodules themselves.
"""

import sys

from torch.serialization import add_safe_globals

from dtckpt.dtensor import debug, experimental, parallel, placement_types, several_meshes, torch_hooks
from dtckpt.dtensor import methods as methods
from dtckpt.dtensor.components import pack, unpack
from dtckpt.dtensor.distribute import distribute_module, distribute_tensor
from dtckpt.dtensor.factories import empty, full, ones, rand, randn, zeros
from dtckpt.dtensor.operators import dispatch as dispatch
from dtckpt.dtensor.serialization import SAFE_GLOBALS
from dtckpt.dtensor.tensor import DTensor, check_layout, fetch_layout
from dtckpt.dtensor.tensorflow_names import call_with_layout, copy_to_mesh, relayout, run_on
from dtckpt.dtensor.torch_compile import keep_from_tracing, own_untraceable_methods
from dtckpt.dtensor.torch_hooks import follow_torch_logs
from dtckpt.dtensor.variable import DVariable, enable_save_as_bf16
from dtckpt.layout.device_mesh import DeviceMesh, init_device_mesh
from dtckpt.layout.placement import Partial, Placement, Replicate, Shard

__all__ = [
    "DTensor",
    "DVariable",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "call_with_layout",
    "check_layout",
    "copy_to_mesh",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "enable_save_as_bf16",
    "fetch_layout",
    "full",
    "init_device_mesh",
    "ones",
    "pack",
    "rand",
    "randn",
    "relayout",
    "run_on",
    "unpack",
    "zeros",
]

_SUBMODULES = {"debug": debug, "experimental": experimental, "parallel": parallel, "placement_types": placement_types}

torch_hooks.install()
several_meshes.install()
follow_torch_logs()
add_safe_globals([DTensor, DVariable, *SAFE_GLOBALS])

own_untraceable_methods(DTensor)
for _name, _module in list(sys.modules.items()):
    if _name.startswith(__name__):
        keep_from_tracing(vars(_module).values())


def __dir__() -> list[str]:
    """Return the public names: the names in ``__all__`` and the public submodules."""
    return sorted([*__all__, *_SUBMODULES])
