"""Which copies of tensors may differ between clients, by the object that holds them and by the options of a save.

Data parallelism keeps parameters equal on all clients, and leaves buffers to each: a BatchNorm has running statistics
of the batches that its client has seen. So a difference between parameters is a defect, and a difference between such
buffers is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, CopyRule, SavePlan
from dtckpt.errors import ConfigError, capped

_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules whose buffers are statistics of the batches that a client has seen. A SyncBatchNorm's are of all clients."""


class Role(NamedTuple):
    """The part that a tensor of a state tree has in training.

    Args:
        is_parameter: The tensor is a parameter, or state that an optimizer keeps of a parameter.
        may_differ: The tensor is a buffer that each client keeps for itself.
    """

    is_parameter: bool = False
    may_differ: bool = False


@dataclass(slots=True, eq=False)
class Roles:
    """The roles of the tensors in the states of modules and optimizers."""

    # By id, with the tensor itself, so that no other object gets its id.
    _parameters: dict[int, Any] = field(default_factory=dict)
    _own_buffers: dict[int, Any] = field(default_factory=dict)

    def note(self, owner: Any, state: Any) -> None:
        """Note the tensors in an object's state.

        Args:
            owner: The object.
            state: Its state.
        """
        if not isinstance(state, Mapping):
            return
        if isinstance(owner, nn.Module):
            names = (name for name, _ in owner.named_parameters(remove_duplicate=False))
            self._parameters |= {id(state[name]): state[name] for name in names if name in state}
            self._own_buffers |= {id(state[name]): state[name] for name in _own_buffers(owner) if name in state}
        elif isinstance(owner, Optimizer):
            of_parameters = (own for own in state.get("state", {}).values() if isinstance(own, Mapping))
            self._parameters |= {id(value): value for own in of_parameters for value in own.values()}

    def of(self, leaf: Any) -> Role:
        """Return the role of a tensor of the tree."""
        is_parameter = id(leaf) in self._parameters or (isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return Role(is_parameter, type(leaf) is torch.Tensor and id(leaf) in self._own_buffers)


def _own_buffers(module: nn.Module) -> Iterator[str]:
    """Yield the names of the buffers that each client keeps for itself."""
    outer: list[str] = []
    for name, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        is_inside = any(prefix.startswith(each) for each in outer)
        if not is_inside and _is_data_parallel(inner):
            outer.append(prefix)
            is_inside = True
        if is_inside or isinstance(inner, _STATISTICS):
            yield from (prefix + buffer for buffer, _ in inner.named_buffers(recurse=False, remove_duplicate=False))


def _is_data_parallel(module: nn.Module) -> bool:
    # A module can be one of FSDP2 only if the program has imported that already.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, DistributedDataParallel) or (fsdp is not None and isinstance(module, fsdp.FSDPModule))


def validate_rules_used(options: SaveOptions, plan: SavePlan) -> None:
    """Refuse patterns of ``check_replicas`` that match no tensor of any client, which most likely are typos.

    Args:
        options: The options of the save.
        plan: Its plan.

    Raises:
        ConfigError: A pattern matches no tensor.
    """
    if unused := _unused(tuple(pattern for pattern, _ in options.replica_rules), plan):
        raise ConfigError(
            f"option check_replicas: no tensor matches {capped(map(repr, unused))}; expected globs over the names of "
            "the tensors that are saved"
        )


@lru_cache(maxsize=KEPT_STRUCTURES)
def _unused(patterns: tuple[str, ...], plan: SavePlan) -> list[str]:
    return [pattern for pattern in patterns if not any(fnmatchcase(each.name, pattern) for each in plan.tensors)]


class ReplicaRules:
    """The rules of one save, in order: the first whose pattern matches a tensor's name decides.

    Args:
        options: Their ``check_replicas``.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._rules = options.replica_rules

    def choose(self, name: str, role: Role) -> CopyRule:
        """Return the rule for different copies of a tensor."""
        chosen = next((is_equal for pattern, is_equal in self._rules if fnmatchcase(name, pattern)), None)
        if chosen is None:
            return CopyRule.NOTED if role.may_differ else CopyRule.EQUAL
        return CopyRule.EQUAL if chosen else CopyRule.FREE
