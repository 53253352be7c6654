"""The private names of PyTorch that this package uses; any release may change them without notice.

Other modules take them from here. So a new release of PyTorch needs changes on this page only.
Operators (``torch.ops``) are not among them: the registry of rules leaves out operators that a release lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

OLDEST = "2.9"
"""The oldest release of PyTorch on which checkpoints work. DTensors are tested from 2.11 on."""

if torch.torch_version.TorchVersion(torch.__version__) < OLDEST:
    raise ImportError(f"dtckpt needs PyTorch {OLDEST} or newer; got {torch.__version__}")

# ruff: noqa: E402  (an older PyTorch lacks some of these; its user must learn the version that is needed, not a name)
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch._guards import detect_fake_mode
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.distributed import _functional_collectives, device_mesh, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.optim.optimizer import _foreach_supported_types as foreach_types_of_optimizers
from torch.testing import _comparison as comparison
from torch.utils._foreach_utils import _foreach_supported_types as foreach_types_of_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "AsyncCollectiveTensor",
    "FakeTensorMode",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "TreeSpec",
    "comparison",
    "detect_fake_mode",
    "foreach_types_of_gradients",
    "foreach_types_of_optimizers",
    "is_fake",
    "suggest_memory_format",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

_c10d: Any = distributed_c10d
_bindings: Any = torch._C

# Process groups.
new_process_group: Any = _c10d._new_process_group_helper
"""Makes a group as ``new_group`` does, with a name of the caller's choice, among its members alone."""


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend that a process group uses for tensors on a device."""
    return group._get_backend(device)


def devices_of(group: Any) -> list[torch.device]:
    """Return the types of the devices that a process group has backends for."""
    return group._device_types  # type: ignore[no-any-return]


get_default_store: Any = _c10d._get_default_store
get_default_timeout: Any = _c10d._get_default_timeout
world: Any = _c10d._world
"""PyTorch's tables of process groups."""

functional_collectives: Any = _functional_collectives
RESOLVE_GROUP = "_resolve_group" if hasattr(_functional_collectives, "_resolve_group") else "_resolve_group_name"
"""The function by which functional collectives find their process group. In PyTorch 2.11 it has the older name."""

_meshes: Any = device_mesh._mesh_resources


def root_mesh_of(mesh: Any) -> Any:
    """Return the root ``DeviceMesh`` of a slice, over all slices; return a ``DeviceMesh`` itself if it is no slice."""
    # In PyTorch 2.9 the tables of the thread that cut the mesh know it, later the mesh itself.
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else _meshes.get_root_mesh(mesh)


