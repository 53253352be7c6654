"""Track the running module: forward, backward, or forward again in a backward pass (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dtckpt.comm import torch_private
from dtckpt.comm.torch_private import tree_leaves
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.placement import Placement

GLOBAL = "Global"
"""Stands for all modules together, and for code outside of any module."""


@dataclass(frozen=True, slots=True)
class ModulePosition:
    """The module that the program runs.

    Args:
        module: Name of the innermost module.
        parents: The modules around it, the outermost first; `GLOBAL` is one of them, unless it is the module itself.
        is_backward: Whether a backward pass runs.
        is_recomputing: Whether that pass runs a module forward again.
    """

    module: str
    parents: tuple[str, ...]
    is_backward: bool
    is_recomputing: bool


@dataclass(slots=True)
class ModuleFacts:
    """Facts about a module that ran.

    Args:
        name: The class of the outermost module, then attribute names.
        type_name: Its class.
        parents: The modules around it, the outermost first.
        children: Names of the modules that ran in it, in the order of their first runs.
        parameters: Its own parameters, by name.
    """

    name: str
    type_name: str
    parents: tuple[str, ...] = ()
    children: list[str] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def placements(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of its parameters that are DTensors."""
        return {name: each.placements for name, each in self.parameters.items() if isinstance(each, DTensor)}


class ModuleTracker:
    """Tracks the modules that run while `tracking`, by hooks that hold for all modules.

    The hooks run no operator on a module's tensors. Hooks on the autograd nodes that made a module's inputs and outputs
    track the backward pass. If no input of a module needs a gradient, the module counts as running until the pass
    enters another module, or ends.
    """

    def __init__(self) -> None:
        self.facts: dict[str, ModuleFacts] = {}
        self._reset()

    def _reset(self) -> None:
        self.facts.clear()
        self.facts[GLOBAL] = ModuleFacts(GLOBAL, "")
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._taken: set[str] = {GLOBAL}
        # Modules that run forward, each with the backward pass that it runs in, -1 for none.
        self._forward: list[tuple[str, int]] = []
        self._backward = GLOBAL
        # By module, the pass and the node of its last backward entry.
        self._turn: tuple[int, object] = (-1, None)
        self._run = object()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Forget all facts, and track the modules while the body runs."""
        self._reset()
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._run = object()  # hooks on nodes outlive the body, and do nothing from now on

    def position(self) -> ModulePosition:
        """Return the module that this thread runs."""
        this_pass = _backward_pass()
        running = [name for name, its_pass in self._forward if its_pass == this_pass]
        if running and this_pass == -1:
            *outer, name = running
            return ModulePosition(
                name, tuple(dict.fromkeys((GLOBAL, *(each for each in outer if each != name)))), False, False
            )
        if running:  # a recomputation does not start at the outermost module
            return ModulePosition(running[-1], self._around(running[-1]), True, True)
        if this_pass != -1 and this_pass == self._turn[0]:
            return ModulePosition(self._backward, self._around(self._backward), True, False)
        return ModulePosition(GLOBAL, (), this_pass != -1, False)

    def _around(self, name: str) -> tuple[str, ...]:
        """Return the modules around one, the outermost first."""
        return () if name == GLOBAL else (GLOBAL, *self.facts[name].parents)

    # --- forward --------------------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        name = self._name_of(module)
        this_pass = _backward_pass()
        parents = tuple(dict.fromkeys(outer for outer, its_pass in self._forward if its_pass == this_pass))
        if name not in self.facts:
            parents = tuple(outer for outer in parents if outer != name)
            self.facts[name] = ModuleFacts(name, type(module).__qualname__, parents)
            self.facts[parents[-1] if parents else GLOBAL].children.append(name)
        self.facts[name].parameters.update(module.named_parameters(recurse=False))
        self._forward.append((name, this_pass))
        self._on_gradients(inputs, lambda _node: self._leave_backward(name))

    def _leave(self, module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        name = self._names.get(module)
        names = [entered for entered, _ in self._forward]
        if name is None or name not in names:  # it was entered before tracking began
            return
        del self._forward[len(names) - 1 - names[::-1].index(name) :]
        self._on_gradients(outputs, lambda node: self._enter_backward(name, node))

    def _name_of(self, module: torch.nn.Module) -> str:
        if module not in self._names:
            root = self._free(type(module).__name__)
            for path, each in module.named_modules():
                self._names.setdefault(each, f"{root}.{path}" if path else root)
        return self._names[module]

    def _free(self, name: str) -> str:
        """Return a name that no other outermost module has: the second ``Linear`` is ``Linear_1``."""
        number, free = 0, name
        while free in self._taken:
            number += 1
            free = f"{name}_{number}"
        self._taken.add(free)
        return free

    # --- backward -------------------------------------------------------------------------------------------------

    def _on_gradients(self, tensors: Any, action: Callable[[object], None]) -> None:
        """Call ``action`` with the autograd node when the gradient of one of the tensors is complete; skip leaves."""
        run = self._run
        nodes = (tensor.grad_fn for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor))
        for key, node in {id(node): node for node in nodes if node is not None}.items():

            def act(_gradients: Any, key: int = key) -> None:
                if self._run is run:
                    action(key)

            node.register_prehook(act)

    def _enter_backward(self, name: str, node: object) -> None:
        turn = (_backward_pass(), node)
        if turn == self._turn and name in self._around(self._backward):
            return  # an inner module has the same output, and has been entered already
        self._backward, self._turn = name, turn

    def _leave_backward(self, name: str) -> None:
        if self._turn[0] == _backward_pass() and name in (self._backward, *self._around(self._backward)):
            self._backward = self._around(name)[-1]


def _backward_pass() -> int:
    """Return a number for the backward pass that this thread runs, -1 if it runs none."""
    return int(torch_private.current_graph_task())
