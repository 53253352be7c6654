"""Clear PyTorch's caches that hold meshes of DTensors.

A mesh holds its process groups, and the threads of each wake a hundred times a second. In client processes that stay,
hundreds of them took a sixth of the processor.
"""

from __future__ import annotations


def clear_mesh_caches() -> None:
    """Clear the caches, so that the process groups of the last case end. Versions of PyTorch may lack some."""
    import torch
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    for holder, name in (
        (propagator.propagate_op_sharding, "cache_clear"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear"),
    ):
        getattr(holder, name, lambda: None)()
