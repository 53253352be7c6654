"""Refuse the parts of PyTorch that need a mesh of PyTorch's own class: FSDP, its DTensors and tensor parallelism.

These parts accept any mesh at first, and fail later, in the middle of a step. So a mesh checks its caller when it is
asked for something that they need.
"""

from __future__ import annotations

import sys

from dtckpt.errors import MeshTypeError

_PARTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")


def validate_caller(what: str, depth: int = 2) -> None:
    """Check that none of these parts of PyTorch calls.

    Args:
        what: The name that is asked for.
        depth: How many calls lie between the caller in question and this function.

    Raises:
        MeshTypeError: One of them does.
    """
    caller = str(sys._getframe(depth).f_globals.get("__name__"))
    if caller.startswith(_PARTS):
        raise MeshTypeError(
            f"{caller} asks for {what} of a mesh of dtckpt, and works with a DeviceMesh of PyTorch only; pass "
            "mesh.to_device_mesh(), or use dtckpt.dtensor, which takes both"
        )
