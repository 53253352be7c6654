"""`ObjectStates`: the states of the objects in the state tree of a client.

Two kinds of objects come last. Optimizers, as the names of their parameters are those of tensors of the tree. And the
states of random number generators, as the ``state_dict()`` of another object may draw a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.leaves import is_stateful
from dtckpt.checkpoint.parameter_names import ParameterNames, named_state
from dtckpt.checkpoint.per_client import ClientNumber, PerClient
from dtckpt.checkpoint.rng_state import RngState
from dtckpt.checkpoint.saving.replica_rules import Roles
from dtckpt.checkpoint.shards import shard_marks, sharded_state
from dtckpt.format.containers import ClientValues
from dtckpt.format.tree import Late


class ObjectStates:
    """Returns the states of the objects in one tree, for `dtckpt.format.tree.flatten`.

    Args:
        client: The client's place among those that save.

    Attributes:
        roles: The roles of the tensors in the states that were returned.
    """

    def __init__(self, client: ClientNumber) -> None:
        self._client = client
        self._marks = shard_marks()
        self.roles = Roles()
        self._modules: list[tuple[nn.Module, str]] = []
        self._names: ParameterNames | None = None

    def __call__(self, value: Any, path: str) -> Any:
        """Return the state of an object at a path, and any other value itself."""
        if isinstance(value, PerClient):
            return ClientValues({self._client.number: value.value}, self._client.num_clients)
        if not is_stateful(value):
            return value
        if isinstance(value, Optimizer):
            return Late(0, lambda leaves: self._noted(value, named_state(value, self._names_of(leaves))))
        if isinstance(value, RngState):
            return Late(1, lambda _: value.state_dict())
        if isinstance(value, nn.Module):
            self._modules.append((value, path))
        return self._noted(value, value.state_dict())

    def _noted(self, owner: Any, state: Any) -> Any:
        """Return an object's state with `Shards` in place of marked tensors, and note the roles of its tensors."""
        state = sharded_state(owner, state, self._marks)
        self.roles.note(owner, state)
        return state

    def _names_of(self, leaves: Mapping[str, Any]) -> ParameterNames:
        # Once: some jobs have an optimizer for each parameter.
        if self._names is None:
            self._names = ParameterNames()
            for module, path in self._modules:
                self._names.add_module(module, path)
            self._names.add_tensors(leaves)
        return self._names
