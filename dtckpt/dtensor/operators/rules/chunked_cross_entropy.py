"""The loop of PyTorch's chunked ``linear_cross_entropy``: it runs on whole tensors, on every device.

The loop is a Python function that writes to plain buffers of its own. Forward, it is part of a custom operator, which
runs on components. The backward pass calls it with DTensors; so the function here takes its place.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dtckpt.dtensor.operators.call import replace_tensors, tensors_in
from dtckpt.dtensor.operators.operands import common_mesh, replicated_layout, to_replicated
from dtckpt.dtensor.operators.plain_tensors import to_dtensors
from dtckpt.dtensor.operators.plans import results_without_devices
from dtckpt.dtensor.tensor import DTensor

_MODULE = "torch.nn.modules.linear_cross_entropy"
"""PyTorch 2.12 and older lack it."""
_LOOP = "_linear_cross_entropy_batch_chunked_accumulator"

_module: Any = import_module(_MODULE) if find_spec(_MODULE) else None
_loop: Any = getattr(_module, _LOOP, None)


def _on_every_device(*args: Any, **kwargs: Any) -> Any:
    """Run the loop on whole tensors on every device, if there is a DTensor among the arguments.

    Collective: Over the mesh's clients, unless all operands are replicated.
    """
    tensors = list(tensors_in((*args, *kwargs.values())))
    dtensors = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not dtensors:
        return _loop(*args, **kwargs)
    mesh = common_mesh("linear_cross_entropy", dtensors)
    operands = to_replicated(to_dtensors(tensors, mesh))
    if not operands[0].components:
        return results_without_devices(_loop, args, kwargs, operands)
    outputs = []
    for components in zip(*(operand.components for operand in operands), strict=True):
        local_args, local_kwargs = replace_tensors(args, kwargs, components)
        outputs.append(_loop(*local_args, **local_kwargs))
    return tuple(
        DTensor(parts, replicated_layout(mesh, parts[0].ndim), parts[0].shape, parts[0].dtype)
        for parts in zip(*outputs, strict=True)
    )


if _loop is not None:
    setattr(_module, _LOOP, wraps(_loop)(_on_every_device))
