"""Check that the tensors of a target fill the parameters of modules: every byte, each once, and no copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dtckpt.checkpoint.leaves import as_leaf
from dtckpt.checkpoint.restoring.target import visit_target
from dtckpt.checkpoint.shards import named_tensors
from dtckpt.errors import LayoutError, capped


def validate_covered(target: Any, modules: Sequence[nn.Module]) -> None:
    """Check that a target fills the parameters and persistent buffers of modules. Local.

    Args:
        target: As for `dtckpt.restore`.
        modules: The modules.

    Raises:
        LayoutError: Bytes of a parameter are in no tensor of the target, or a tensor of the target is in no parameter.
    """
    wanted = {name: tensor for module in modules for name, tensor in _persistent(module)}
    cells = {_place(memory): np.zeros(memory.untyped_storage().nbytes(), bool) for memory in _memories(wanted.values())}
    strangers = []
    for name, tensor in visit_target(target).tensors:
        for memory in _memories([tensor]):
            map_of_storage = cells.get(_place(memory))
            if map_of_storage is None:
                strangers.append(name)
            else:
                _cells_of(map_of_storage, memory)[...] = True
    left = [
        name for name, tensor in wanted.items() for m in _memories([tensor]) if not _cells_of(cells[_place(m)], m).all()
    ]
    if strangers or left:
        texts = []
        if strangers:
            texts.append(
                f"tensors {capped(map(repr, strangers))} are in no parameter: they are copies that the model never "
                "reads; pass views of the parameters"
            )
        if left:
            texts.append(
                f"parameters {capped(map(repr, left))} are filled in part or not at all; add them to the target"
            )
        raise LayoutError(f"the target does not cover the model: {'; '.join(texts)}")


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    kept = {id(tensor) for tensor in module.state_dict(keep_vars=True).values() if isinstance(tensor, torch.Tensor)}
    return ((name, tensor) for name, tensor in named_tensors(module) if id(tensor) in kept)


def _memories(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield from (memory for memory in as_leaf(tensor, "").components if memory.numel())


def _place(memory: torch.Tensor) -> tuple[torch.device, int]:
    return memory.device, memory.untyped_storage().data_ptr()


def _cells_of(cells: np.ndarray[Any, Any], memory: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of a storage's map, one cell a byte, for the bytes of a tensor."""
    itemsize = memory.itemsize
    strides = (*(step * itemsize for step in memory.stride()), 1)
    start = memory.storage_offset() * itemsize
    return np.ndarray((*memory.shape, itemsize), bool, cells, start, strides)
