"""The value of a pickle as a state tree (`dtckpt.format.tree`): containers, plain values, tensors and arrays of numpy.

A closed table says what a name in the pickle means (`dtckpt.checkpoint.foreign.pickle_names`). A value of another class
is left out of the tree, and noted with the reason. So a checkpoint that holds one odd value can be read, but for that
value. In a list or tuple nothing can be left out; there the next dict above lacks the whole list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtckpt.checkpoint.foreign import pickle_names
from dtckpt.checkpoint.foreign.pickle_syntax import (
    NODE_NBYTES,
    STEP_NBYTES,
    TENSOR_NBYTES,
    Global,
    Pairs,
    PickledCall,
    ReadBudget,
)
from dtckpt.checkpoint.foreign.pickled_tensors import StorageView, is_tensor, tensor_view
from dtckpt.checkpoint.foreign.pickled_values import plain_value, read_array, refusal
from dtckpt.errors import CheckpointCorruptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import CONTAINERS
from dtckpt.format.hash_work import validate_hashes
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import encode_hashable, encode_value, is_plain

Leaf = StorageView | np.ndarray[Any, Any]

_SMALL_INTS: list[trees.Node] = [{"value": number} for number in range(257)]
_CONSTANTS: dict[bool | None, trees.Node] = {value: {"value": value} for value in (None, False, True)}


@dataclass(slots=True, eq=False)
class PickledTree:
    """A state tree that was pickled.

    Args:
        node: Its structure.
        leaves: Its tensors and arrays of numpy, by name.
        refused: By path, why a value is not in the tree.
    """

    node: trees.Node
    leaves: dict[str, Leaf]
    refused: dict[str, TreeError]


def read_tree(value: Any, path: tuple[str, ...] = (), budget: ReadBudget | None = None) -> PickledTree:
    """Return the tree of a pickle's value.

    Args:
        value: The value, as `dtckpt.checkpoint.foreign.pickle_syntax.parse_pickle` returns it.
        path: The segments of names that lead to the value, if it is a part of a larger tree.
        budget: Bounds the bytes of the objects made: the budget that the pickle was parsed with. Default: the budget of
            a short pickle.

    Raises:
        TreeError: The value cannot be in a tree.
        CheckpointCorruptError: The value is too deep, contains itself, or makes more than the budget has; or a tensor
            in it is malformed.
    """
    walk = _Walk(ReadBudget("/".join(path) or "the state tree") if budget is None else budget)
    return PickledTree(walk.node(value, path), walk.leaves, walk.refused)


@dataclass(slots=True)
class _Walk:
    """A walk through the value of a pickle."""

    budget: ReadBudget
    leaves: dict[str, Leaf] = field(default_factory=dict)
    refused: dict[str, TreeError] = field(default_factory=dict)

    def node(self, value: Any, path: tuple[str, ...]) -> trees.Node:
        """Return the node of a value, and note the tensors below it."""
        kind = type(value)
        # Most values of long lists are such, and their nodes may be shared.
        if value is None or kind is bool or (kind is int and 0 <= value < len(_SMALL_INTS)):
            self.budget.take(STEP_NBYTES)
            return _SMALL_INTS[value] if kind is int else _CONSTANTS[value]
        where = "/".join(path)
        self.budget.take(NODE_NBYTES + len(where))
        # Also the end of the walk through a value that contains itself.
        if len(path) > trees.MAX_DEPTH:
            raise CheckpointCorruptError(
                f"the checkpoint's state tree is deeper than {trees.MAX_DEPTH} levels at {where[:200]!r}; does it "
                "contain itself?"
            )
        if kind is Pairs:
            return self._dict(value, path)
        if kind is list or kind is tuple:
            return {kind.__name__: self._children(value, path)}
        if is_tensor(value):
            return {"tensor": self._leaf(tensor_view(value, where), where)}
        if kind is PickledCall and value.name in pickle_names.ARRAYS:
            return {"ndarray": self._leaf(read_array(value, where, self.budget), where)}
        if kind is PickledCall and value.name in pickle_names.CONTAINERS:
            return self._container(value, path)
        plain = plain_value(value, where, self.budget)
        if not is_plain(plain):
            raise refusal(value, where)
        return encode_value(plain, where)

    def _leaf(self, leaf: Leaf, where: str) -> str:
        """Note a tensor or an array; return its name, which is chosen as `dtckpt.format.tree.flatten` does."""
        name = where or "value"
        if name in self.leaves:
            raise TreeError(f"two tensors of the checkpoint would both be named {name!r}")
        self.budget.take(TENSOR_NBYTES)
        self.leaves[name] = leaf
        return name

    def _children(self, values: Iterable[Any], path: tuple[str, ...]) -> list[trees.Node]:
        return [self.node(value, (*path, str(position))) for position, value in enumerate(values)]

    def _dict(self, pairs: Sequence[tuple[Any, Any]], path: tuple[str, ...]) -> trees.Node:
        """Return the node of a dict without the items that cannot be read, which are noted."""
        where = "/".join(path)
        items: dict[Any, list[Any]] = {}
        keys = [plain_value(key, where, self.budget) for key, _ in pairs]
        nodes = [key if type(key) is str else encode_hashable(key, where) for key in keys]
        validate_hashes(keys)
        for name, encoded, (_, value) in zip(keys, nodes, pairs, strict=True):
            below = (*path, name_of_key(str(name)))
            held = len(self.leaves)
            try:
                # As in Python, the last one of two equal keys counts.
                items[name] = [name if type(name) is int else encoded, self.node(value, below)]
            except TreeError as error:
                for lost in list(self.leaves)[held:]:
                    del self.leaves[lost]
                self.refused["/".join(below)] = error
        return {"dict": list(items.values())}

    def _container(self, call: PickledCall, path: tuple[str, ...]) -> trees.Node:
        where = "/".join(path)
        kind = pickle_names.CONTAINERS[call.name]
        try:
            argument, items = _READERS[kind](call)
            # Made once without items, so that an argument that the table lacks is found here.
            CONTAINERS[kind].make(argument, [] if CONTAINERS[kind].base is list else {})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise refusal(call, where, f"its {kind} cannot be made anew: {error}") from error
        below = {"list": self._children(items, path)} if CONTAINERS[kind].base is list else self._dict(items, path)
        return {"type": [kind, argument, below]}


def _read_dict(call: PickledCall) -> tuple[None, Sequence[tuple[Any, Any]]]:
    """Return the items of an ``OrderedDict`` or a ``Counter``, which are set one by one or are its argument."""
    given = call.arguments[0] if call.arguments else []
    return None, [*((key, value) for key, value in given), *call.pairs]


def _read_defaultdict(call: PickledCall) -> tuple[str | None, Sequence[tuple[Any, Any]]]:
    factory = call.arguments[0] if call.arguments else None
    if factory is None:
        return None, call.pairs
    module, _, name = factory.name.rpartition(".")
    if type(factory) is not Global or module not in pickle_names.BUILTINS:
        raise ValueError(f"only code could make its factory {factory.name}")
    return _PYTHON_2.get(name, name), call.pairs


def _read_deque(call: PickledCall) -> tuple[int | None, list[Any]]:
    given, maxlen = (*call.arguments, None, None)[:2]
    if maxlen is not None and type(maxlen) is not int:
        raise TypeError("the length is no int")
    return maxlen, [*(given or ()), *call.items]


def _read_namespace(call: PickledCall) -> tuple[None, Sequence[tuple[Any, Any]]]:
    state = Pairs() if call.state is None else call.state
    if type(state) is not Pairs or any(type(name) is not str for name, _ in state):
        raise TypeError("its state is no dict of names")
    return None, state


_PYTHON_2 = {"long": "int", "unicode": "str"}
"""Names that protocol 2 has for classes of Python 3."""

_READERS = {
    "OrderedDict": _read_dict,
    "Counter": _read_dict,
    "defaultdict": _read_defaultdict,
    "deque": _read_deque,
    "SimpleNamespace": _read_namespace,
}
"""Functions that return the argument and the items of a container."""
