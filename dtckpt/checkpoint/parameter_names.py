"""Names of the parameters of optimizers: the names that their tensors have in the state tree.

``Optimizer.state_dict()`` numbers the parameters in the order in which the optimizer got them, and a checkpoint with
such numbers fits no other order. So a save writes names in their place::

    tree      {"model": model, "optimizer": optimizer}
    state     {0: {"exp_avg": …}}                     {"model/0.weight": {"exp_avg": …}}
    groups    [{"lr": 0.1, "params": [0]}]            [{"lr": 0.1, "params": ["model/0.weight"]}]
    tensor    optimizer/state/0/exp_avg               optimizer/state/model/0.weight/exp_avg
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dtckpt.checkpoint.low_bit_state import open_state
from dtckpt.checkpoint.optimizer_groups import is_numbered, own_names_of
from dtckpt.checkpoint.shards import Shards
from dtckpt.comm.torch_private import storage_id
from dtckpt.dtensor import DTensor, torch_interop
from dtckpt.format.names import name_of_key


class ParameterNames:
    """The names of tensors in one state tree, by the tensor."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[str]] = defaultdict(list)
        self._by_memory: dict[Hashable, list[str]] = defaultdict(list)

    def add_module(self, module: nn.Module, path: str) -> None:
        """Add the parameters of a module at a path; tied ones have several names."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._by_id[id(parameter)].append(f"{path}/{name_of_key(name)}" if path else name_of_key(name))

    def add_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Add tensors by name: a parameter in the same memory has the same name."""
        for name, value in tensors.items():
            if memory := memory_of(value):
                self._by_memory[memory].append(name)

    def of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a parameter, names of stored tensors first; empty if it is not in the tree."""
        stored = self._by_memory.get(memory_of(parameter), ())
        # A parameter that a module stores in another form, or not at all, has the name within the module.
        return tuple(dict.fromkeys((*stored, *self._by_id.get(id(parameter), ()))))


def memory_of(value: torch.Tensor | np.ndarray[Any, Any] | Shards) -> Hashable:
    """Return a key of a tensor's memory and strides: equal for tensors with the same elements, empty without memory.

    Empty also for an array of numpy: a tree has no parameters in such.
    """
    tensor = value.tensor if isinstance(value, Shards) else value
    if not isinstance(tensor, torch.Tensor):
        return ()
    if torch_interop.is_torch_dtensor(tensor):
        parts: tuple[torch.Tensor, ...] = (tensor._local_tensor,)  # type: ignore[attr-defined]
    else:
        parts = tensor.components if isinstance(tensor, DTensor) else (tensor,)
    # By the storage and not by the address: the empty shard of a parameter has no address.
    storages = [storage_of(each) for each in parts]
    if 0 in storages:
        return ()
    return tuple(
        (storage, each.storage_offset(), tuple(each.shape), each.stride())
        for storage, each in zip(storages, parts, strict=True)
    )


def storage_of(tensor: torch.Tensor) -> int:
    """Return the id of a plain tensor's storage; 0 for a tensor without one."""
    if is_lazy(tensor):
        return 0
    try:
        return storage_id(tensor)
    # PyTorch raises either, by the kind of the tensor: sparse tensors, and tensors inside of torch.func's transforms.
    except (NotImplementedError, RuntimeError):
        return 0


def named_state(optimizer: Optimizer, names: ParameterNames) -> Any:
    """Return the state of an optimizer by the names of its parameters.

    A parameter that is in no module or container of the tree has the name that the optimizer got with it, else its
    number. The state of an optimizer whose class uses other keys is returned as it is.
    """
    state, _ = open_state(optimizer.state_dict())
    if not is_numbered(state, len(parameters_of(optimizer))):
        return state
    keys = _keys_of_parameters(optimizer, names)
    return {
        **state,
        # Some optimizers have state of no parameter, under keys that are not numbers.
        "state": {keys[key] if type(key) is int else key: each for key, each in state["state"].items()},
        "param_groups": [
            {**group, "params": [keys[key] for key in group["params"]]} for group in state["param_groups"]
        ],
    }


def parameters_of(target: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in its order; empty for any other object."""
    if not isinstance(target, Optimizer):
        return []
    return [parameter for group in target.param_groups for parameter in group["params"]]


def name_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Give an optimizer the names that its parameters have in a module, as if it had been made with them."""
    names = ParameterNames()
    names.add_module(module, "")
    for group in optimizer.param_groups:
        found = [names.of(parameter)[:1] for parameter in group["params"]]
        if all(found):
            group["param_names"] = [name for (name,) in found]


def _keys_of_parameters(optimizer: Optimizer, names: ParameterNames) -> list[str | int]:
    """Return the key of each parameter: its name, or its number."""
    keys: dict[str | int, None] = {}
    for number, (parameter, own) in enumerate(
        zip(parameters_of(optimizer), own_names_of(optimizer.param_groups), strict=True)
    ):
        candidates = (*names.of(parameter)[:1], *([own] if own else []))
        keys[next((name for name in candidates if name not in keys), number)] = None
    return list(keys)
