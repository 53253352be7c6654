"""Tensor parallelism of modules: PyTorch's ``torch.distributed.tensor.parallel``, under the same names.

A style defines how to split a module's parameters over a mesh of one axis, and the layouts of its inputs and outputs.
`parallelize_module` applies styles to a module and its submodules.
"""

from dtckpt.dtensor.parallel.loss_parallel import loss_parallel
from dtckpt.dtensor.parallel.parallelize_module import parallelize_module
from dtckpt.dtensor.parallel.prepare_module import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from dtckpt.dtensor.parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