def forget_meshes() -> None:
    """Clear PyTorch's caches that hold meshes of DTensors.

    A result of a cached operator is on the mesh that the first call had. After the process group was made anew, an
    equal mesh has other groups, and this process may have another place in it. Versions of PyTorch may lack some.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for holder, name in (
        (propagator.propagate_op_sharding, "cache_clear"),
        (_bindings, "_clear_DTensor_sharding_propagator_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear"),
    ):
        getattr(holder, name, lambda: None)()


# The dispatcher, and tensors that it treats in their own way.
DispatchKeySet: Any = _bindings.DispatchKeySet
disable_torch_dispatch: Any = _bindings._DisableTorchDispatch
disabled_torch_function: Any = _bindings._disabled_torch_function_impl
dispatch_key: Any = _bindings._dispatch_key_parse
dispatch_keys_after: Any = _bindings._dispatch_keyset_full_after
has_kernel: Any = _bindings._dispatch_has_kernel_for_dispatch_key
make_wrapper: Any = torch.Tensor._make_wrapper_subclass
make_subclass: Any = torch.Tensor._make_subclass
no_torch_function_subclass: Any = _bindings.DisableTorchFunctionSubclass
operator_names: Any = _bindings._dispatch_get_all_op_names
OpOverload: Any = torch._ops.OpOverload

_number_of_modes: Any = _bindings._len_torch_dispatch_stack
_mode: Any = _bindings._get_dispatch_mode
_RECORDING: Any = _bindings._TorchDispatchModeKey.PROXY


def is_recording() -> bool:
    """Whether ``make_fx`` records operators, as ``torch.func.linearize`` has it do."""
    return _number_of_modes() > 0 and _mode(_RECORDING) is not None


current_graph_task: Any = _bindings._current_graph_task_id
"""Returns the number of the backward pass that runs in this thread; -1 outside of one."""
dynamo: Any = _bindings._dynamo.eval_frame

# Single functions.
assert_async: Any = torch._assert_async
foreach_copy: Any = torch._foreach_copy_
foreach_norm: Any = torch._foreach_norm
masked_ops: Any = torch.masked._ops
gradient_clipping: Any = torch.nn.utils.clip_grad
"""Its functions ``_get_total_norm`` and ``_clip_grads_with_norm_`` are public under names without underscore."""
loader_signals: Any = torch.utils.data._utils.signal_handling
"""Its function ``_set_worker_signal_handlers`` is called by each worker of a ``DataLoader`` at its start."""
lbfgs: Any = torch.optim.LBFGS
"""Its methods ``_gather_flat_grad`` and ``_add_grad`` make one vector of all gradients, and add one to parameters."""
to_dlpack: Any = _bindings._to_dlpack
rebuild_tensor_v2: Any = torch._utils._rebuild_tensor_v2
"""Files of ``torch.save`` name it to make a tensor; `rebuild_tensor_v3` is for dtypes that have no storage class."""
rebuild_tensor_v3: Any = torch._utils._rebuild_tensor_v3


set_storage: Any = torch._functionalize_unsafe_set
"""Gives a tensor the storage of another tensor; its sizes, strides and offset stay."""


def _storage_of(tensor: torch.Tensor) -> Any:
    # By the base class: a tensor without memory may refuse to hand out its storage.
    return _bindings.TensorBase.untyped_storage(tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that the tensors of one storage share, and no others; a storage may have no memory."""
    return int(_storage_of(tensor)._cdata)


def storage_nbytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's storage, in bytes, also if the tensor has no memory."""
    return int(_storage_of(tensor).nbytes())


def cached_global_plans(changed: Sequence[Any]) -> Sequence[Any] | None:
    """Return the plans of all ranks; a caching `SavePlanner` gives only the changed plans.

    Args:
        changed: The result of its ``create_global_plan``: by rank the new plan, or a plan that is not usable.

    Returns:
        The plans; None if no plan has changed, or if the planner does not cache plans.
    """
    from torch.distributed.checkpoint.planner import SavePlanner  # here, as most programs do without

    if not any(plan.usable for plan in changed):
        return None
    for kept in SavePlanner._cached_global_plan.values():
        pairs = zip(changed, kept, strict=False)
        if len(kept) == len(changed) and all(plan is each or not plan.usable for plan, each in pairs):
            return kept
    return None


def local_tensor_of(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor of PyTorch itself; ``to_local`` returns a view that records a gradient."""
    return tensor._local_tensor  # type: ignore[no-any-return]


def resolve_lazy_bits() -> Any:
    """Return a context in which operators resolve the conjugate and the negative bit of plain tensors.

    Operators resolve these bits everywhere but within ``__torch_dispatch__``.
    """
    excluded = _bindings._dispatch_tls_local_exclude_set()
    for name in ("Conjugate", "Negative"):
        excluded -= DispatchKeySet(dispatch_key(name))
    return _bindings._ForceDispatchKeyGuard(_bindings._dispatch_tls_local_include_set(), excluded)


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return a ``_StridedShard`` of PyTorch."""
    from torch.distributed.tensor.placement_types import _StridedShard  # here, as most programs do without

    return _StridedShard(dim, split_factor=split_factor)


def storage_info(file: str, offset: int, nbytes: int) -> Any:
    """Return the place of an item as the metadata of a distributed checkpoint of PyTorch store it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # here, as above

    return _StorageInfo(file, offset, nbytes)
